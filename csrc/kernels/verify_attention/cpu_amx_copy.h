// verify_attention on the CPU with AMX: K and V of a tile, from the cache to where tiles are loaded from.
// Included by cpu_amx.h only.
#pragma once

#include "cpu_tile.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kTileRows = 16;  // of an AMX tile; its rows are 64 bytes
constexpr int kTileBf16 = 32 * kTileRows;
constexpr int kHalf = 32;  // keys that one multiplication of weights and V takes

// Channels of a row as tiles take them.
constexpr int64_t whole_tiles(int64_t channels) {
    return (channels + 31) / 32 * 32;
}

// Up to 32 channels; zeros behind them.
SPECDEC_SIMD __m512i load_channels(const bf16* at, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(at);
    return _mm512_maskz_loadu_epi16((1u << left) - 1, at);
}

// Thirty-two e4m3 codes, as bf16: a byte of it each from a table of magnitudes.
struct Widened {
    alignas(64) uint8_t low[128], high[128];

    constexpr Widened() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            const int exponent = code >> 3, mantissa = code & 7;
            int bits = ((exponent + 120) << 7) | mantissa << 4;
            if (code == 127) bits = 0x7fc0;
            if (exponent == 0) {  // mantissa * 2^-9
                const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
                bits = mantissa == 0 ? 0 : ((118 + top) << 7) | (mantissa << (7 - top) & 0x7f);
            }
            low[code] = static_cast<uint8_t>(bits);
            high[code] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
constexpr Widened kWidened;

SPECDEC_SIMD __m512i widen_codes(__m256i codes) {
    const __m512i x = _mm512_cvtepu8_epi16(codes);  // the high byte looks up 0, which is 0
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kWidened.low), x,
                                                 _mm512_load_si512(kWidened.low + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kWidened.high), x,
                                                  _mm512_load_si512(kWidened.high + 64));
    const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi16(0x80));
    return _mm512_or_si512(low, _mm512_slli_epi16(_mm512_or_si512(high, sign), 8));
}
SPECDEC_SIMD __m512i load_channels(const f8e4m3* at, int64_t left) {
    const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    return widen_codes(_mm256_maskz_loadu_epi8(mask, at));
}

// Sixteen keys as the rows of a left factor.
struct KeyStrip {
    const bf16* at;
    int64_t bytes;  // from row to row
};

// Where they lie when that will do, in one page and in whole tiles, else a copy at `room`
// [16][whole_tiles(D)], as of an fp8 cache always. An absent key is zeros.
template <class C>
inline KeyStrip key_strip(const View<const C, 4>& cache, const Rows<C>& rows, const Places& places,
                          int key, bf16* room) {
    const int64_t head_dim = cache.size[3], width = whole_tiles(head_dim);
    if constexpr (std::is_same_v<C, bf16>) {
        const bool together = (places.present >> key & 0xffff) == 0xffff &&
                              places.page[key] == places.page[key + kTileRows - 1];
        if (together && width == head_dim) return {rows.at[key], 2 * cache.stride[1]};
    }
    for (int i = 0; i < kTileRows; ++i) {
        for (int64_t d = 0; d < width; d += 32) {
            _mm512_store_si512(room + i * width + d,
                               load_channels(rows.at[key + i] + d, head_dim - d));
        }
    }
    return {room, 2 * width};
}

// V of keys 0 .. count-1 (zeros from there to a multiple of 32) with neighbouring keys interleaved, to
// [2 halves][Dv / 16][16 pairs][16 channels][2]. Interleaving inside the 128-bit parts of a vector, as
// the instruction does, leaves the channels of every 32 in another order: 0-3, 8-11, 16-19, 24-27, then
// the rest.
template <class C>
inline void interleave_values(const Rows<C>& rows, int64_t v_dim, int count, bf16* values) {
    const int64_t width = whole_tiles(v_dim);
    const int end = (count + kHalf - 1) / kHalf * kHalf;
    for (int key = 0; key < end; key += 2) {
        const C *even = rows.at[key], *odd = rows.at[key + 1];
        bf16* to = values + key / kHalf * kHalf * width + key % kHalf / 2 * 32;
        for (int64_t d = 0; d < width; d += 32, to += 2 * kTileBf16) {
            const __m512i a = load_channels(even + d, v_dim - d);
            const __m512i b = load_channels(odd + d, v_dim - d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + kTileBf16, _mm512_unpackhi_epi16(a, b));
        }
    }
}

// Thirty-two outputs in that order, times `factor`, to `left` of them in their own.
SPECDEC_SIMD void store_channels(const float* at, float factor, int64_t left, bf16* out) {
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_set1_ps(factor));
    const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(at + 16), _mm512_set1_ps(factor));
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    alignas(64) float channels[32];
    _mm512_store_ps(channels, _mm512_permutex2var_ps(x, low, y));
    _mm512_store_ps(channels + 16,
                    _mm512_permutex2var_ps(x, _mm512_add_epi32(low, _mm512_set1_epi32(8)), y));
    const int64_t count = left < 32 ? left : 32;
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<bf16>(channels[i] + 0.0f);
}

// Brings rows of keys first .. last-1 of one head from the second cache into the first.
template <class C>
inline void fetch_rows(const Rows<C>& rows, int64_t channels, int first, int last) {
    constexpr int kLine = 64 / sizeof(C);
    for (int key = first; key < last; ++key) {
        for (int64_t d = 0; d < channels; d += kLine) __builtin_prefetch(rows.at[key] + d, 0, 3);
    }
}

// Asks for rows of keys first .. last-1 of a tile that comes later, of all heads, in the order of their
// addresses: neighbouring heads lie side by side, and so the processor's own prefetchers join in.
template <class C>
inline void prefetch_keys(const View<const C, 4>& cache, int64_t first_head, int64_t heads,
                          const Places& places, int first, int last) {
    const int64_t bytes = cache.size[3] * sizeof(C);
    for (int key = first; key < last; ++key) {
        if ((places.present >> key & 1) == 0) continue;
        const C* row = cache.data + first_head * cache.stride[2] +
                       places.page[key] * cache.stride[0] + places.offset[key] * cache.stride[1];
        for (int64_t h = 0; h < heads; ++h, row += cache.stride[2]) {
            const char* at = reinterpret_cast<const char*>(row);
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
