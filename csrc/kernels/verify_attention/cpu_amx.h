// verify_attention on the CPU for bf16 with AMX tiles. Included by cpu.cpp only, for the instruction
// set `amx`.
//
// Products are sums of bf16 pairs in float32, weights are rounded to bf16, as on CUDA: other bits than
// those of cpu_wide.h, so every call of a bf16 cache comes through here, however few its rows are.
// Per KV head and tile of 64 keys, `lanes` = packed rows rounded up to 16:
//   S^T [64 keys][lanes] float32 = K Q^T: K lies as the left factor wants it, Q is turned once a group
//   weights by an online softmax whose lanes are rows (cpu_amx_weights.h), turned to P [lanes][64 keys]
//   O [lanes][channels] float32 += P V: pairs of keys of V are interleaved as they are copied
// Every score is one chain over pairs of channels, every output one chain over pairs of keys: a row of
// tiles does not know its neighbours. A key that a row does not see has weight 0.
#pragma once

#include <cstring>
#include <vector>

#include "cpu_amx_tiles.h"
#include "cpu_narrow.h"
#include "cpu_plan.h"
#include "cpu_amx_weights.h"

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

// --- 2. Scores -----------------------------------------------------------------------------------

// S^T of 32 keys and Blocks x 16 rows.
template <int Blocks>
SPECDEC_SIMD void score_tiles(const KeyStrip (&keys)[2], int64_t width, const bf16* queries,
                              int lanes, Ahead& ahead, float* scores) {
    const int64_t score_bytes = 4 * lanes;
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
}

// --- 3. Outputs ----------------------------------------------------------------------------------

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

inline void add_values(const bf16* weights, const bf16* values, int64_t width, int count, int lanes,
                       Ahead& ahead, float* out) {
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

// A tile of one head.
template <class C>
struct AmxTile {
    const TileView& view;
    int64_t head_dim, v_dim;
    int lanes;
    LogitScale scale;
    const bf16* queries;
    const Rows<C>&k, &v;
    Ahead& ahead;
};

// Whether V of a key that only some rows see would leave a trace in the others: 0 times it is NaN.
template <class C>
inline bool leaves_traces(const AmxTile<C>& t) {
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
inline void add_values_apart(const AmxTile<C>& t, const Buffers& w, float* out) {
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
        add_values(w.weights + first * kTile, w.values, width, t.view.count, kTileRows, t.ahead,
                   rows.data());
        std::memcpy(out + m * width, rows.data() + (m - first) * width, width * sizeof(float));
    }
}

// --- 4. Tiles of a group -------------------------------------------------------------------------

template <class C>
inline void score_keys(const View<const C, 4>& cache, const AmxTile<C>& t, const Buffers& w) {
    const int64_t width = whole_tiles(t.head_dim);
    for (int key = 0; key < t.view.count; key += kHalf) {
        const KeyStrip keys[] = {
            key_strip(cache, t.k, t.view.places, key, w.keys),
            key_strip(cache, t.k, t.view.places, key + kTileRows, w.keys + kTileRows * width)};
        tile_fence();
        int m = 0;
        for (; m + 2 * kTileRows <= t.lanes; m += 2 * kTileRows) {
            score_tiles<2>(keys, width, t.queries + m / kTileRows * kTileBf16, t.lanes, t.ahead,
                           w.scores + key * t.lanes + m);
        }
        if (m < t.lanes) {
            score_tiles<1>(keys, width, t.queries + m / kTileRows * kTileBf16, t.lanes, t.ahead,
                           w.scores + key * t.lanes + m);
        }
        tile_fence();
    }
}

template <class C>
inline void add_tile(const View<const C, 4>& k_cache, const AmxTile<C>& t, const Buffers& w,
                     const State& state) {
    const int64_t width = whole_tiles(t.v_dim);
    score_keys(k_cache, t, w);
    const Scores scores = prepare_scores(w.scores, t.lanes, t.scale, t.view);
    for (int m = 0; m < t.lanes; m += kTileRows) {
        store(w.decay + m, soften(scores, m, state, t.ahead, w.weights));
    }
    for (int m = 0; m < t.lanes; ++m) {
        float* out = state.out + m * width;
        for (int64_t d = 0; d < width && w.decay[m] != 1.0f; d += kLanes) {
            store(out + d, load(out + d) * set1(w.decay[m]));
        }
    }
    if (t.view.same || !leaves_traces(t)) {
        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);
        add_values(w.weights, w.values, width, t.view.count, t.lanes, t.ahead, state.out);
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
            const AmxTile<T> t{view,    head_dim, v_dim, g.lanes, logit_scale(p, g.head + h),
                               queries, k,        v,     ahead};
            add_tile(k_cache, t, w, state_of(g, states, 0, h, state_width(v_dim)));
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
