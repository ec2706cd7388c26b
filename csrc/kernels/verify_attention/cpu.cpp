// verify_attention on the CPU. Row i of request b, head h, over the visible places t:
//   s_t = scale * q . k_t,   lse = ln sum_t exp(s_t),   out = sum_t exp(s_t - lse) v_t
//
// Work: a group is up to kWideRows packed rows (rows x query heads of a KV head) of one request, for
// some KV heads; its units are the KV segments (cpu_plan.h). A thread owns a run of consecutive
// units. Tiles of 64 places of K and V go through cpu_wide.h, whose lanes are rows, or, with few
// rows, through cpu_narrow.h, whose lanes are keys and channels: the same bits.
// Bytes moved: K and V of a request once per group; out and lse once.
// Determinism: a row's tiles are summed by online softmax inside a segment of fixed absolute
// places, and its segments are folded from the left; a tile that a row does not see leaves it
// bitwise unchanged. A group whose units fall to several threads keeps one partial result per
// segment, and the same fold runs afterwards. So neither batch, rows, pages, strides nor threads
// change a bit.
#include <cmath>
#include <vector>

#include "cpu_narrow.h"
#include "cpu_plan.h"
#include "cpu_wide.h"
#include "parallel.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- 1. What rows see ----------------------------------------------------------------------------

struct TileView {
    Places places;
    uint64_t visible[kWideRows];  // keys of the tile that each row sees; the last row's behind them
    int count;                    // 0 .. count-1 are all that any row sees
    bool same;                    // every row sees all of these
};

// Per-thread buffers of a group.
struct Work {
    float *queries, *scores, *keys, *values, *decay;
    float *folded, *segment;           // a State per head
    int64_t places[kWideRows];         // that each row sees
    TileView tile[kSegmentTiles + 1];  // of the segment at hand, and the first one of the next
};

void find_tile(const VerifyAttentionParams& p, const Group& g, const Work& w, int64_t first,
               TileView& tile) {
    find_places(p, g.request, first, g.limit, tile.places);
    uint64_t any = 0, all = kAllKeys;
    for (int m = 0; m < g.rows; ++m) {
        tile.visible[m] = tile.places.present & first_keys(w.places[m] - first);
        any |= tile.visible[m];
        all &= tile.visible[m];
    }
    for (int m = g.rows; m < g.lanes; ++m) tile.visible[m] = tile.visible[g.rows - 1];
    tile.count = any == 0 ? 0 : kTile - __builtin_clzll(any);
    tile.same = all == any && any == first_keys(tile.count);
}

// --- 2. Segments of a group ----------------------------------------------------------------------

// State of segment s and head h among partials, or of head h (s = 0).
State state_of(const Group& g, float* states, int64_t s, int64_t h, int64_t v_dim) {
    return State::at(states + (s * g.heads + h) * State::floats(g.lanes, v_dim), g.lanes, v_dim);
}

void fold(const Group& g, const State& target, const State& next, int64_t v_dim) {
    if (g.narrow()) {
        fold_narrow(target, next, g.rows, v_dim);
    } else {
        fold_wide(target, next, g.lanes, v_dim);
    }
}

template <class T>
void add_wide_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int tiles, int found,
                      float* states) {
    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    const int64_t head_dim = k_cache.size[3], v_dim = v_cache.size[3];
    Rows<T> k[2], v[2];
    const auto find = [&](int64_t h, int tile, int slot) {
        k[slot].find(k_cache, g.head + h, w.tile[tile].places);
        v[slot].find(v_cache, g.head + h, w.tile[tile].places);
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
            const TileView& view = w.tile[tile];
            const WideTile<T> t{k[slot],
                                v[slot],
                                k[1 - slot],
                                v[1 - slot],
                                head_dim,
                                v_dim,
                                view.count,
                                view.same,
                                view.visible,
                                p.scale * kLog2E,
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
void add_narrow_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int tiles,
                        int found, float* states) {
    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    const int64_t head_dim = k_cache.size[3], v_dim = v_cache.size[3];
    const Places none{};
    Rows<T> rows;
    for (int tile = 0; tile < tiles; ++tile) {
        const TileView& view = w.tile[tile];
        if (view.count == 0) continue;
        Prefetch values(v_cache, g.head, g.heads, view.places);
        for (int64_t h = 0; h < g.heads; ++h) {
            rows.find(k_cache, g.head + h, view.places);
            dispatch_int<4, 3, 2, 1>(g.rows, [&](auto count) {
                score_narrow_tile<count.value>(
                    w.queries + h * g.rows * head_dim, rows.at, head_dim, view.count, view.visible,
                    p.scale * kLog2E, state_of(g, states, 0, h, v_dim),
                    w.scores + h * g.rows * kTile, w.decay + h * g.rows, values);
            });
        }
        Prefetch keys(k_cache, g.head, g.heads, tile + 1 < found ? w.tile[tile + 1].places : none);
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

// One segment, into a State per head.
template <class T>
void add_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t s,
                 float* states) {
    const int64_t begin = s * kSegmentTokens, v_dim = p.v_cache.size[3];
    int found = 0;
    for (; found <= kSegmentTiles && begin + found * kTile < g.limit; ++found) {
        find_tile(p, g, w, begin + found * kTile, w.tile[found]);
    }
    const int tiles = found < kSegmentTiles ? found : kSegmentTiles;
    for (int64_t h = 0; h < g.heads; ++h) {
        state_of(g, states, 0, h, v_dim).clear(g.lanes, v_dim);
    }
    if (g.narrow()) {
        add_narrow_segment<T>(p, g, w, tiles, found, states);
    } else {
        add_wide_segment<T>(p, g, w, tiles, found, states);
    }
}

// Queries of a head: [rows][D] for few rows, else [D][lanes], zeros where there is no row.
template <class T>
void begin_group(const VerifyAttentionParams& p, const Group& g, Work& w) {
    for (int m = 0; m < g.rows; ++m) w.places[m] = visible_places(p, g, m);
    const View<const T, 3> q = p.q.as<const T>();
    const int64_t head_dim = q.size[2];
    const int64_t row_step = g.narrow() ? head_dim : 1, step = g.narrow() ? 1 : g.lanes;
    for (int64_t h = 0; h < g.heads; ++h) {
        float* queries = w.queries + h * g.lanes * head_dim;
        for (int m = 0; m < g.lanes; ++m) {
            float* target = queries + m * row_step;
            if (m >= g.rows) {
                for (int64_t d = 0; d < head_dim; ++d) target[d * step] = 0.0f;
                continue;
            }
            const T* source = q.at(g.row(m), g.query_head(h, m));
            for (int64_t d = 0; d < head_dim; ++d) target[d * step] = to_float(source[d]);
        }
    }
}

// Writes out and lse of the rows of one head.
template <class T>
void finish(const VerifyAttentionParams& p, const Group& g, int64_t h, const State& state) {
    const View<T, 3> out = p.out.as<T>();
    const int64_t v_dim = out.size[2];
    const int64_t row_step = g.narrow() ? v_dim : 1, step = g.narrow() ? 1 : g.lanes;
    for (int m = 0; m < g.rows; ++m) {
        const int64_t row = g.row(m), head = g.query_head(h, m);
        const float sum = state.sum[m];
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        T* target = out.at(row, head);
        const float* source = state.out + m * row_step;
        for (int64_t d = 0; d < v_dim; ++d) target[d] = from_float<T>(source[d * step] * inverse);
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
            fold(g, target, state_of(g, g.partials, s, h, v_dim), v_dim);
        }
        finish<T>(p, g, h, target);
    }
}

// Segments [begin, end) of a group, by one thread: folded at once where they start the sequence,
// kept one by one where another thread has the segments before them.
template <class T>
void run_segments(const VerifyAttentionParams& p, Group& g, Work& w, int64_t begin, int64_t end) {
    const int64_t v_dim = p.v_cache.size[3];
    begin_group<T>(p, g, w);
    if (begin > 0) {
        for (int64_t s = begin; s < end; ++s) {
            add_segment<T>(p, g, w, s, state_of(g, g.partials, s, 0, v_dim).out);
        }
        return;
    }
    const bool whole = end == g.segments;
    float* states = whole ? w.folded : g.partials;
    const auto folded = [&](int64_t h) { return state_of(g, states, 0, h, v_dim); };
    add_segment<T>(p, g, w, 0, states);
    for (int64_t s = 1; s < end; ++s) {
        add_segment<T>(p, g, w, s, w.segment);
        for (int64_t h = 0; h < g.heads; ++h) {
            fold(g, folded(h), state_of(g, w.segment, 0, h, v_dim), v_dim);
        }
    }
    if (whole) {
        for (int64_t h = 0; h < g.heads; ++h) finish<T>(p, g, h, folded(h));
        g.partials = nullptr;  // a pool may give one thread several runs
    } else {
        g.folded = end;
    }
}

// --- 3. Schedule ---------------------------------------------------------------------------------

// Memory for the partial results of groups that a bound falls into.
std::vector<float> make_partials(Plan& plan, const std::vector<int64_t>& bound, int64_t v_dim) {
    std::vector<Group*> shared;
    int64_t floats = 0;
    size_t next = 1;
    for (Group& g : plan.groups) {
        while (next + 1 < bound.size() && bound[next] <= g.first_unit) ++next;
        if (next + 1 < bound.size() && bound[next] < g.first_unit + g.segments) {
            shared.push_back(&g);
            floats += g.segments * g.heads * State::floats(g.lanes, v_dim);
        }
    }
    std::vector<float> memory(floats);
    floats = 0;
    for (Group* g : shared) {
        g->partials = memory.data() + floats;
        floats += g->segments * g->heads * State::floats(g->lanes, v_dim);
    }
    return memory;
}

// Buffers that stay with the thread: fresh ones would cost page faults in every call.
Work thread_work(int64_t head_dim, int64_t v_dim, int64_t most_lanes) {
    static thread_local std::vector<float> memory;
    Work w;
    const std::pair<float**, int64_t> parts[] = {
        {&w.keys, kKeyFloats},
        {&w.values, kValueFloats},
        {&w.scores,
         (kTile + Rows<float>::kAhead) * (most_lanes > kWideRows ? most_lanes : kWideRows)},
        {&w.decay, most_lanes},
        {&w.segment, State::floats(most_lanes, v_dim)},
        {&w.queries, most_lanes * head_dim},
        {&w.folded, State::floats(most_lanes, v_dim)},
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
        Work w = thread_work(head_dim, v_dim, plan.most_lanes);
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
