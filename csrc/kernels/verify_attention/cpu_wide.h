// verify_attention on the CPU for many packed rows: the rows are the lanes. Included by cpu.cpp only.
//
// Layouts, all float32, `lanes` = rows rounded up to whole vectors (up to 4):
//   queries  [D][lanes]     scores  [64 keys][lanes], overwritten by the weights
//   out      [Dv][lanes]    K, V tile  [64 keys][D | Dv, padded]
// Both products are one loop: an element of K (V) is spread over the lanes and multiplied with a
// vector of queries (weights), for so many keys (channels) at once that the accumulators fill the
// registers. So K is never turned, and maxima and sums over keys are vertical.
// Every score is one chain of fused steps over d = 0 .. D-1, every output one chain over the
// visible keys of the tile in ascending order: how many rows, keys or channels share a register
// block is invisible.
// While the scores of some keys are multiplied, K of the next keys and V of these are widened to
// float32 and the rows of the next tile are asked for: that fills the slots that fma leaves.
#pragma once

#include "cpu_plan.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// Keys or channels of a register block, and of the smaller block that finishes a tile: 12
// accumulators (24 of the 32 registers of AVX-512) hide the latency of fma, 8 just so. The blocks
// of both sizes cover every multiple of 16.
struct BlockSizes {
    int main, rest;
};
constexpr BlockSizes block_sizes(int vectors) {
    constexpr bool kMany = kNativeLanes == 16;
    switch (vectors) {
        case 4:
            return kMany ? BlockSizes{6, 4} : BlockSizes{3, 2};
        case 3:
            return kMany ? BlockSizes{8, 8} : BlockSizes{4, 4};
        case 2:
            return kMany ? BlockSizes{12, 8} : BlockSizes{6, 4};
        default:
            return kMany ? BlockSizes{16, 8} : BlockSizes{12, 8};
    }
}

// Calls fn(first, IntTag<size>) for blocks that cover 0 .. count-1; the last one may reach beyond
// where count is no multiple of 4 (8 for one vector).
template <int V, class F>
SPECDEC_SIMD void for_blocks(int64_t count, const F& fn) {
    constexpr BlockSizes kSizes = block_sizes(V);
    for (int64_t i = 0; i < count;) {
        const int64_t left = count - i;
        if (left > 2 * kSizes.rest || left % kSizes.main == 0) {
            fn(i, IntTag<kSizes.main>{});
            i += kSizes.main;
        } else {
            fn(i, IntTag<kSizes.rest>{});
            i += kSizes.rest;
        }
    }
}

// K is widened a block of keys ahead of its products, into the half of a small buffer that they do not
// read; V some channels of all keys at a time. Either stays in the nearest cache. The distances between
// rows are constants, so that addresses are, and an odd number of cache lines, so that a column does
// not fall into a few sets of the cache.
constexpr int kMostKeys = 16;  // of a block
constexpr int kKeyRow = kMaxHeadDim + kLanes;
constexpr int kValueChannels = 2 * kLanes;  // whole cache lines of every type
constexpr int kValueRow = kValueChannels + kLanes;
constexpr int64_t kKeyFloats = 2 * kMostKeys * kKeyRow;
constexpr int64_t kValueFloats = kTile * kValueRow;

template <class T>
struct WideTile {
    const Rows<T>&k, &v;            // of this tile
    const Rows<T>&next_k, &next_v;  // of the one that comes next
    int64_t head_dim, v_dim;
    const TileView& view;
    LogitScale scale;
    const float* queries;
    float *keys, *values, *scores;
};

template <int V, int N>
using Block = Native[N][V];

// acc[n][v] += sum over Steps values of k of a[n * NStep + k * KStep] * b[k][v]. The fewer of the two
// kinds of factors stay in registers for a step.
template <int Steps, int NStep, int KStep, int V, int N>
SPECDEC_SIMD void multiply(const float* a, const float* b, Block<V, N>& acc) {
    const auto factor = [&](int n, int k) { return spread<Native>(a[n * NStep + k * KStep]); };
    const auto column = [&](int v, int k) { return load_native(b + (k * V + v) * kNativeLanes); };
#pragma GCC unroll 16
    for (int k = 0; k < Steps; ++k) {
        if constexpr (N < V) {
            Native x[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) x[n] = factor(n, k);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                const Native y = column(v, k);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) acc[n][v] = fma(x[n], y, acc[n][v]);
            }
        } else {
            Native y[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) y[v] = column(v, k);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) {
                const Native x = factor(n, k);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[n][v] = fma(x, y[v], acc[n][v]);
            }
        }
    }
}

// Logits of keys first .. first+N-1, which lie in `keys`; widens those behind them to `next_keys`.
template <int V, int N, class T>
__attribute__((noinline)) void score_block(const WideTile<T>& t, int64_t first, const float* keys,
                                           float* next_keys) {
    constexpr int kLine = 64 / sizeof(T);
    Block<V, N> acc = {};
    for (int64_t d = 0; d < t.head_dim; d += kLanes) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            if (d % kLine == 0) __builtin_prefetch(t.next_k.at[first + n] + d, 0, 2);
            if (d % kLine == 0) __builtin_prefetch(t.next_v.at[first + n] + d, 0, 2);
            widen(t.k.at[first + N + n] + d, next_keys + n * kKeyRow + d);
        }
        multiply<kLanes, kKeyRow, 1>(keys + d, t.queries + d * V * kNativeLanes, acc);
    }
    float* scores = t.scores + first * V * kNativeLanes;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            store(scores + (n * V + v) * kNativeLanes, acc[n][v] * spread<Native>(t.scale.factor));
        }
    }
}

// Which lanes of a vector of rows see a key.
struct SeenKeys {
    NativeInt half[2];  // of the words

    explicit SeenKeys(const uint64_t* visible) {
        for (int l = 0; l < kNativeLanes; ++l) {
            half[0][l] = static_cast<int32_t>(visible[l]);
            half[1][l] = static_cast<int32_t>(visible[l] >> 32);
        }
    }
    SPECDEC_SIMD NativeInt operator()(int key) const {
        return (half[key / 32] << (31 - key % 32)) < 0;
    }
};

// Of the rows and keys of a tile, [64 keys][lanes].
struct Logits {
    float* scores;
    LogitScale scale;
    const TileView& view;
};

// Logits before the cap to weights: online softmax of a vector of rows over this tile. Returns what
// earlier sums are scaled by. The sum over keys is the tree of sum_lanes over (k, k + 16, k + 32,
// k + 48).
template <int V>
SPECDEC_SIMD Native soften(const Logits& t, int v, const State& state) {
    constexpr int kStep = V * kNativeLanes;
    float* scores = t.scores + v * kNativeLanes;
    const Native none = spread<Native>(-__builtin_inff());
    for (int key = 0; t.scale.cap != 0.0f && key < kTile; ++key) {
        float* at = scores + key * kStep;
        store(at, soft_cap(load_native(at), t.scale.cap));
    }
    if (!t.view.same || t.view.count < kTile) {
        const SeenKeys seen(t.view.visible + v * kNativeLanes);
        for (int key = 0; key < kTile; ++key) {
            float* at = scores + key * kStep;
            store(at, select(seen(key), load_native(at), none));
        }
    }
    Native top[4] = {none, none, none, none};
    for (int key = 0; key < kTile; key += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) top[i] = max(load_native(scores + (key + i) * kStep), top[i]);
    }
    const Native before = load_native(state.max + v * kNativeLanes);
    const Native after = max(max(max(top[0], top[1]), max(top[2], top[3])), before);
    const Native base = finite_max(after);
    for (int key = 0; key < kTile; key += 4) {
        Native x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] = load_native(scores + (key + i) * kStep) - base;
        exp2_nonpositive(x);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store(scores + (key + i) * kStep, x[i]);
    }
    const auto weight = [&](int key) { return load_native(scores + key * kStep); };
    const auto strips = [&](int key) {
        return (weight(key) + weight(key + 16)) + (weight(key + 32) + weight(key + 48));
    };
    Native part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        part[i] = (strips(i) + strips(i + 8)) + (strips(i + 4) + strips(i + 12));
    }
    const Native sum = (part[0] + part[2]) + (part[1] + part[3]);
    const Native decay = exp2_nonpositive(before - base);
    store(state.max + v * kNativeLanes, after);
    float* total = state.sum + v * kNativeLanes;
    store(total, fma(load_native(total), decay, sum));
    return decay;
}

// out = out * decay + weights . V for channels first .. first+N-1, whose V begins at `values`. Where rows see different keys, an
// unseen one takes no part at all: its V may be NaN, and the chain is that of a call where the key
// does not exist.
template <int V, int N, class T>
__attribute__((noinline)) void value_block(const WideTile<T>& t, int64_t first, const float* values,
                                           const Native (&decay)[V], const State& state) {
    constexpr int kStep = V * kNativeLanes;
    float* out = state.out + first * kStep;
    Block<V, N> acc;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            acc[n][v] = load_native(out + (n * V + v) * kNativeLanes) * decay[v];
        }
    }
    if (t.view.same) {
        int key = 0;
        for (; key + 4 <= t.view.count; key += 4) {
            multiply<4, 1, kValueRow>(values + key * kValueRow, t.scores + key * kStep, acc);
        }
        for (; key < t.view.count; ++key) {
            multiply<1, 1, kValueRow>(values + key * kValueRow, t.scores + key * kStep, acc);
        }
    } else {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const SeenKeys seen(t.view.visible + v * kNativeLanes);
            for (int key = 0; key < t.view.count; ++key) {
                const NativeInt mine = seen(key);
                const Native weight = load_native(t.scores + key * kStep + v * kNativeLanes);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    const Native x = spread<Native>(values[key * kValueRow + n]);
                    acc[n][v] = select(mine, fma(x, weight, acc[n][v]), acc[n][v]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(out + (n * V + v) * kNativeLanes, acc[n][v]);
    }
}

// Adds a tile to the state of `V` vectors of rows.
template <int V, class T>
void add_wide_tile(const WideTile<T>& t, const State& state) {
    float *keys = t.keys, *next_keys = t.keys + kMostKeys * kKeyRow;
    for (int key = 0; key < block_sizes(V).main; ++key) {
        for (int64_t d = 0; d < t.head_dim; d += kLanes) {
            widen(t.k.at[key] + d, keys + key * kKeyRow + d);
        }
    }
    for_blocks<V>(t.view.count, [&](int64_t first, auto size) {
        score_block<V, size.value>(t, first, keys, next_keys);
        std::swap(keys, next_keys);
    });
    Native decay[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) decay[v] = soften<V>({t.scores, t.scale, t.view}, v, state);
    for (int64_t d = 0; d < t.v_dim; d += kValueChannels) {
        const bool whole = d + kValueChannels <= t.v_dim;
        const int64_t width = whole ? kValueChannels : kLanes;
        for (int key = 0; key < t.view.count; ++key) {
            const T* from = t.v.at[key] + d;
            float* to = t.values + key * kValueRow;
            widen(from, to);
            if (whole) widen(from + kLanes, to + kLanes);
        }
        for_blocks<V>(width, [&](int64_t first, auto size) {
            value_block<V, size.value>(t, d + first, t.values + first, decay, state);
        });
    }
}

// target = target followed by next, where next has seen anything.
inline void fold_wide(const State& target, const State& next, int lanes, int64_t v_dim) {
    for (int l = 0; l < lanes; l += kNativeLanes) {
        const Native left = load_native(target.max + l), right = load_native(next.max + l);
        const Native added = load_native(next.sum + l), sum = load_native(target.sum + l);
        const NativeInt idle = added == spread<Native>(0.0f);
        const Native top = max(right, left);
        const Native base = finite_max(top);
        const Native keep = exp2_nonpositive(left - base), add = exp2_nonpositive(right - base);
        store(target.max + l, select(idle, left, top));
        store(target.sum + l, select(idle, sum, fma(added, add, sum * keep)));
        for (int64_t d = 0; d < v_dim; ++d) {
            float* out = target.out + d * lanes + l;
            const Native old = load_native(out), more = load_native(next.out + d * lanes + l);
            store(out, select(idle, old, fma(more, add, old * keep)));
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
