// The k most probable tokens of rows of logits, with their log-probabilities: what draft trees are made of.
//   Row (b, f) has the law softmax(x / T) over all its columns; of these the first k by (logit descending,
//   column ascending) are wanted. A column of logit -inf, or without a target id, is not among them.
//   A row with NaN or +inf, or with nothing finite, has none.
//
// Everything is defined to the bit, for both backends and all instruction sets. c as in token_law.h:
//   tile    1024 columns: their maximum m, and the sum of 2^((x - m) c) by add_exp2. Column i of a tile has
//           place i % 256; a place adds up its columns from left to right, places then go by the tree 128, 64,
//           32, 16, and within sixteen 8, 4, 2, 1 apart
//   row     the tiles' sums times 2^((m - M) c), M the row's maximum: 32 lanes, lane l adds tiles l, l + 32, ..;
//           then the tree of lanes 16, 8, 4, 2 and 1 apart
//   logprob ln 2 ((x - M) c - log2(sum)), in double
#pragma once

#include "column_map.h"
#include "exact_math.h"
#include "order.h"
#include "view.h"

namespace specdec {

constexpr int64_t kTopTile = 1024;
constexpr int64_t kTopPlaces = 256;
constexpr int kMaxTop = 32;

struct TopRows {
    View<const void, 3> logits;  // [B, F, >= columns]
    DType dtype;
    int64_t columns;
    ColumnMap map;
    int k;                            // 1 .. kMaxTop
    const float* temperature;         // [B] or nullptr (= 1)
    View<const float, 2> row_scores;  // [B, F]; no data: 0. Rows that it kills are not read

    SPECDEC_HD int64_t batch() const { return logits.size[0]; }
    SPECDEC_HD int64_t rows() const { return logits.size[1]; }  // of a request
    SPECDEC_HD int64_t num_tiles() const { return (columns + kTopTile - 1) / kTopTile; }
    SPECDEC_HD const void* row(int64_t b, int64_t f) const {
        return static_cast<const char*>(logits.data) +
               (b * logits.stride[0] + f * logits.stride[1]) * dtype_size(dtype);
    }
    SPECDEC_HD float score(int64_t b, int64_t f) const {
        return row_scores.data == nullptr ? 0.0f : *row_scores.at(b, f);
    }
    // Greedy requests are ranked at temperature 1.
    SPECDEC_HD float scale(int64_t b) const {
        const float t = temperature == nullptr ? 1.0f : temperature[b];
        return exponent_scale(is_greedy(t) ? 1.0f : t);
    }
};

// sum + 2^x for x <= 0, in one step less than exp2_of: x is raised to -125, which is nothing beside a sum that
// holds a 1, and 2^f for |f| <= 1/2 is a polynomial of degree 5, relative error below 2e-7. Exactly 1 at 0.
constexpr float kAddExp2Floor = -125.0f;
constexpr float kAddExp2Round = kExp2Round + 127.0f;  // with the bias of an exponent
constexpr float kAddExp2Powers[] = {0x1.5bb9f4p-10f, 0x1.3cea84p-7f, 0x1.c6b754p-5f,
                                    0x1.ebf9bcp-3f,  0x1.62e42ap-1f, 1.0f};
SPECDEC_HD float add_exp2(float sum, float x) {
    constexpr float kPower0 = kAddExp2Powers[0], kPower1 = kAddExp2Powers[1],
                    kPower2 = kAddExp2Powers[2], kPower3 = kAddExp2Powers[3],
                    kPower4 = kAddExp2Powers[4], kPower5 = kAddExp2Powers[5];
    x = x > kAddExp2Floor ? x : kAddExp2Floor;
    float f = x + kAddExp2Round;
    const uint32_t exponent = float_bits(f) << 23;  // of f, only x's integer is left
    f = x - (f - kAddExp2Round);
    float p = fused(kPower0, f, kPower1);
    p = fused(p, f, kPower2);
    p = fused(p, f, kPower3);
    p = fused(p, f, kPower4);
    p = fused(p, f, kPower5);
    return fused(p, bits_float(exponent), sum);
}

// Neither NaN nor -inf.
SPECDEC_HD bool is_alive(float score) {
    return score > -bits_float(0x7f800000u);
}

// Largest column (+inf: the tile holds NaN or +inf) and sum of a tile.
struct alignas(8) TopTileStats {
    float max, sum;
};

// What a row's columns are measured against.
struct TopLaw {
    float max, scale;
    double log2_sum;

    SPECDEC_HD double logprob(float x) const {
        return kLn2 * (static_cast<double>(x - max) * static_cast<double>(scale) - log2_sum);
    }
};

// One rounding; never NaN, as both parts are below +inf or the first one is alive.
SPECDEC_HD float score_of(float parent, double logprob) {
    const float score = static_cast<float>(static_cast<double>(parent) + logprob);
    return is_alive(score) ? score : -bits_float(0x7f800000u);
}

}  // namespace specdec
