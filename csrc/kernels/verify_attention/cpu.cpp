// verify_attention on the CPU. Row i of request b, head h, over the visible places t:
//   s_t = scale * q . k_t,   lse = ln sum_t exp(s_t),   out = sum_t exp(s_t - lse) v_t
//
// Work: a group is up to kGroupRows packed rows (rows x query heads of one KV head) of one request;
// its units are the KV segments. A thread owns a run of consecutive units. Each tile of K and V is
// gathered and converted once for all rows of the group, then multiplied in register blocks.
// Bytes moved: K and V of a request once per group; out and lse once.
// Determinism: a row's tiles are summed by online softmax inside a segment of fixed absolute
// places, and its segments are folded from the left; a tile that a row does not see leaves it
// bitwise unchanged. A group whose units fall to several threads keeps one partial result per
// segment, and the same fold runs afterwards. So neither batch, rows, pages, strides nor threads
// change a bit.
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu_tile.h"
#include "parallel.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kGroupRows = 96;
constexpr int64_t kUnitGrain = 1 << 20;  // multiply-adds below which a thread is not worth waking

// --- 1. Plan -------------------------------------------------------------------------------------

// Packed rows first .. first + rows - 1 of one (request, KV head). Packed row m is row m / (heads
// of the group) of the request and its head m % (heads of the group).
struct Group {
    int64_t request, head;
    int64_t row_begin, row_count;  // of the request, in q and out
    int64_t first;
    int rows;
    int64_t limit;  // places that its last row sees: nothing behind is read
    int64_t segments;
    int64_t first_unit;
    int64_t cost;               // of one unit
    float* partials = nullptr;  // one State per segment, for groups that several threads share
    int64_t folded = 0;         // leading segments that are already folded into the first of them
};

struct Plan {
    std::vector<Group> groups;
    int64_t units = 0, cost = 0;
};

int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

// Places that packed row m of the group sees: 0 .. result-1 (as far as their pages exist).
SPECDEC_SIMD int64_t visible_places(const VerifyAttentionParams& p, const Group& g, int64_t m) {
    const int64_t heads = p.q.size[1] / p.k_cache.size[2];
    const int64_t width = p.block_table.size[1] * p.k_cache.size[1];
    const int64_t seq_len = p.seq_lens[g.request];
    const int64_t own = seq_len - g.row_count + m / heads;  // the row's own place
    return clamp(p.mask == AttentionMask::kCausal ? own + 1 : seq_len, 0, width);
}

// Rows that see nothing, or belong to no request.
void clear_output(const VerifyAttentionParams& p, int64_t row, int64_t head) {
    const int64_t size = dtype_size(p.dtype);
    char* out = static_cast<char*>(p.out.data);
    std::memset(out + (row * p.out.stride[0] + head * p.out.stride[1]) * size, 0,
                p.out.size[2] * size);
    p.lse[row * p.out.size[1] + head] = -__builtin_inff();
}

Plan make_plan(const VerifyAttentionParams& p) {
    Plan plan;
    std::vector<char> owned(p.q.size[0], 0);
    const int64_t heads = p.q.size[1] / p.k_cache.size[2];
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t begin = clamp(p.cu_rows[b], 0, p.q.size[0]);
        const int64_t end = clamp(p.cu_rows[b + 1], begin, p.q.size[0]);
        for (int64_t row = begin; row < end; ++row) owned[row] = 1;
        const int64_t packed = (end - begin) * heads;
        const int64_t count = (packed + kGroupRows - 1) / kGroupRows;
        for (int64_t head = 0; head < p.k_cache.size[2]; ++head) {
            for (int64_t i = 0; i < count; ++i) {
                Group g{};
                g.request = b;
                g.head = head;
                g.row_begin = begin;
                g.row_count = end - begin;
                g.first = packed * i / count;
                g.rows = static_cast<int>(packed * (i + 1) / count - g.first);
                g.limit = visible_places(p, g, g.first + g.rows - 1);
                g.segments = (g.limit + kSegmentTokens - 1) / kSegmentTokens;
                g.first_unit = plan.units;
                // Gathering a tile costs about as much as multiplying it with a dozen rows.
                const int64_t places = g.segments > 0 ? g.limit / g.segments + 1 : 0;
                g.cost = places * (g.rows + 12) * (p.k_cache.size[3] + p.v_cache.size[3]);
                plan.units += g.segments;
                plan.cost += g.segments * g.cost;
                plan.groups.push_back(g);
                if (g.segments > 0) continue;
                for (int64_t m = g.first; m < g.first + g.rows; ++m) {
                    clear_output(p, begin + m / heads, head * heads + m % heads);
                }
            }
        }
    }
    for (int64_t row = 0; row < p.q.size[0]; ++row) {
        for (int64_t h = 0; h < p.q.size[1] && !owned[row]; ++h) clear_output(p, row, h);
    }
    return plan;
}

// --- 2. State of the rows of a group -------------------------------------------------------------

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

// --- 3. One tile ---------------------------------------------------------------------------------

// Per-thread buffers of a group.
struct Work {
    float *queries, *scores, *keys, *values, *decay;
    float *folded, *segment;       // States
    int64_t places[kGroupRows];    // that each row sees
    Places tile[2];                // this tile and the next one, by parity
    uint64_t visible[kGroupRows];  // of them, in the tile at hand

    static int64_t floats(int64_t head_dim, int64_t v_dim) {
        return kGroupRows * (head_dim + kTile + 1) + kTile * (head_dim + v_dim) +
               2 * State::floats(kGroupRows, v_dim) + 8 * kLanes;
    }
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

template <class T>
void add_tile(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t first,
              const State& state) {
    const int64_t head_dim = p.k_cache.size[3], v_dim = p.v_cache.size[3];
    const Places& places = w.tile[first / kTile % 2];
    Places& next = w.tile[first / kTile % 2 ^ 1];
    find_places(p, g.request, first + kTile, g.limit, next);
    uint64_t any = 0;
    for (int m = 0; m < g.rows; ++m) {
        w.visible[m] = places.present & first_keys(w.places[m] - first);
        any |= w.visible[m];
    }
    if (any == 0) return;
    const int strips = (64 - __builtin_clzll(any) + kLanes - 1) / kLanes;

    const View<const T, 4> k_cache = p.k_cache.as<const T>(), v_cache = p.v_cache.as<const T>();
    pack_k(k_cache, v_cache, g.head, places, strips, w.keys);
    for_blocks(g.rows, [&](int row, auto rows) {
        score_block<rows.value>(w.queries + row * head_dim, w.keys, head_dim, strips,
                                w.scores + row * kTile);
    });
    soften(w, state, g.rows, p.scale * kLog2E);

    pack_v(v_cache, k_cache, g.head, places, next, w.values);
    for_blocks(g.rows, [&](int row, auto rows) {
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

// --- 4. Segments of a group ----------------------------------------------------------------------

template <class T>
void add_segment(const VerifyAttentionParams& p, const Group& g, Work& w, int64_t segment,
                 const State& state) {
    state.clear(g.rows, p.v_cache.size[3]);
    const int64_t begin = segment * kSegmentTokens;
    const int64_t end = begin + kSegmentTokens < g.limit ? begin + kSegmentTokens : g.limit;
    find_places(p, g.request, begin, g.limit, w.tile[begin / kTile % 2]);
    for (int64_t first = begin; first < end; first += kTile) add_tile<T>(p, g, w, first, state);
}

template <class T>
void begin_group(const VerifyAttentionParams& p, const Group& g, Work& w) {
    for (int m = 0; m < g.rows; ++m) w.places[m] = visible_places(p, g, g.first + m);
    const View<const T, 3> q = p.q.as<const T>();
    const int64_t head_dim = q.size[2], heads = q.size[1] / p.k_cache.size[2];
    for_blocks(g.rows, [&](int row, auto rows) {
        for (int r = 0; r < rows.value; ++r) {
            const int64_t m = g.first + row + r;
            const T* source = q.at(g.row_begin + m / heads, g.head * heads + m % heads);
            float* target = w.queries + row * head_dim + r;
            for (int64_t d = 0; d < head_dim; ++d) target[d * rows.value] = to_float(source[d]);
        }
    });
}

// Writes out and lse of the group's rows.
template <class T>
void finish(const VerifyAttentionParams& p, const Group& g, const State& state) {
    const View<T, 3> out = p.out.as<T>();
    const int64_t v_dim = out.size[2], heads = out.size[1] / p.k_cache.size[2];
    for (int r = 0; r < g.rows; ++r) {
        const int64_t m = g.first + r;
        const int64_t row = g.row_begin + m / heads, head = g.head * heads + m % heads;
        const float sum = state.sum[r];
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        T* target = out.at(row, head);
        const float* source = state.out + r * v_dim;
        for (int64_t d = 0; d < v_dim; ++d) target[d] = from_float<T>(source[d] * inverse);
        p.lse[row * out.size[1] + head] =
            sum == 0.0f ? -__builtin_inff()
                        : static_cast<float>(state.max[r] * kLn2 + std::log(double{sum}));
    }
}

// Folds segments [first, last) of the group's partials into the first one, and writes the result.
template <class T>
void fold_partials(const VerifyAttentionParams& p, const Group& g) {
    const int64_t v_dim = p.v_cache.size[3], step = State::floats(g.rows, v_dim);
    const State target = State::at(g.partials, g.rows, v_dim);
    for (int64_t s = g.folded; s < g.segments; ++s) {
        fold(target, State::at(g.partials + s * step, g.rows, v_dim), g.rows, v_dim);
    }
    finish<T>(p, g, target);
}

// Segments [begin, end) of a group, by one thread: folded at once where they start the row, kept
// one by one where another thread has the segments before them.
template <class T>
void run_segments(const VerifyAttentionParams& p, Group& g, Work& w, int64_t begin, int64_t end) {
    const int64_t v_dim = p.v_cache.size[3], step = State::floats(g.rows, v_dim);
    begin_group<T>(p, g, w);
    if (begin > 0) {
        for (int64_t s = begin; s < end; ++s) {
            add_segment<T>(p, g, w, s, State::at(g.partials + s * step, g.rows, v_dim));
        }
        return;
    }
    const bool whole = end == g.segments;
    const State folded = State::at(whole ? w.folded : g.partials, g.rows, v_dim);
    const State segment = State::at(w.segment, g.rows, v_dim);
    add_segment<T>(p, g, w, 0, folded);
    for (int64_t s = 1; s < end; ++s) {
        add_segment<T>(p, g, w, s, segment);
        fold(folded, segment, g.rows, v_dim);
    }
    if (whole) {
        finish<T>(p, g, folded);
        g.partials = nullptr;  // a pool may give one thread several runs
    } else {
        g.folded = end;
    }
}

// --- 5. Schedule ---------------------------------------------------------------------------------

// Cuts the units into runs of equal cost, one per thread; run i is units bound[i] .. bound[i+1]-1.
std::vector<int64_t> cut(const Plan& plan, int64_t runs) {
    std::vector<int64_t> bound(runs + 1, plan.units);
    bound[0] = 0;
    int64_t cost = 0, run = 1;
    for (const Group& g : plan.groups) {
        const int64_t next = cost + g.segments * g.cost;
        for (; run < runs && plan.cost * run / runs < next; ++run) {
            bound[run] = g.first_unit + (plan.cost * run / runs - cost) / g.cost;
        }
        cost = next;
    }
    return bound;
}

// Memory for the partial results of groups that a bound falls into.
std::vector<float> make_partials(Plan& plan, const std::vector<int64_t>& bound, int64_t v_dim) {
    std::vector<Group*> shared;
    int64_t floats = 0;
    size_t next = 1;
    for (Group& g : plan.groups) {
        while (next + 1 < bound.size() && bound[next] <= g.first_unit) ++next;
        if (next + 1 < bound.size() && bound[next] < g.first_unit + g.segments) {
            shared.push_back(&g);
            floats += g.segments * State::floats(g.rows, v_dim);
        }
    }
    std::vector<float> memory(floats);
    floats = 0;
    for (Group* g : shared) {
        g->partials = memory.data() + floats;
        floats += g->segments * State::floats(g->rows, v_dim);
    }
    return memory;
}

// Buffers that stay with the thread: fresh ones would cost page faults in every call.
Work thread_work(int64_t head_dim, int64_t v_dim) {
    static thread_local std::vector<float> memory;
    const int64_t floats = Work::floats(head_dim, v_dim);
    if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
    const uintptr_t line = reinterpret_cast<uintptr_t>(memory.data());
    float* next = memory.data() + (64 - line % 64) % 64 / sizeof(float);
    const auto take = [&](int64_t n) {
        float* at = next;
        next += (n + kLanes - 1) / kLanes * kLanes;
        return at;
    };
    Work w;
    w.keys = take(kTile * head_dim);
    w.values = take(kTile * v_dim);
    w.scores = take(kGroupRows * kTile);
    w.queries = take(kGroupRows * head_dim);
    w.folded = take(State::floats(kGroupRows, v_dim));
    w.segment = take(State::floats(kGroupRows, v_dim));
    w.decay = take(kGroupRows);
    return w;
}

template <class T>
void run(const VerifyAttentionParams& p) {
    const int64_t head_dim = p.k_cache.size[3], v_dim = p.v_cache.size[3];
    Plan plan = make_plan(p);
    const int64_t runs = clamp(plan.cost / kUnitGrain, 1, num_threads());
    const std::vector<int64_t> bound = cut(plan, runs);
    const std::vector<float> partials = make_partials(plan, bound, v_dim);
    parallel_for(0, runs, 1, [&](int64_t first_run, int64_t last_run) {
        Work w = thread_work(head_dim, v_dim);
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
