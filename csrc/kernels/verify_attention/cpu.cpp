// verify_attention on the CPU. Row i of request b, head h, over the visible places t:
//   s_t = scale * q . k_t,   lse = ln sum_t exp(s_t),   out = sum_t exp(s_t - lse) v_t
//
// Work: a group is up to kGroupRows packed rows (rows x query heads of a KV head) of one request, for
// some KV heads; its units are the KV segments (cpu_plan.h). A thread owns a run of consecutive
// units. Each tile of K and V is gathered and converted once for all packed rows of the group, then
// multiplied in register blocks (cpu_tile.h).
// Bytes moved: K and V of a request once per group; out and lse once.
// Determinism: a row's tiles are summed by online softmax inside a segment of fixed absolute
// places, and its segments are folded from the left; a tile that a row does not see leaves it
// bitwise unchanged. A group whose units fall to several threads keeps one partial result per
// segment, and the same fold runs afterwards. So neither batch, rows, pages, strides nor threads
// change a bit.
#include <cmath>
#include <vector>

#include "cpu_plan.h"
#include "cpu_tile.h"
#include "parallel.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- 1. State of the rows of a group -------------------------------------------------------------

// Softmax over some places: out = sum of 2^(t - max) v, sum = sum of 2^(t - max), t in powers of
// two.
struct State {
    float* max;
    float* sum;
    float* out;  // [rows][Dv]

    static int64_t floats(int64_t rows, int64_t v_dim) { return rows * (v_dim + 2); }
    static State at(float* data, int64_t rows, int64_t v_dim) {
        return {data + rows * v_dim, data + rows * (v_dim + 1), data};
    }
    void clear(int64_t rows, int64_t v_dim) const {
        for (int64_t i = 0; i < rows; ++i) max[i] = -__builtin_inff();
        for (int64_t i = 0; i < rows; ++i) sum[i] = 0.0f;
        for (int64_t i = 0; i < rows * v_dim; ++i) out[i] = 0.0f;
    }
};

// What a finite maximum is subtracted as: with none yet, 2^(-inf - 0) = 0 is what is wanted.
SPECDEC_SIMD V16 finite_max(V16 max) {
    return select(max == set1(-__builtin_inff()), set1(0.0f), max);
}

// target = target followed by next. A side that has seen nothing has weight 0 or leaves no trace.
void fold(const State& target, const State& next, int64_t rows, int64_t v_dim) {
    float keep[kLanes], add[kLanes];
    for (int64_t first = 0; first < rows; first += kLanes) {
        const int count = static_cast<int>(rows - first < kLanes ? rows - first : kLanes);
        float both[kLanes], left[kLanes] = {}, right[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            left[i] = target.max[first + i];
            right[i] = next.max[first + i];
        }
        const V16 top = max(load(right), load(left));
        store(both, top);
        store(keep, exp2(load(left) - finite_max(top)));
        store(add, exp2(load(right) - finite_max(top)));
        for (int i = 0; i < count; ++i) {
            const int64_t row = first + i;
            if (next.sum[row] == 0.0f) continue;
            target.max[row] = both[i];
            target.sum[row] =
                first_lane(fma(set1(next.sum[row]), set1(add[i]), set1(target.sum[row] * keep[i])));
            float* out = target.out + row * v_dim;
            const float* more = next.out + row * v_dim;
            for (int64_t d = 0; d < v_dim; d += kLanes) {
                store(out + d, fma(load(more + d), set1(add[i]), load(out + d) * set1(keep[i])));
            }
        }
    }
}

// --- 2. One tile ---------------------------------------------------------------------------------

// Per-thread buffers of a group.
struct Work {
    float *queries, *scores, *keys, *values, *decay;
    float* folded;                 // a State per head
    float* segment;                // one State
    int64_t places[kGroupRows];    // that each row sees
    Places tile[kSegmentTiles];    // of the segment at hand
    uint64_t visible[kGroupRows];  // of them, in the tile at hand
};

// A strip of keys of a row as 16 lanes of truth.
SPECDEC_SIMD I16 visible_lanes(uint64_t visible, int strip) {
    alignas(64) static constexpr int32_t kBits[kLanes] = {
        1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
        1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const I16 bit = load(kBits);
    return (set1(static_cast<int32_t>(visible >> (strip * kLanes) & 0xffff)) & bit) == bit;
}

// Scores to weights: online softmax of every row over this tile.
void soften(const Work& w, const State& state, int rows, float scale) {
    for (int r = 0; r < rows; ++r) {
        float* scores = w.scores + r * kTile;
        V16 t[kKeyStrips];
#pragma GCC unroll 4
        for (int n = 0; n < kKeyStrips; ++n) {
            t[n] = load(scores + n * kLanes) * set1(scale);
            if (w.visible[r] != kAllKeys) {
                t[n] = select(visible_lanes(w.visible[r], n), t[n], set1(-__builtin_inff()));
            }
        }
        const float tile_max = max_lanes(max(max(t[0], t[1]), max(t[2], t[3])));
        const V16 before = set1(state.max[r]);
        const V16 after = max(set1(tile_max), before);
        const V16 base = finite_max(after);
#pragma GCC unroll 4
        for (int n = 0; n < kKeyStrips; ++n) {
            t[n] = exp2(t[n] - base);
            store(scores + n * kLanes, t[n]);
        }
        const V16 decay = exp2(before - base);
        const V16 sum = set1(sum_lanes((t[0] + t[1]) + (t[2] + t[3])));
        w.decay[r] = first_lane(decay);
        state.max[r] = first_lane(after);
        state.sum[r] = first_lane(fma(set1(state.sum[r]), decay, sum));
    }
}

// Adds tile `tile` of the segment that starts at `begin` to the rows of one head. The rows that come
// next, `next` of head `next_head`, are asked for.
template <class T>
void add_tile(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t h, int64_t begin,
              int tile, const Places& next, int64_t next_h, const State& state) {
    const int64_t head_dim = p.k_cache.size[3], v_dim = p.v_cache.size[3];
    const int64_t first = begin + tile * kTile;
    const Places& places = w.tile[tile];
    const float* queries = w.queries + h * g.rows * head_dim;
    uint64_t any = 0;
    for (int m = 0; m < g.rows; ++m) {
        w.visible[m] = places.present & first_keys(w.places[m] - first);
        any |= w.visible[m];
    }
    if (any == 0) return;
    const int strips = (64 - __builtin_clzll(any) + kLanes - 1) / kLanes;

    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    Ahead<T> ahead{k_cache, v_cache, g.head + next_h, next, kTile / blocks_of(g.rows) + 1};
    pack_k(k_cache, g.head + h, places, strips, w.keys);
    for_blocks(g.rows, [&](int row, auto rows) {
        ahead.step();
        score_block<rows.value>(queries + row * head_dim, w.keys, head_dim, strips,
                                w.scores + row * kTile);
    });
    soften(w, state, g.rows, p.scale * kLog2E);

    pack_v(v_cache, g.head + h, places, w.values);
    for_blocks(g.rows, [&](int row, auto rows) {
        ahead.step();
        bool same = true;
        for (int r = 1; r < rows.value; ++r) same = same && w.visible[row + r] == w.visible[row];
        const uint64_t visible = w.visible[row];
        float* out = state.out + row * v_dim;
        if (same && (visible & (visible + 1)) == 0) {  // the first few keys, or all
            value_block<rows.value>(w.scores + row * kTile, w.values, w.decay + row,
                                    visible == kAllKeys ? kTile : __builtin_ctzll(~visible), v_dim,
                                    out);
            return;
        }
        for (int r = 0; r < rows.value; ++r) {
            value_row(w.scores + (row + r) * kTile, w.values, w.decay[row + r], w.visible[row + r],
                      v_dim, out + r * v_dim);
        }
    });
}

// --- 3. Segments of a group ----------------------------------------------------------------------

// State of segment s and head h among partials or folded states.
State state_of(const Group& g, float* states, int64_t s, int64_t h, int64_t v_dim) {
    return State::at(states + (s * g.heads + h) * State::floats(g.rows, v_dim), g.rows, v_dim);
}

// One segment of all heads; done(h, state) after each head.
template <class T, class StateFor, class Done>
void add_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t s,
                 const StateFor& state_for, const Done& done) {
    const int64_t begin = s * kSegmentTokens;
    int tiles = 0;
    for (; tiles < kSegmentTiles && begin + tiles * kTile < g.limit; ++tiles) {
        find_places(p, g.request, begin + tiles * kTile, g.limit, w.tile[tiles]);
    }
    const Places none{};
    for (int64_t h = 0; h < g.heads; ++h) {
        const State state = state_for(h);
        state.clear(g.rows, p.v_cache.size[3]);
        for (int tile = 0; tile < tiles; ++tile) {
            const bool last = tile + 1 == tiles;
            const Places& next = !last ? w.tile[tile + 1] : h + 1 < g.heads ? w.tile[0] : none;
            add_tile<T>(p, g, w, h, begin, tile, next, last ? h + 1 : h, state);
        }
        done(h, state);
    }
}

template <class T>
void begin_group(const VerifyAttentionParams& p, const Group& g, Work& w) {
    for (int m = 0; m < g.rows; ++m) w.places[m] = visible_places(p, g, m);
    const View<const T, 3> q = p.q.as<const T>();
    const int64_t head_dim = q.size[2];
    for (int64_t h = 0; h < g.heads; ++h) {
        float* queries = w.queries + h * g.rows * head_dim;
        for_blocks(g.rows, [&](int row, auto rows) {
            for (int r = 0; r < rows.value; ++r) {
                const T* source = q.at(g.row(row + r), g.query_head(h, row + r));
                float* target = queries + row * head_dim + r;
                for (int64_t d = 0; d < head_dim; ++d) target[d * rows.value] = to_float(source[d]);
            }
        });
    }
}

// Writes out and lse of the rows of one head.
template <class T>
void finish(const VerifyAttentionParams& p, const Group& g, int64_t h, const State& state) {
    const View<T, 3> out = p.out.as<T>();
    const int64_t v_dim = out.size[2];
    for (int m = 0; m < g.rows; ++m) {
        const int64_t row = g.row(m), head = g.query_head(h, m);
        const float sum = state.sum[m];
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        T* target = out.at(row, head);
        const float* source = state.out + m * v_dim;
        for (int64_t d = 0; d < v_dim; ++d) target[d] = from_float<T>(source[d] * inverse);
        p.lse[row * out.size[1] + head] =
            sum == 0.0f ? -__builtin_inff()
                        : static_cast<float>(state.max[m] * kLn2 + std::log(double{sum}));
    }
}

// Folds the partials of the group's later segments into the first one, and writes the result.
template <class T>
void fold_partials(const VerifyAttentionParams& p, const Group& g) {
    const int64_t v_dim = p.v_cache.size[3];
    for (int64_t h = 0; h < g.heads; ++h) {
        const State target = state_of(g, g.partials, 0, h, v_dim);
        for (int64_t s = g.folded; s < g.segments; ++s) {
            fold(target, state_of(g, g.partials, s, h, v_dim), g.rows, v_dim);
        }
        finish<T>(p, g, h, target);
    }
}

// Segments [begin, end) of a group, by one thread: folded at once where they start the sequence,
// kept one by one where another thread has the segments before them.
template <class T>
void run_segments(const VerifyAttentionParams& p, Group& g, Work& w, int64_t begin, int64_t end) {
    const int64_t v_dim = p.v_cache.size[3];
    const auto nothing = [](int64_t, const State&) {};
    begin_group<T>(p, g, w);
    if (begin > 0) {
        for (int64_t s = begin; s < end; ++s) {
            add_segment<T>(
                p, g, w, s, [&](int64_t h) { return state_of(g, g.partials, s, h, v_dim); },
                nothing);
        }
        return;
    }
    const bool whole = end == g.segments;
    float* states = whole ? w.folded : g.partials;
    const auto folded = [&](int64_t h) { return state_of(g, states, 0, h, v_dim); };
    const State segment = State::at(w.segment, g.rows, v_dim);
    add_segment<T>(p, g, w, 0, folded, nothing);
    for (int64_t s = 1; s < end; ++s) {
        add_segment<T>(
            p, g, w, s, [&](int64_t) { return segment; },
            [&](int64_t h, const State& state) { fold(folded(h), state, g.rows, v_dim); });
    }
    if (whole) {
        for (int64_t h = 0; h < g.heads; ++h) finish<T>(p, g, h, folded(h));
        g.partials = nullptr;  // a pool may give one thread several runs
    } else {
        g.folded = end;
    }
}

// --- 4. Schedule ---------------------------------------------------------------------------------

// Memory for the partial results of groups that a bound falls into.
std::vector<float> make_partials(Plan& plan, const std::vector<int64_t>& bound, int64_t v_dim) {
    std::vector<Group*> shared;
    int64_t floats = 0;
    size_t next = 1;
    for (Group& g : plan.groups) {
        while (next + 1 < bound.size() && bound[next] <= g.first_unit) ++next;
        if (next + 1 < bound.size() && bound[next] < g.first_unit + g.segments) {
            shared.push_back(&g);
            floats += g.segments * g.heads * State::floats(g.rows, v_dim);
        }
    }
    std::vector<float> memory(floats);
    floats = 0;
    for (Group* g : shared) {
        g->partials = memory.data() + floats;
        floats += g->segments * g->heads * State::floats(g->rows, v_dim);
    }
    return memory;
}

// Buffers that stay with the thread: fresh ones would cost page faults in every call.
Work thread_work(int64_t head_dim, int64_t v_dim, int64_t most_rows) {
    static thread_local std::vector<float> memory;
    Work w;
    const std::pair<float**, int64_t> parts[] = {
        {&w.keys, kTile * head_dim},
        {&w.values, kTile * v_dim},
        {&w.scores, kGroupRows * kTile},
        {&w.decay, kGroupRows},
        {&w.segment, State::floats(kGroupRows, v_dim)},
        {&w.queries, most_rows * head_dim},
        {&w.folded, State::floats(most_rows, v_dim)},
    };
    int64_t floats = kLanes;  // every part starts a cache line
    for (const auto& part : parts) floats += (part.second + kLanes - 1) / kLanes * kLanes;
    if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
    float* next = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) / 4;
    for (const auto& part : parts) {
        *part.first = next;
        next += (part.second + kLanes - 1) / kLanes * kLanes;
    }
    return w;
}

template <class T>
void run(const VerifyAttentionParams& p) {
    const int64_t head_dim = p.k_cache.size[3], v_dim = p.v_cache.size[3];
    Plan plan = make_plan(p, num_threads());
    const int64_t runs = clamp(plan.cost / kUnitGrain, 1, num_threads());
    const std::vector<int64_t> bound = cut(plan, runs);
    const std::vector<float> partials = make_partials(plan, bound, v_dim);
    parallel_for(0, runs, 1, [&](int64_t first_run, int64_t last_run) {
        Work w = thread_work(head_dim, v_dim, plan.most_rows);
        const int64_t begin = bound[first_run], end = bound[last_run];
        for (Group& g : plan.groups) {
            const int64_t from = begin > g.first_unit ? begin - g.first_unit : 0;
            const int64_t to = clamp(end - g.first_unit, 0, g.segments);
            if (from < to) run_segments<T>(p, g, w, from, to);
        }
    });
    for (const Group& g : plan.groups) {
        if (g.partials != nullptr) fold_partials<T>(p, g);
    }
}

}  // namespace

void verify_attention(const VerifyAttentionParams& p) {
    dispatch_float(p.dtype, [&](auto tag) { run<typename decltype(tag)::type>(p); });
}

}  // namespace specdec::cpu::SPECDEC_ISA
