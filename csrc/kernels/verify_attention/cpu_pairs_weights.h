// verify_attention on the CPU for bf16 pairs: from scores of a tile to weights as the left factor of a product.
// Included by cpu_pairs.h only.
#pragma once

#include "cpu_pairs_copy.h"
#include "cpu_wide.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// What the scores of a tile become t = factor * x by, in powers of two. Where masks, a soft cap or a
// factor that is not positive stand between, x are no longer the scores: prepare_scores.
struct Scores {
    float* x;  // [64 keys][lanes]
    float factor;
    int lanes;
};

inline Scores prepare_scores(float* scores, int lanes, LogitScale scale, const TileView& view) {
    const bool plain = scale.cap == 0.0f && scale.factor > 0.0f;
    const Native none = spread<Native>(-__builtin_inff());
    for (int l = 0; l < lanes && !(plain && view.same && view.count == kTile); l += kNativeLanes) {
        const SeenKeys seen(view.visible + l);
        for (int key = 0; key < kTile; ++key) {
            float* at = scores + key * lanes + l;
            Native x = load_native(at);
            if (!plain) x = x * spread<Native>(scale.factor);
            if (scale.cap != 0.0f) x = soft_cap(x, scale.cap);
            store(at, select(seen(key), x, none));
        }
    }
    return {scores, plain ? scale.factor : 1.0f, lanes};
}

SPECDEC_SIMD __m512i cvt_pair(Native high, Native low) {
    return reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
}

// Online softmax of rows first .. first+15 over this tile: weights [row][64 keys] bf16, and what earlier
// sums are scaled by. The sum over keys: four chains over every fourth key, in pairs.
inline Native soften(const Scores& s, int first, const State& state, Ahead& ahead, bf16* weights) {
    static_assert(kNativeLanes == kTileRows);
    alignas(64) static constexpr uint16_t kPairUp[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                         21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                         11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kPairUp);
    const auto score = [&](int key) { return load_native(s.x + key * s.lanes + first); };
    const Native factor = spread<Native>(s.factor);
    Native top[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) top[i] = score(i);
    for (int key = 4; key < kTile; key += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) top[i] = max(score(key + i), top[i]);
    }
    const Native before = load_native(state.max + first);
    const Native after = max(max(max(top[0], top[1]), max(top[2], top[3])) * factor, before);
    const Native base = finite_max(after);
    Native sum[4] = {};
    for (int half = 0; half < kTile; half += kHalf) {
        __m512i pairs[kPairs];
#pragma GCC unroll 8
        for (int i = 0; i < kHalf; i += 4) {
            Native x[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                // Rounded as the maximum was: fused, scores of 2^31 and more would differ from it by many
                // powers of two.
                x[j] = score(half + i + j) * factor - base;
            }
            exp2_nonpositive(x);
            ahead.step<4>();
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sum[j] = sum[j] + x[j];
#pragma GCC unroll 2
            for (int j = 0; j < 4; j += 2) {
                const auto pair = cvt_pair(x[j + 1], x[j]);
                pairs[(i + j) / 2] = _mm512_permutexvar_epi16(order, pair);
            }
        }
        turn(pairs);
#pragma GCC unroll 16
        for (int i = 0; i < kTileRows; ++i) {
            _mm512_storeu_si512(weights + (first + i) * kTile + half, pairs[i]);
        }
    }
    const Native decay = exp2_nonpositive(before - base);
    store(state.max + first, after);
    float* total = state.sum + first;
    store(total, fma(load_native(total), decay, (sum[0] + sum[2]) + (sum[1] + sum[3])));
    return decay;
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
