// verify_attention on the CPU for bf16 pairs: the products of a tile by vectors. Included by cpu_pairs.h
// only, for the instruction set `avx512bf16`.
//
// A pair of K (of weights) is spread over the lanes and multiplied with a vector of pairs of queries (of
// V), for so many keys (rows) at once that the sums fill half of the registers: more than the latency of
// an instruction asks for. Nothing is widened.
#pragma once

#include <cstring>

#include "cpu_pairs_copy.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// A pair in every lane.
SPECDEC_SIMD __m512bh spread_pair(const bf16* at) {
    int32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// acc[n][v] += a[n] . b[v] for 16 pairs: of a[n] those at n * a_step, AStep elements apart, spread; of b[v] a
// vector each, those of v + 1 kTileBf16 behind those of v.
template <int AStep, int N, int V>
SPECDEC_SIMD void add_pairs(const bf16* a, int64_t a_step, const bf16* b, __m512 (&acc)[N][V]) {
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
        __m512bh y[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            y[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(b + v * kTileBf16 + 32 * i));
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const __m512bh x = spread_pair(a + n * a_step + AStep * i);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) acc[n][v] = _mm512_dpbf16_ps(acc[n][v], x, y[v]);
        }
    }
}

// --- Scores --------------------------------------------------------------------------------------

// S^T of 32 keys and Blocks x 16 rows.
template <int Blocks>
SPECDEC_SIMD void score_tiles(const KeyStrip (&keys)[2], int64_t width, const bf16* queries,
                              int lanes, Ahead& ahead, float* scores) {
    constexpr int kKeys = 16 / Blocks;
    for (int key = 0; key < kHalf; key += kKeys) {
        const KeyStrip& strip = keys[key / kTileRows];
        const int64_t step = strip.bytes / 2;
        const bf16* at = strip.at + key % kTileRows * step;
        __m512 acc[kKeys][Blocks] = {};
        for (int64_t d = 0; d < width; d += 32) {
            ahead.step<Blocks == 2 ? 4 : 12>();
            const bf16* q = queries + d / 32 * (lanes / kTileRows) * kTileBf16;
#pragma GCC unroll 16
            for (int n = 0; n < kKeys; ++n) __builtin_prefetch(at + n * step + d + 32);
            add_pairs<2>(at + d, step, q, acc);
        }
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) {
#pragma GCC unroll 2
            for (int v = 0; v < Blocks; ++v) {
                _mm512_store_ps(scores + (key + n) * lanes + v * kTileRows, acc[n][v]);
            }
        }
    }
}

// --- Outputs -------------------------------------------------------------------------------------

template <int Rows>
SPECDEC_SIMD void load_outputs(const float* out, int64_t width, __m512 (&acc)[Rows][2]) {
#pragma GCC unroll 8
    for (int n = 0; n < Rows; ++n) {
        acc[n][0] = _mm512_loadu_ps(out + n * width);
        acc[n][1] = _mm512_loadu_ps(out + n * width + kTileRows);
    }
}
template <int Rows>
SPECDEC_SIMD void store_outputs(float* out, int64_t width, const __m512 (&acc)[Rows][2]) {
#pragma GCC unroll 8
    for (int n = 0; n < Rows; ++n) {
        _mm512_storeu_ps(out + n * width, acc[n][0]);
        _mm512_storeu_ps(out + n * width + kTileRows, acc[n][1]);
    }
}

// O of `rows` rows, of which there is memory for `lanes`, += weights . V of `count` keys.
inline void add_values(const bf16* weights, const bf16* values, int64_t width, int count, int rows,
                       int, Ahead& ahead, float* out) {
    constexpr int kRows = 8;
    const int halves = (count + kHalf - 1) / kHalf;
    for (int64_t d = 0; d < width; d += 32) {
        for (int m = 0; m < rows; m += kRows) {
            __m512 acc[kRows][2];
            load_outputs(out + m * width + d, width, acc);
            for (int half = 0; half < halves; ++half) {
                ahead.step<4>();
                add_pairs<2>(weights + m * kTile + half * kHalf, kTile,
                             values + (half * width + d) * kHalf, acc);
            }
            store_outputs(out + m * width + d, width, acc);
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
