// Tiles of bf16 pairs, 16 rows of 64 bytes, as the products of the instruction sets `avx512bf16` and `amx`
// take them. For their CPU kernels only.
#pragma once

#include <atomic>

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBf16 = 32 * kTileRows;
constexpr int kPairs = 16;  // bf16 pairs of a row of a tile

#if defined(__AMX_BF16__)
// The thread's tile registers, for as long as this lives.
class TileRegisters {
  public:
    TileRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; ++i) {
            config.bytes[i] = 64;
            config.rows[i] = kTileRows;
        }
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

// The compiler does not know that tile instructions touch memory.
SPECDEC_SIMD void tile_fence() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
}
#else
struct TileRegisters {};
#endif

// Channels of a row as tiles take them.
constexpr int64_t whole_tiles(int64_t channels) {
    return (channels + 31) / 32 * 32;
}

// Up to 32 channels; zeros behind them.
SPECDEC_SIMD __m512i load_channels(const bf16* at, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(at);
    return _mm512_maskz_loadu_epi16((1u << left) - 1, at);
}

// As from_float<bf16>, lane by lane.
SPECDEC_SIMD __m256i round_to_bf16(__m512 x) {
    const __m512i bits = reinterpret_cast<__m512i>(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet));
}

// Turns 16 x 16 words.
SPECDEC_SIMD void turn(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
