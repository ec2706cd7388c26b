// What the probability of a token is: constants and small functions shared by CPU and CUDA kernels.
//
// A row of logits x with temperature T has the law
//     p(v) = 2^((x[v] - max) * c - l),  c = log2(e) / T,  l = log2(sum_v 2^((x[v] - max) * c)).
// Differences to the row's maximum, and not x * c itself: the subtraction keeps the exponent's
// absolute error near 1e-7 wherever p matters, also at temperatures where x * c has lost its
// fraction, and no logit can overflow. Target p and draft q use the same function, so that equal
// logits and temperatures give bitwise equal p and q, and a residual of exactly zero mass.
//
// Sums run over absolute vocabulary tiles: per tile (max, sum of 2^((x - tile max) * c)), then
// tiles from left to right. Neither threads nor blocks enter.
#pragma once

#include "types.h"

namespace specdec {

constexpr int64_t kVocabTile = 4096;
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;
// A residual with less mass than this is rounding noise: the token comes from p itself.
constexpr float kMinResidualMass = 1e-6f;

// Below the threshold (and for NaN, so that the result stays defined): argmax instead of a law.
SPECDEC_HD bool is_greedy(float temperature) {
    return !(temperature >= kGreedyTemperature);
}

// c of the formula above. Exactly kLog2E for temperature 1; kept above 0, so that a logit of -inf
// has probability 0 at an infinite temperature too.
SPECDEC_HD float exponent_scale(float temperature) {
    const float c = kLog2E / temperature;
    return c > 1e-30f ? c : 1e-30f;
}

// log2 of a normal x > 0 in plain double operations: the same bits everywhere, which no libm promises.
SPECDEC_HD double log2_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double z = (m - 1.0) / (m + 1.0), z2 = z * z;  // |z| < 0.172: atanh series to 1e-17
    double series = 0.0;
    for (int k = 21; k >= 1; k -= 2) series = series * z2 + 1.0 / k;
    return static_cast<double>(exponent) + 2.0 / kLn2 * (z * series);
}

SPECDEC_HD int64_t num_vocab_tiles(int64_t vocab_size) {
    return (vocab_size + kVocabTile - 1) / kVocabTile;
}

// A logit that makes its whole row unusable. -inf is normal: a token of probability 0.
SPECDEC_HD bool is_bad_logit(float x) {
    return !(x < bits_float(0x7f800000u));
}

}  // namespace specdec
