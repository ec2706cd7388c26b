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

SPECDEC_HD int64_t num_vocab_tiles(int64_t vocab_size) {
    return (vocab_size + kVocabTile - 1) / kVocabTile;
}

// A logit that makes its whole row unusable. -inf is normal: a token of probability 0.
SPECDEC_HD bool is_bad_logit(float x) {
    return !(x < bits_float(0x7f800000u));
}

}  // namespace specdec
