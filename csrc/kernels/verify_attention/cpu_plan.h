// How verify_attention's work is cut into groups and units on the CPU, which thread evaluates what, and
// which keys of a tile each row of a group sees. Included by cpu.cpp only.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu_tile.h"
#include "mask.h"
#include "rows.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kGroupFloats = 1 << 17;     // of queries and outputs of a group, an L2 cache
constexpr int64_t kNarrowBytes = 128 * 1024;  // of K or V that few rows take from a tile at once
constexpr int64_t kUnitGrain = 1 << 20;  // multiply-adds below which a thread is not worth waking

// Packed rows first .. first + rows - 1 of KV heads head .. head + heads - 1 of one request. Packed
// row m of a KV head is row m / share of the request, query head m % share of the `share` query heads
// that read this KV head. All heads go through a segment before the next one: neighbouring heads lie
// in the same memory pages, which are costly to look up.
struct Group {
    int64_t request, head, heads, share;
    int64_t row_begin, row_count;  // of the request, in q and out, also past max_rows
    int64_t first;
    int rows;
    int lanes;              // rows that there is memory for
    int64_t limit;          // places that its last row sees: nothing behind is read
    int64_t first_segment;  // the first one with a place that any row sees
    int64_t segments;       // units of the group
    int64_t first_unit;
    int64_t cost;  // of one unit
    float* partials =
        nullptr;         // a State per segment and head, where several threads share the group
    int64_t folded = 0;  // leading segments that are already folded into the first of them

    bool narrow() const { return rows <= kNarrowRows; }
    int64_t row(int64_t m) const { return row_begin + (first + m) / share; }
    int64_t query_head(int64_t h, int64_t m) const {
        return (head + h) * share + (first + m) % share;
    }
};

struct Plan {
    std::vector<Group> groups;
    int64_t units = 0, cost = 0;
    int64_t most_lanes = 0;  // of a group, over its heads
};

inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

inline PassRows pass_rows(const VerifyAttentionParams& p, const Group& g) {
    return {g.row_begin, p.seq_lens[g.request] - g.row_count};
}

// Packed row m of the group sees places of 0 .. result-1 only: all whose pages exist, but for
// has_holes().
inline int64_t visible_places(const VerifyAttentionParams& p, const Group& g, int64_t m) {
    const int64_t width = p.block_table.size[1] * p.k_cache.size[1];
    const int64_t seq_len = p.seq_lens[g.request];
    const int64_t own = seq_len - g.row_count + g.row(m) - g.row_begin;  // the row's own place
    return clamp(p.mask == AttentionMask::kCausal ? own + 1 : seq_len, 0, width);
}

// The first place that any row of the group may see.
inline int64_t first_place(const VerifyAttentionParams& p, const Group& g) {
    if (p.window == 0) return 0;
    const PassRows rows = pass_rows(p, g);
    int64_t first = rows.prefix > 0 ? rows.prefix : 0;
    for (int64_t row = g.row(0); row <= g.row(g.rows - 1); ++row) {
        first = std::min(first, prefix_window(p, rows, row - g.row_begin).begin);
    }
    return first;
}

// Rows that see nothing, belong to no request or are past max_rows.
inline void clear_output(const VerifyAttentionParams& p, int64_t row, int64_t head) {
    const int64_t size = dtype_size(p.dtype);
    char* out = static_cast<char*>(p.out.data);
    std::memset(out + (row * p.out.stride[0] + head * p.out.stride[1]) * size, 0,
                p.out.size[2] * size);
    p.lse[row * p.out.size[1] + head] = -__builtin_inff();
}

// Groups of all heads of request b, `step` KV heads each (fewer where they would outgrow the cache).
inline void plan_request(const VerifyAttentionParams& p, int64_t b, int64_t begin, int64_t end,
                         int64_t step, Plan& plan) {
    const int64_t kv_heads = p.k_cache.size[2], share = p.q.size[1] / kv_heads;
    const int64_t width = p.k_cache.size[3] + p.v_cache.size[3];
    const int64_t packed = clamp(end - begin, 0, p.max_rows) * share;
    const int64_t vectors = (packed + kNativeLanes - 1) / kNativeLanes;
    const int64_t chunks = (vectors + kWideVectors - 1) / kWideVectors;
    const auto bound = [&](int64_t i) {  // of chunks: whole vectors, as evenly as they go
        return i == chunks ? packed : vectors * i / chunks * kNativeLanes;
    };
    for (int64_t i = 0; i < chunks; ++i) {
        Group g{};
        g.request = b;
        g.share = share;
        g.row_begin = begin;
        g.row_count = end - begin;
        g.first = bound(i);
        g.rows = static_cast<int>(bound(i + 1) - g.first);
        g.lanes = g.narrow() ? g.rows : (g.rows + kNativeLanes - 1) / kNativeLanes * kNativeLanes;
        g.limit = visible_places(p, g, g.rows - 1);
        g.first_segment = first_place(p, g) / kSegmentTokens;
        const int64_t last_segment = (g.limit + kSegmentTokens - 1) / kSegmentTokens;
        g.segments = std::max<int64_t>(last_segment - g.first_segment, 0);
        const int64_t bytes = kTile * (width / 2) * dtype_size(p.cache_dtype);
        const int64_t fit = g.narrow() ? kNarrowBytes / bytes : kGroupFloats / (g.lanes * width);
        const int64_t most = clamp(fit, 1, step);
        for (g.head = 0; g.head < kv_heads; g.head += g.heads) {
            g.heads = clamp(kv_heads - g.head, 1, most);
            g.first_unit = plan.units;
            // Widening a tile costs about as much as multiplying it with a few rows.
            const int64_t places =
                g.segments > 0 ? std::min(g.limit / g.segments + 1, int64_t{kSegmentTokens}) : 0;
            g.cost = g.heads * places * (g.narrow() ? 12 : g.lanes + 4) * width;
            plan.units += g.segments;
            plan.cost += g.segments * g.cost;
            if (plan.most_lanes < g.heads * g.lanes) plan.most_lanes = g.heads * g.lanes;
            plan.groups.push_back(g);
            for (int64_t m = 0; m < g.rows && g.segments == 0; ++m) {
                for (int64_t h = 0; h < g.heads; ++h) clear_output(p, g.row(m), g.query_head(h, m));
            }
        }
    }
}

// Also clears the output of all rows that no unit computes.
inline Plan make_plan(const VerifyAttentionParams& p, int64_t threads) {
    const int64_t rows = p.q.size[0], kv_heads = p.k_cache.size[2];
    std::vector<int64_t> bound(2 * p.batch);
    std::vector<char> owned(rows, 0);
    int64_t segments = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
        const RowSpan span = rows_of_request(p.cu_rows, b, rows);
        const int64_t begin = span.first, end = begin + span.count;
        bound[2 * b] = begin;
        bound[2 * b + 1] = end;
        const int64_t computed = clamp(end - begin, 0, p.max_rows);
        std::fill_n(owned.begin() + begin, computed, 1);
        if (end > begin && p.seq_lens[b] > 0) segments += p.seq_lens[b] / kSegmentTokens + 1;
    }
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t h = 0; h < p.q.size[1] && !owned[row]; ++h) clear_output(p, row, h);
    }
    // Few segments for several threads: split the heads as well.
    const int64_t step =
        threads == 1 ? kv_heads : clamp(kv_heads * segments / (4 * threads), 1, kv_heads);
    Plan plan;
    for (int64_t b = 0; b < p.batch; ++b) {
        plan_request(p, b, bound[2 * b], bound[2 * b + 1], step, plan);
    }
    return plan;
}

// Cuts the units into runs of equal cost; run i is units bound[i] .. bound[i+1]-1.
inline std::vector<int64_t> cut(const Plan& plan, int64_t runs) {
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

// --- Tiles of a group ----------------------------------------------------------------------------

struct TileView {
    Places places;
    uint64_t visible[kWideRows];  // keys of the tile that each row sees; the last row's behind them
    int count;                    // 0 .. count-1 are all that any row sees
    bool same;                    // every row sees all of these
};

// Those of `keys`, a tile's from place `first` on, that row i of the request sees.
inline uint64_t without_holes(const VerifyAttentionParams& p, const PassRows& rows, int64_t i,
                              int64_t first, uint64_t keys) {
    const uint64_t of_prefix = first_keys(rows.prefix - first);
    const PlaceRange window = prefix_window(p, rows, i);
    uint64_t seen =
        keys & of_prefix & first_keys(window.end - first) & ~first_keys(window.begin - first);
    for (uint64_t left = keys & ~of_prefix; left != 0; left &= left - 1) {
        const int key = __builtin_ctzll(left);
        if (sees_place(p, rows, i, first + key)) seen |= uint64_t{1} << key;
    }
    return seen;
}

// places: the limit of each packed row.
inline void find_tile(const VerifyAttentionParams& p, const Group& g, const int64_t* places,
                      int64_t first, TileView& tile) {
    find_places(p, g.request, first, g.limit, tile.places);
    const PassRows rows = pass_rows(p, g);
    const bool holes = has_holes(p);
    uint64_t any = 0, all = kAllKeys;
    for (int m = 0; m < g.rows; ++m) {
        tile.visible[m] = tile.places.present & first_keys(places[m] - first);
        if (holes && m > 0 && g.row(m) == g.row(m - 1)) {
            tile.visible[m] = tile.visible[m - 1];
        } else if (holes) {
            const int64_t i = g.row(m) - g.row_begin;
            tile.visible[m] = without_holes(p, rows, i, first, tile.visible[m]);
        }
        any |= tile.visible[m];
        all &= tile.visible[m];
    }
    for (int m = g.rows; m < g.lanes; ++m) tile.visible[m] = tile.visible[g.rows - 1];
    tile.places.present = any;  // what nobody sees is not read, NaN or not
    tile.count = any == 0 ? 0 : kTile - __builtin_clzll(any);
    tile.same = all == any && any == first_keys(tile.count);
}

// State of segment s and head h among partials, or of head h (s = 0); rows of out are `width` floats.
inline State state_of(const Group& g, float* states, int64_t s, int64_t h, int64_t width) {
    return State::at(states + (s * g.heads + h) * State::floats(g.lanes, width), g.lanes, width);
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
