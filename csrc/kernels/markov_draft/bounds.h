// Bounds of the bias W2[v] . y from 8-bit codes, by which greedy drafts leave out columns that cannot win.
//
// A table (prepare_markov of specdec_ext/prune.py) holds every row w of W2 turned and rounded: R w = s q + e,
// R orthogonal (signs, then Walsh-Hadamard transforms), q whole numbers of 8 bits. A step turns and rounds
// its vector: R y = t p + f. With dots of q and p, which are exact,
//     |w . y - s t (q . p)|  <=  |e| |y| + |s q| |f|
// as R keeps products. Every norm is rounded up; |e| holds the float32 error of the canonical sum and of s t (q . p)
// as well, relative to |w| |y|. Rounding is monotone, so z = U + w . y lies between U plus either bound.
//
// A tile of columns whose upper bound is below the largest lower bound of the row cannot hold the argmax. All others
// are computed as without a table. If the bounds prune nothing, that is the dense pass.
// Rows that are not finite or huge have |e| = inf, such vectors |y| = inf: bounds of inf or NaN prune nothing.
#pragma once

#include <cmath>

#include "types.h"

namespace specdec {

constexpr int64_t kMarkovTile = 16;          // columns
constexpr int64_t kMarkovTableWidth = 1024;  // of turned rows, at most
constexpr float kMarkovHugeNorm = 1e15f;     // products of these stay far from overflow

struct MarkovTable {
    const int8_t*
        codes;  // [tiles, width / 4, 16, 4] of q: column of the tile, then four of its numbers
    const float* rows;  // [tiles, 3, 16]: s, |e|, |s q|
    const float* turn;  // [width] signs, over the root of the size of their transform
    int64_t width;      // of turned rows: the rank, with zeros up to a multiple of 4
};

// A vector y, turned and rounded: its scale t, |y| and |f|.
struct TurnedVector {
    float scale, norm, lost;
};

// Transforms of a turned row: powers of two, the largest that fit, one after the other.
SPECDEC_HD int64_t transform_size(int64_t left) {
    int64_t size = 1;
    while (2 * size <= left) size *= 2;
    return size;
}

// From sums of squares, and the largest of the turned numbers. Squares that underflow lose less than 2^-56 to the norm.
SPECDEC_HD float norm_above(float squares) {
    return sqrtf(squares) * 1.0009765625f + 0x1p-56f;
}
SPECDEC_HD bool is_prunable(const TurnedVector& v) {
    return v.norm < kMarkovHugeNorm;
}
// t of numbers up to peak, and what to multiply them with; numbers that are as good as 0 have codes 0.
SPECDEC_HD float code_scale(float peak) {
    return peak > 1e-30f ? peak / 127.0f : 0.0f;
}
SPECDEC_HD float codes_per_unit(float peak) {
    return peak > 1e-30f ? 127.0f / peak : 0.0f;
}
SPECDEC_HD int code_of(float turned, float per_unit) {
    const float scaled = turned * per_unit;
    const float low = scaled > -127.0f ? scaled : -127.0f;  // NaN too
    return static_cast<int>(rintf(low < 127.0f ? low : 127.0f));
}
// With the error of turning y in float32.
SPECDEC_HD float lost_above(float squares, float norm) {
    return norm_above(squares) + norm * 0x1p-20f;
}

// Below all that underflow can do to a bound.
constexpr float kMarkovUnderflow = 0x1p-90f;

}  // namespace specdec
