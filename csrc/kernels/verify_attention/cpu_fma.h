// verify_attention on the CPU by float32 vectors: segments of a group, by cpu_narrow.h or cpu_wide.h.
// Included by cpu.cpp only, for every instruction set without products of bf16 pairs.
#pragma once

#include "cpu_narrow.h"
#include "cpu_plan.h"
#include "cpu_wide.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// Per-thread buffers of a group. Queries of a head: [rows][D] for few rows, else [D][lanes].
struct Buffers {
    float *queries, *scores, *keys, *values, *decay;

    // Calls fn(pointer, floats) for every buffer.
    template <class Fn>
    void visit(int64_t head_dim, int64_t, int64_t most_lanes, const Fn& fn) {
        fn(queries, most_lanes * head_dim);
        fn(scores,
           (kTile + Rows<float>::kAhead) * (most_lanes > kWideRows ? most_lanes : kWideRows));
        fn(keys, kKeyFloats);
        fn(values, kValueFloats);
        fn(decay, most_lanes);
    }
};

constexpr int64_t state_width(int64_t v_dim) {
    return v_dim;
}
// A packed row of State.out, which is [rows][Dv] for few rows, else [Dv][lanes], times `factor`.
// Zeros become positive: folding onto segments that the row does not see does the same to some.
template <class T>
void store_out(const Group& g, const State& state, int m, float factor, int64_t v_dim, T* out) {
    const float* row = state.out + (g.narrow() ? m * v_dim : m);
    const int64_t step = g.narrow() ? 1 : g.lanes;
    for (int64_t d = 0; d < v_dim; ++d) out[d] = from_float<T>(row[d * step] * factor + 0.0f);
}

inline void fold(const Group& g, const State& target, const State& next, int64_t v_dim) {
    if (g.narrow()) {
        fold_narrow(target, next, g.rows, v_dim);
    } else {
        fold_wide(target, next, g.lanes, v_dim);
    }
}

// Queries of head h of the group; rows that do not exist are zeros.
template <class T>
void load_queries(const VerifyAttentionParams& p, const Group& g, int64_t h, const Buffers& w) {
    const View<const T, 3> q = p.q.as<const T>();
    const int64_t head_dim = q.size[2];
    const int64_t row_step = g.narrow() ? head_dim : 1, step = g.narrow() ? 1 : g.lanes;
    for (int m = 0; m < g.lanes; ++m) {
        float* target = w.queries + h * g.lanes * head_dim + m * row_step;
        const T* source = m < g.rows ? q.at(g.row(m), g.query_head(h, m)) : nullptr;
        for (int64_t d = 0; d < head_dim; ++d) {
            target[d * step] = source == nullptr ? 0.0f : to_float(source[d]);
        }
    }
}

template <class T>
void add_wide_segment(const VerifyAttentionParams& p, const Group& g, const Buffers& w,
                      const TileView* view_of, int tiles, int found, float* states) {
    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    const int64_t head_dim = k_cache.size[3], v_dim = v_cache.size[3];
    Rows<T> k[2], v[2];
    const auto find = [&](int64_t h, int tile, int slot) {
        k[slot].find(k_cache, g.head + h, view_of[tile].places);
        v[slot].find(v_cache, g.head + h, view_of[tile].places);
    };
    find(0, 0, 0);
    int slot = 0;
    for (int64_t h = 0; h < g.heads; ++h) {
        const State state = state_of(g, states, 0, h, v_dim);
        for (int tile = 0; tile < tiles; ++tile) {
            if (tile + 1 < tiles) {
                find(h, tile + 1, 1 - slot);
            } else if (h + 1 < g.heads) {
                find(h + 1, 0, 1 - slot);
            } else if (tiles < found) {
                find(0, tiles, 1 - slot);
            }
            const TileView& view = view_of[tile];
            const WideTile<T> t{k[slot],
                                v[slot],
                                k[1 - slot],
                                v[1 - slot],
                                head_dim,
                                v_dim,
                                view,
                                logit_scale(p, g.head + h),
                                w.queries + h * g.lanes * head_dim,
                                w.keys,
                                w.values,
                                w.scores};
            slot = 1 - slot;
            if (view.count == 0) continue;
            dispatch_int<4, 3, 2, 1>(g.lanes / kNativeLanes,
                                     [&](auto count) { add_wide_tile<count.value>(t, state); });
        }
    }
}

template <class T>
void add_narrow_segment(const VerifyAttentionParams& p, const Group& g, const Buffers& w,
                        const TileView* view_of, int tiles, int found, float* states) {
    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    const int64_t head_dim = k_cache.size[3], v_dim = v_cache.size[3];
    const Places none{};
    Rows<T> rows;
    for (int tile = 0; tile < tiles; ++tile) {
        const TileView& view = view_of[tile];
        if (view.count == 0) continue;
        Prefetch values(v_cache, g.head, g.heads, view.places);
        for (int64_t h = 0; h < g.heads; ++h) {
            rows.find(k_cache, g.head + h, view.places);
            dispatch_int<4, 3, 2, 1>(g.rows, [&](auto count) {
                score_narrow_tile<count.value>(
                    w.queries + h * g.rows * head_dim, rows.at, head_dim, view.count, view.visible,
                    logit_scale(p, g.head + h), state_of(g, states, 0, h, v_dim),
                    w.scores + h * g.rows * kTile, w.decay + h * g.rows, values);
            });
        }
        Prefetch keys(k_cache, g.head, g.heads, tile + 1 < found ? view_of[tile + 1].places : none);
        for (int64_t h = 0; h < g.heads; ++h) {
            rows.find(v_cache, g.head + h, view.places);
            dispatch_int<4, 3, 2, 1>(g.rows, [&](auto count) {
                add_narrow_values<count.value>(rows.at, v_dim, view.count, view.visible,
                                               w.scores + h * g.rows * kTile, w.decay + h * g.rows,
                                               state_of(g, states, 0, h, v_dim), keys);
            });
        }
    }
}

// Tiles 0 .. tiles-1, of `found` whose views are known, into a State per head.
template <class T>
void add_tiles(const VerifyAttentionParams& p, const Group& g, const Buffers& w,
               const TileView* view_of, int tiles, int found, float* states) {
    if (g.narrow()) {
        add_narrow_segment<T>(p, g, w, view_of, tiles, found, states);
    } else {
        add_wide_segment<T>(p, g, w, view_of, tiles, found, states);
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
