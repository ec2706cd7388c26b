// verify_attention on the CPU for bf16 pairs: K and V of a tile, from the cache to where tiles are loaded from.
// Included by cpu_pairs.h only.
#pragma once

#include "cpu_pair_tiles.h"
#include "cpu_narrow.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kHalf = 32;  // keys that one multiplication of weights and V takes

// Asks for the rows of K and V of the tile that comes next, of all heads of a group, a few cache lines at
// every step of this one: memory then works while the tiles multiply. In the order of their addresses,
// as neighbouring heads lie side by side and the processor's own prefetchers join in.
class Ahead {
  public:
    template <class C>
    Ahead(const View<const C, 4>& k, const View<const C, 4>& v, int64_t head, int64_t heads,
          const Places& places)
        : part_{Prefetch(k, head, heads, places), Prefetch(v, head, heads, places)} {}
    template <int Lines>
    SPECDEC_SIMD void step() {
        Prefetch& part = part_[now_];
#pragma GCC unroll 8
        for (int i = 0; i < Lines; i += 2) part.step<2>();  // a row may be as short
        if (part.done()) now_ = 1;
    }

  private:
    Prefetch part_[2];
    int now_ = 0;
};

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
inline void interleave_values(const Rows<C>& rows, int64_t v_dim, int count, Ahead& ahead,
                              bf16* values) {
    const int64_t width = whole_tiles(v_dim);
    const int end = (count + kHalf - 1) / kHalf * kHalf;
    for (int key = 0; key < end; key += 2) {
        const C *even = rows.at[key], *odd = rows.at[key + 1];
        bf16* to = values + key / kHalf * kHalf * width + key % kHalf / 2 * 32;
        ahead.step<4>();
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

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
