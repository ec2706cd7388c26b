// verify_attention on the CPU for bf16 pairs: the products of a tile by AMX tiles. Included by cpu_pairs.h
// only, for the instruction set `amx`.
#pragma once

#include "cpu_pairs_copy.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- Scores --------------------------------------------------------------------------------------

// S^T of 32 keys and Blocks x 16 rows.
template <int Blocks>
SPECDEC_SIMD void score_tiles(const KeyStrip (&keys)[2], int64_t width, const bf16* queries,
                              int lanes, Ahead& ahead, float* scores) {
    const int64_t score_bytes = 4 * lanes;
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < width; d += 32) {
        ahead.step<16>();
        const bf16* q = queries + d / 32 * (lanes / kTileRows) * kTileBf16;
        _tile_loadd(4, keys[0].at + d, keys[0].bytes);
        _tile_loadd(5, keys[1].at + d, keys[1].bytes);
        _tile_loadd(6, q, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (Blocks == 2) {
            _tile_loadd(7, q + kTileBf16, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, scores, score_bytes);
    _tile_stored(1, scores + kTileRows * lanes, score_bytes);
    if constexpr (Blocks == 2) {
        _tile_stored(2, scores + kTileRows, score_bytes);
        _tile_stored(3, scores + kTileRows * lanes + kTileRows, score_bytes);
    }
    tile_fence();
}

// --- Outputs -------------------------------------------------------------------------------------

// O of Blocks x 16 rows and 32 channels += weights . V of `halves` x 32 keys.
template <int Blocks>
SPECDEC_SIMD void value_tiles(const bf16* weights, const bf16* values, int64_t width, int halves,
                              Ahead& ahead, float* out) {
    const int64_t out_bytes = 4 * width;
    _tile_loadd(0, out, out_bytes);
    _tile_loadd(1, out + kTileRows, out_bytes);
    if constexpr (Blocks == 2) {
        _tile_loadd(2, out + kTileRows * width, out_bytes);
        _tile_loadd(3, out + kTileRows * width + kTileRows, out_bytes);
    }
    for (int half = 0; half < halves; ++half) {
        ahead.step<16>();
        const bf16* v = values + half * kHalf * width;
        _tile_loadd(4, weights + half * kHalf, 2 * kTile);
        _tile_loadd(6, v, 64);
        _tile_loadd(7, v + kTileBf16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Blocks == 2) {
            _tile_loadd(5, weights + kTileRows * kTile + half * kHalf, 2 * kTile);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + kTileRows, out_bytes);
    if constexpr (Blocks == 2) {
        _tile_stored(2, out + kTileRows * width, out_bytes);
        _tile_stored(3, out + kTileRows * width + kTileRows, out_bytes);
    }
}

// O of `lanes` rows += weights . V of `count` keys.
inline void add_values(const bf16* weights, const bf16* values, int64_t width, int count, int,
                       int lanes, Ahead& ahead, float* out) {
    const int halves = (count + kHalf - 1) / kHalf;
    tile_fence();
    for (int64_t d = 0; d < width; d += 32) {
        int m = 0;
        for (; m + 2 * kTileRows <= lanes; m += 2 * kTileRows) {
            value_tiles<2>(weights + m * kTile, values + d * kHalf, width, halves, ahead,
                           out + m * width + d);
        }
        if (m < lanes) {
            value_tiles<1>(weights + m * kTile, values + d * kHalf, width, halves, ahead,
                           out + m * width + d);
        }
    }
    tile_fence();
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
