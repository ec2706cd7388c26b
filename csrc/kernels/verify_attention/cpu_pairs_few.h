// verify_attention on the CPU for bf16 pairs by vectors: up to four packed rows, as in plain decoding, where
// sixteen lanes of rows would be mostly empty. Included by cpu_pairs.h only, for `avx512bf16`.
//
// A vector of scores is 4 keys x 4 rows, lane 4 j + r of vector i is key 4 i + j of row r; K is turned so
// that 16 keys are the lanes of its products. Weights lie as pairs of keys: [32 pairs][4 rows][2].
// Every chain and tree of sums is that of cpu_pairs_dot.h and cpu_pairs_weights.h: the same bits.
#pragma once

#include "cpu_pairs_dot.h"
#include "cpu_pairs_weights.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kFewRows = 4;
constexpr int kFewVectors = kTile / 4;  // of scores

// Scores of the 16 keys of a strip, four vectors. Queries as cpu_pairs.h lays them, for 16 lanes.
SPECDEC_SIMD void score_few(const KeyStrip& strip, int64_t width, const bf16* queries, Ahead& ahead,
                            float* scores) {
    const int64_t step = strip.bytes / 2;
    __m512 acc[kFewRows] = {};
    for (int64_t d = 0; d < width; d += 32) {
        ahead.step<12>();
        const bf16* q = queries + d / 32 * kTileBf16;
        __m512i words[kTileRows];  // of key 4 (i % 4) + i / 4: turning below leaves keys in order
#pragma GCC unroll 16
        for (int i = 0; i < kTileRows; ++i) {
            words[i] = _mm512_loadu_si512(strip.at + (i % 4 * 4 + i / 4) * step + d);
        }
        turn(words);
#pragma GCC unroll 16
        for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
            for (int r = 0; r < kFewRows; ++r) {
                acc[r] = _mm512_dpbf16_ps(acc[r], reinterpret_cast<__m512bh>(words[i]),
                                          spread_pair(q + 32 * i + 2 * r));
            }
        }
    }
    const auto doubles = [](__m512 x) { return _mm512_castps_pd(x); };
    const __m512 low[] = {_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1])};
    const __m512 high[] = {_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3])};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512d even = _mm512_unpacklo_pd(doubles(low[i]), doubles(high[i]));
        const __m512d odd = _mm512_unpackhi_pd(doubles(low[i]), doubles(high[i]));
        _mm512_store_ps(scores + 32 * i, _mm512_castpd_ps(even));
        _mm512_store_ps(scores + 32 * i + 16, _mm512_castpd_ps(odd));
    }
}

// Lanes of vector `i` of scores whose row sees its key.
inline __mmask16 seen_few(const TileView& view, int i) {
    static constexpr uint16_t kApart[16] = {0x0000, 0x0001, 0x0010, 0x0011, 0x0100, 0x0101,
                                            0x0110, 0x0111, 0x1000, 0x1001, 0x1010, 0x1011,
                                            0x1100, 0x1101, 0x1110, 0x1111};
    unsigned seen = 0;
    for (int r = 0; r < kFewRows; ++r) seen |= kApart[view.visible[r] >> 4 * i & 15] << r;
    return static_cast<__mmask16>(seen);
}

// prepare_scores; returns the factor that is left.
inline float prepare_few(float* scores, LogitScale scale, const TileView& view) {
    const bool plain = scale.cap == 0.0f && scale.factor > 0.0f;
    if (plain && view.same && view.count == kTile) return scale.factor;
    for (int i = 0; i < kFewVectors; ++i) {
        Native x = load_native(scores + 16 * i);
        if (!plain) x = x * spread<Native>(scale.factor);
        if (scale.cap != 0.0f) x = soft_cap(x, scale.cap);
        const __m512 none = _mm512_set1_ps(-__builtin_inff());
        const __m512 seen =
            _mm512_mask_mov_ps(none, seen_few(view, i), reinterpret_cast<__m512>(x));
        _mm512_store_ps(scores + 16 * i, seen);
    }
    return plain ? scale.factor : 1.0f;
}

// Across the four keys of a vector, every lane of a row the same.
template <class F>
SPECDEC_SIMD Native across_keys(Native x, const F& fn) {
    const auto other = [](Native y, auto order) {
        const __m512 z = reinterpret_cast<__m512>(y);
        return reinterpret_cast<Native>(_mm512_shuffle_f32x4(z, z, order.value));
    };
    x = fn(x, other(x, IntTag<0x4e>{}));     // keys 0 and 2, 1 and 3
    return fn(x, other(x, IntTag<0xb1>{}));  // and both
}

// soften: the weights, and what earlier sums are scaled by.
inline Native soften_few(const float* scores, float scale, const State& state, Ahead& ahead,
                         bf16* weights) {
    alignas(64) static constexpr uint16_t kPairUp[32] = {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,
                                                         13, 10, 14, 11, 15, 16, 20, 17, 21, 18, 22,
                                                         19, 23, 24, 28, 25, 29, 26, 30, 27, 31};
    const __m512i order = _mm512_load_si512(kPairUp);
    const auto of_rows = [](const float* at) {
        return reinterpret_cast<Native>(_mm512_broadcast_f32x4(_mm_loadu_ps(at)));
    };
    const auto store_rows = [](float* at, Native x) {
        _mm_storeu_ps(at, _mm512_castps512_ps128(reinterpret_cast<__m512>(x)));
    };
    const Native factor = spread<Native>(scale);
    Native top = load_native(scores);
    for (int i = 1; i < kFewVectors; ++i) top = max(load_native(scores + 16 * i), top);
    top = across_keys(top, [](Native x, Native y) { return max(x, y); });
    const Native before = of_rows(state.max), after = max(top * factor, before);
    const Native base = finite_max(after);
    Native sum = {};
    for (int i = 0; i < kFewVectors; i += 4) {
        Native x[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            x[j] = load_native(scores + 16 * (i + j)) * factor - base;
        }
        exp2_nonpositive(x);
        ahead.step<16>();
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum = sum + x[j];
#pragma GCC unroll 2
        for (int j = 0; j < 4; j += 2) {
            _mm512_store_si512(weights + 16 * (i + j),
                               _mm512_permutexvar_epi16(order, cvt_pair(x[j + 1], x[j])));
        }
    }
    const Native decay = exp2_nonpositive(before - base);
    store_rows(state.max, after);
    const Native added = across_keys(sum, [](Native x, Native y) { return x + y; });
    store_rows(state.sum, fma(of_rows(state.sum), decay, added));
    return decay;
}

// O of four rows += weights . V of `count` keys.
inline void add_values_few(const bf16* weights, const bf16* values, int64_t width, int count,
                           Ahead& ahead, float* out) {
    const int halves = (count + kHalf - 1) / kHalf;
    for (int64_t d = 0; d < width; d += 32) {
        __m512 acc[kFewRows][2];
        load_outputs(out + d, width, acc);
        for (int half = 0; half < halves; ++half) {
            ahead.step<16>();
            add_pairs<2 * kFewRows>(weights + half * kHalf * kFewRows, 2,
                                    values + (half * width + d) * kHalf, acc);
        }
        store_outputs(out + d, width, acc);
    }
}

// Weights as the general products take them, [lanes][64 keys], in their place.
inline void spread_weights_few(bf16* weights) {
    bf16 few[kFewRows * kTile];
    std::memcpy(few, weights, sizeof few);
    for (int r = 0; r < kFewRows; ++r) {
        for (int key = 0; key < kTile; ++key) {
            weights[r * kTile + key] = few[(key / 2 * kFewRows + r) * 2 + key % 2];
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
