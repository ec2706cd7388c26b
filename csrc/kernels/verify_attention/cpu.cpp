// verify_attention on the CPU. Row i of request b, head h, over the visible places t:
//   s_t = scale * q . k_t,   lse = ln sum_t exp(s_t),   out = sum_t exp(s_t - lse) v_t
//
// Work: a group is up to kWideRows packed rows (rows x query heads of a KV head) of one request, for
// some KV heads; its units are the KV segments (cpu_plan.h). A thread owns a run of consecutive
// units. Tiles of 64 places of K and V go through cpu_pairs.h where there are products of bf16 pairs, else
// (cpu_fma.h) through cpu_wide.h, whose lanes are rows, or, with few rows, through cpu_narrow.h, whose
// lanes are keys and channels: the same bits.
// Bytes moved: K and V of a request once per group; out and lse once.
// Determinism: a row's tiles are summed by online softmax inside a segment of fixed absolute
// places, and its segments are folded from the left; a tile that a row does not see leaves it
// bitwise unchanged. A group whose units fall to several threads keeps one partial result per
// segment, and the same fold runs afterwards. So neither batch, rows, pages, strides nor threads
// change a bit.
#include <cmath>
#include <vector>

#include "kept_memory.h"
#include "parallel.h"
#if defined(__AVX512BF16__)
#include "cpu_pairs.h"
#else
#include "cpu_fma.h"
#endif

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- 1. Segments of a group ----------------------------------------------------------------------

struct Work {
    Buffers buffers;
    float *folded, *segment;           // a State per head
    int64_t places[kWideRows];         // the limit of each row
    TileView tile[kSegmentTiles + 1];  // of the segment at hand, and the first one of the next
};

// Segment s of the group's, into a State per head.
template <class C>
void add_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t s,
                 float* states) {
    const int64_t begin = (g.first_segment + s) * kSegmentTokens;
    const int64_t width = state_width(p.v_cache.size[3]);
    int found = 0;
    for (; found <= kSegmentTiles && begin + found * kTile < g.limit; ++found) {
        find_tile(p, g, w.places, begin + found * kTile, w.tile[found]);
    }
    const int tiles = found < kSegmentTiles ? found : kSegmentTiles;
    for (int64_t h = 0; h < g.heads; ++h) {
        state_of(g, states, 0, h, width).clear(g.lanes, width);
    }
    add_tiles<C>(p, g, w.buffers, w.tile, tiles, found, states);
}

template <class T>
void begin_group(const VerifyAttentionParams& p, const Group& g, Work& w) {
    for (int m = 0; m < g.rows; ++m) w.places[m] = visible_places(p, g, m);
    for (int64_t h = 0; h < g.heads; ++h) load_queries<T>(p, g, h, w.buffers);
}

// Writes out and lse of the rows of one head. A sink is a key without a value.
template <class T>
void finish(const VerifyAttentionParams& p, const Group& g, int64_t h, const State& state) {
    const View<T, 3> out = p.out.as<T>();
    const int64_t v_dim = out.size[2];
    for (int m = 0; m < g.rows; ++m) {
        const int64_t row = g.row(m), head = g.query_head(h, m);
        float sum = state.sum[m], max = state.max[m], keep = p.v_scale[g.head + h];
        if (p.sinks != nullptr && sum != 0.0f) {
            const float sink = p.sinks[head] * kLog2E;
            const float top = std::max(max, sink);
            const float kept = std::exp2(max - top);
            keep *= kept;
            sum = sum * kept + std::exp2(sink - top);
            max = top;
        }
        store_out(g, state, m, sum == 0.0f ? 0.0f : keep / sum, v_dim, out.at(row, head));
        p.lse[row * out.size[1] + head] =
            sum == 0.0f ? -__builtin_inff()
                        : static_cast<float>(max * kLn2 + std::log(double{sum}));
    }
}

// Folds the partials of the group's later segments into the first one, and writes the result.
template <class T>
void fold_partials(const VerifyAttentionParams& p, const Group& g) {
    const int64_t width = state_width(p.v_cache.size[3]);
    for (int64_t h = 0; h < g.heads; ++h) {
        const State target = state_of(g, g.partials, 0, h, width);
        for (int64_t s = g.folded; s < g.segments; ++s) {
            fold(g, target, state_of(g, g.partials, s, h, width), width);
        }
        finish<T>(p, g, h, target);
    }
}

// Segments [begin, end) of a group, by one thread: folded at once where they start the sequence,
// kept one by one where another thread has the segments before them.
template <class T, class C>
void run_segments(const VerifyAttentionParams& p, Group& g, Work& w, int64_t begin, int64_t end) {
    const int64_t width = state_width(p.v_cache.size[3]);
    begin_group<T>(p, g, w);
    if (begin > 0) {
        for (int64_t s = begin; s < end; ++s) {
            add_segment<C>(p, g, w, s, state_of(g, g.partials, s, 0, width).out);
        }
        return;
    }
    const bool whole = end == g.segments;
    float* states = whole ? w.folded : g.partials;
    const auto folded = [&](int64_t h) { return state_of(g, states, 0, h, width); };
    add_segment<C>(p, g, w, 0, states);
    for (int64_t s = 1; s < end; ++s) {
        add_segment<C>(p, g, w, s, w.segment);
        for (int64_t h = 0; h < g.heads; ++h) {
            fold(g, folded(h), state_of(g, w.segment, 0, h, width), width);
        }
    }
    if (whole) {
        for (int64_t h = 0; h < g.heads; ++h) finish<T>(p, g, h, folded(h));
        g.partials = nullptr;  // a pool may give one thread several runs
    } else {
        g.folded = end;
    }
}

// --- 2. Schedule ---------------------------------------------------------------------------------

// Memory for the partial results of groups that a bound falls into, the calling thread's.
void make_partials(Plan& plan, const std::vector<int64_t>& bound, int64_t width) {
    static thread_local KeptMemory memory;
    std::vector<Group*> shared;
    int64_t floats = 0;
    size_t next = 1;
    for (Group& g : plan.groups) {
        while (next + 1 < bound.size() && bound[next] <= g.first_unit) ++next;
        if (next + 1 < bound.size() && bound[next] < g.first_unit + g.segments) {
            shared.push_back(&g);
            floats += g.segments * g.heads * State::floats(g.lanes, width);
        }
    }
    float* partials = memory.floats(floats);
    for (Group* g : shared) {
        g->partials = partials;
        partials += g->segments * g->heads * State::floats(g->lanes, width);
    }
}

// Buffers of the calling thread.
void find_memory(int64_t head_dim, int64_t v_dim, int64_t most_lanes, Work& w) {
    static thread_local KeptMemory memory;
    const int64_t width = state_width(v_dim);
    const auto visit = [&](const auto& fn) {  // every part starts a cache line
        const auto whole_lines = [&](auto*& part, int64_t floats) {
            fn(part, (floats + kLanes - 1) / kLanes * kLanes);
        };
        w.buffers.visit(head_dim, v_dim, most_lanes, whole_lines);
        whole_lines(w.segment, State::floats(most_lanes, width));
        whole_lines(w.folded, State::floats(most_lanes, width));
    };
    int64_t floats = 0;
    visit([&](auto*&, int64_t size) { floats += size; });
    float* next = memory.floats(floats);
    visit([&](auto*& part, int64_t size) {
        part = reinterpret_cast<std::decay_t<decltype(part)>>(next);
        next += size;
    });
}

// q and out of type T, caches of type C.
template <class T, class C>
void run(const VerifyAttentionParams& p) {
    const int64_t head_dim = p.k_cache.size[3], v_dim = p.v_cache.size[3];
    Plan plan = make_plan(p, num_threads());
    const int64_t runs = clamp(plan.cost / kUnitGrain, 1, num_threads());
    const std::vector<int64_t> bound = cut(plan, runs);
    make_partials(plan, bound, state_width(v_dim));
    parallel_for(0, runs, 1, [&](int64_t first_run, int64_t last_run) {
        Work w;
        find_memory(head_dim, v_dim, plan.most_lanes, w);
        const int64_t begin = bound[first_run], end = bound[last_run];
        for (Group& g : plan.groups) {
            const int64_t from = begin > g.first_unit ? begin - g.first_unit : 0;
            const int64_t to = clamp(end - g.first_unit, 0, g.segments);
            if (from < to) run_segments<T, C>(p, g, w, from, to);
        }
    });
    for (const Group& g : plan.groups) {
        if (g.partials != nullptr) fold_partials<T>(p, g);
    }
}

}  // namespace

void verify_attention(const VerifyAttentionParams& p) {
    const auto run_caches = [&](auto tag) {
        using T = typename decltype(tag)::type;
        p.cache_dtype == DType::kF8E4M3 ? run<T, f8e4m3>(p) : run<T, T>(p);
    };
#if defined(__AVX512BF16__)
    run_caches(Tag<bf16>{});
#else
    dispatch_float(p.dtype, run_caches);
#endif
}

}  // namespace specdec::cpu::SPECDEC_ISA
