// verify_attention on the CPU for bf16 by products of bf16 pairs: AMX tiles (cpu_pairs_amx.h) or vectors
// (cpu_pairs_dot.h; cpu_pairs_few.h for few rows, with the same bits). Included by cpu.cpp only, for the instruction sets `amx` and `avx512bf16`.
//
// Products are sums of bf16 pairs in float32, weights are rounded to bf16, as on CUDA: other bits than
// those of cpu_wide.h, so every call of a bf16 cache comes through here, however few its rows are.
// Per KV head and tile of 64 keys, `lanes` = packed rows rounded up to 16:
//   S^T [64 keys][lanes] float32 = K Q^T: K lies as the left factor wants it, Q is turned once a group
//   weights by an online softmax whose lanes are rows (cpu_pairs_weights.h), turned to P [lanes][64 keys]
//   O [lanes][channels] float32 += P V: pairs of keys of V are interleaved as they are copied
// Every score is one chain over pairs of channels, every output one chain over pairs of keys: a row of
// tiles does not know its neighbours. A key that a row does not see has weight 0.
#pragma once

#include <cstring>
#include <vector>

#include "cpu_narrow.h"
#include "cpu_pair_tiles.h"
#include "cpu_pairs_weights.h"
#include "cpu_plan.h"
#if defined(__AMX_BF16__)
#include "cpu_pairs_amx.h"
#else
#include "cpu_pairs_dot.h"
#include "cpu_pairs_few.h"
#endif

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t state_width(int64_t v_dim) {
    return whole_tiles(v_dim);
}
// A packed row of State.out, which is [lanes][channels], times `factor`.
inline void store_out(const Group&, const State& state, int m, float factor, int64_t v_dim,
                      bf16* out) {
    const float* row = state.out + m * state_width(v_dim);
    for (int64_t d = 0; d < v_dim; d += 32) store_channels(row + d, factor, v_dim - d, out + d);
}

inline void fold(const Group& g, const State& target, const State& next, int64_t width) {
    fold_narrow(target, next, g.rows, width);
}

// Per-thread buffers of a group, in bf16 as products want them: queries of all heads
// [heads][D / 32][lanes / 16][16 pairs][16 rows][2]; of one head two strips of keys, its values, and its
// weights [lanes][64 keys].
struct Buffers {
    bf16 *queries, *keys, *values, *weights;
    float *scores, *decay;
    TileRegisters registers;  // a thread's own

    // Calls fn(pointer, floats) for every buffer.
    template <class Fn>
    void visit(int64_t head_dim, int64_t v_dim, int64_t most_lanes, const Fn& fn) {
        fn(queries, most_lanes * whole_tiles(head_dim) / 2);
        fn(keys, kHalf * whole_tiles(head_dim) / 2);
        fn(values, kTile * whole_tiles(v_dim) / 2);
        fn(weights, kWideRows * kTile / 2);
        fn(scores, kWideRows * kTile);
        fn(decay, kWideRows);
    }
};

// --- 1. Queries ----------------------------------------------------------------------------------

// Queries of head h of the group; rows and channels that do not exist are zeros.
template <class T>
void load_queries(const VerifyAttentionParams& p, const Group& g, int64_t h, const Buffers& w) {
    const View<const T, 3> q = p.q.as<const T>();
    const int64_t head_dim = q.size[2], width = whole_tiles(head_dim);
    bf16* queries = w.queries + h * g.lanes * width;
    for (int m = 0; m < g.lanes; ++m) {
        const T* row = m < g.rows ? q.at(g.row(m), g.query_head(h, m)) : nullptr;
        for (int64_t d = 0; d < width; d += 32) {
            alignas(64) uint32_t pairs[kPairs];
            const __m512i none = _mm512_setzero_si512();
            _mm512_store_si512(pairs, row == nullptr ? none : load_channels(row + d, head_dim - d));
            bf16* tile = queries + (d / 32 * (g.lanes / kTileRows) + m / kTileRows) * kTileBf16;
            for (int i = 0; i < kPairs; ++i) {
                std::memcpy(tile + 32 * i + m % kTileRows * 2, &pairs[i], sizeof pairs[i]);
            }
        }
    }
}

// --- 2. A tile of one head -----------------------------------------------------------------------

template <class C>
struct PairTile {
    const TileView& view;
    int64_t head_dim, v_dim;
    int rows, lanes;
    LogitScale scale;
    const bf16* queries;
    const Rows<C>&k, &v;
    Ahead& ahead;
};

// Whether V of a key that only some rows see would leave a trace in the others: 0 times it is NaN.
template <class C>
inline bool leaves_traces(const PairTile<C>& t) {
    uint64_t any = 0, all = kAllKeys;
    for (int m = 0; m < t.lanes; ++m) {
        any |= t.view.visible[m];
        all &= t.view.visible[m];
    }
    for (uint64_t some = any & ~all; some != 0; some &= some - 1) {
        const C* row = t.v.at[__builtin_ctzll(some)];
        constexpr int kNotFinite = std::is_same_v<C, bf16> ? 0x7f80 : 0x7f;
        for (int64_t d = 0; d < t.v_dim; ++d) {
            if ((row[d].bits & kNotFinite) == kNotFinite) return true;
        }
    }
    return false;
}

// add_values for rows that must not meet the V of keys that they do not see: a row at a time.
template <class C>
inline void add_values_apart(const PairTile<C>& t, const Buffers& w, float* out) {
    const int64_t width = whole_tiles(t.v_dim);
    std::vector<float> rows(kTileRows * width);
    Rows<C> seen = t.v;
    for (int m = 0; m < t.lanes; ++m) {
        for (int key = 0; key < kTile; ++key) {
            const bool sees = (t.view.visible[m] >> key & 1) != 0;
            seen.at[key] = sees ? t.v.at[key] : Rows<C>::absent();
        }
        interleave_values(seen, t.v_dim, t.view.count, t.ahead, w.values);
        const int first = m / kTileRows * kTileRows;
        std::memcpy(rows.data(), out + first * width, rows.size() * sizeof(float));
        add_values(w.weights + first * kTile, w.values, width, t.view.count, kTileRows, kTileRows,
                   t.ahead, rows.data());
        std::memcpy(out + m * width, rows.data() + (m - first) * width, width * sizeof(float));
    }
}

// --- 3. Tiles of a group -------------------------------------------------------------------------

// State.out as the scores of this tile find it.
inline void decay_outputs(const Buffers& w, int rows, int64_t width, const State& state) {
    for (int m = 0; m < rows; ++m) {
        float* out = state.out + m * width;
        for (int64_t d = 0; d < width && w.decay[m] != 1.0f; d += kLanes) {
            store(out + d, load(out + d) * set1(w.decay[m]));
        }
    }
}

#if !defined(__AMX_BF16__)
template <class C>
inline void add_tile_few(const View<const C, 4>& k_cache, const PairTile<C>& t, const Buffers& w,
                         const State& state) {
    const int64_t width = whole_tiles(t.v_dim);
    for (int key = 0; key < kTile; key += kTileRows) {
        const KeyStrip strip = key_strip(k_cache, t.k, t.view.places, key, w.keys);
        score_few(strip, whole_tiles(t.head_dim), t.queries, t.ahead, w.scores + key * kFewRows);
    }
    const float factor = prepare_few(w.scores, t.scale, t.view);
    store(w.decay, soften_few(w.scores, factor, state, t.ahead, w.weights));
    decay_outputs(w, t.rows, width, state);
    if (t.view.same || !leaves_traces(t)) {
        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);
        add_values_few(w.weights, w.values, width, t.view.count, t.ahead, state.out);
    } else {
        spread_weights_few(w.weights);
        add_values_apart(t, w, state.out);
    }
}
#endif

template <class C>
inline void score_keys(const View<const C, 4>& cache, const PairTile<C>& t, const Buffers& w) {
    const int64_t width = whole_tiles(t.head_dim);
    for (int key = 0; key < t.view.count; key += kHalf) {
        const KeyStrip keys[] = {
            key_strip(cache, t.k, t.view.places, key, w.keys),
            key_strip(cache, t.k, t.view.places, key + kTileRows, w.keys + kTileRows * width)};
        int m = 0;
        for (; m + 2 * kTileRows <= t.lanes; m += 2 * kTileRows) {
            score_tiles<2>(keys, width, t.queries + m / kTileRows * kTileBf16, t.lanes, t.ahead,
                           w.scores + key * t.lanes + m);
        }
        if (m < t.lanes) {
            score_tiles<1>(keys, width, t.queries + m / kTileRows * kTileBf16, t.lanes, t.ahead,
                           w.scores + key * t.lanes + m);
        }
    }
}

template <class C>
inline void add_tile(const View<const C, 4>& k_cache, const PairTile<C>& t, const Buffers& w,
                     const State& state) {
#if !defined(__AMX_BF16__)
    if (t.rows <= kFewRows) return add_tile_few(k_cache, t, w, state);
#endif
    const int64_t width = whole_tiles(t.v_dim);
    score_keys(k_cache, t, w);
    const Scores scores = prepare_scores(w.scores, t.lanes, t.scale, t.view);
    for (int m = 0; m < t.lanes; m += kTileRows) {
        store(w.decay + m, soften(scores, m, state, t.ahead, w.weights));
    }
    decay_outputs(w, t.rows, width, state);
    if (t.view.same || !leaves_traces(t)) {
        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);
        add_values(w.weights, w.values, width, t.view.count, t.rows, t.lanes, t.ahead, state.out);
    } else {
        add_values_apart(t, w, state.out);
    }
}

// Tiles 0 .. tiles-1, of `found` whose views are known, into a State per head.
template <class T>
void add_tiles(const VerifyAttentionParams& p, const Group& g, const Buffers& w,
               const TileView* view_of, int tiles, int found, float* states) {
    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    const int64_t head_dim = k_cache.size[3], v_dim = v_cache.size[3];
    const Places none{};
    Rows<T> k, v;
    for (int tile = 0; tile < tiles; ++tile) {
        const TileView& view = view_of[tile];
        if (view.count == 0) continue;
        const Places& next = tile + 1 < found ? view_of[tile + 1].places : none;
        Ahead ahead(k_cache, v_cache, g.head, g.heads, next);
        for (int64_t h = 0; h < g.heads; ++h) {
            k.find(k_cache, g.head + h, view.places);
            v.find(v_cache, g.head + h, view.places);
            const bf16* queries = w.queries + h * g.lanes * whole_tiles(head_dim);
            const PairTile<T> t{
                view,    head_dim, v_dim, g.rows, g.lanes, logit_scale(p, g.head + h),
                queries, k,        v,     ahead};
            add_tile(k_cache, t, w, state_of(g, states, 0, h, state_width(v_dim)));
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
