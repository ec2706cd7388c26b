// The top of rows of logits on CUDA (top_rows.h).
//   Launch 1 (read_top_rows), grid (B * F, parts), 512 threads: a warp holds a tile of 1024 columns in
//   registers, so that the row is read once whatever it holds: statistics of the tile, then the first k columns
//   of the block's 16 tiles. A later launch puts parts together, a warp per row (top_of_row).
//   The first k of a block: the k-th largest of a warp's 32 lane maxima bounds the k-th column from below, the
//   best of these bounds keeps some hundred columns, which are sorted. Where it keeps too many (ties, flat rows)
//   or columns without a target id, bisection finds the bound that keeps k.
#pragma once

#include "sort.cuh"
#include "top_rows.h"
#include "vocab_rows.cuh"

namespace specdec::cuda {

// --- Traits -----------------------------------------------------------------------------------------
constexpr int kTopThreads = 512;
constexpr int kTopWarps = kTopThreads / kWarpSize;
constexpr int kTopRounds = static_cast<int>(kTopTile / kTopPlaces);
constexpr int kTopPerRound = static_cast<int>(kTopPlaces) / kWarpSize;  // columns of a thread
constexpr int kTopEntries = kTopRounds * kTopPerRound;
constexpr int kTopListed = 512;
constexpr uint64_t kLastFinite = 0xff7fffffull << 32 | 0xffffffffull;  // order of the least float

struct TopPlan {
    uint64_t list[kTopListed];  // orders
    float bounds[kTopWarps];
    int length;   // of what reached the list, may exceed it
    int foreign;  // columns without a target id that would have
    BlockScratch<int, kTopThreads> counts;
};

// --- Scratch of a row -------------------------------------------------------------------------------
struct TopScratch {
    TopTileStats* tiles;
    uint64_t* lists;  // [parts, k] orders, ascending; kNoOrder behind the last
};

SPECDEC_HD int64_t top_parts(const TopRows& p) {
    const int64_t parts = (p.num_tiles() + kTopWarps - 1) / kTopWarps;
    return parts > 0 ? parts : 1;  // of no columns too
}
SPECDEC_HD int64_t top_row_bytes(const TopRows& p) {
    return 8 * (p.num_tiles() + top_parts(p) * p.k);
}
SPECDEC_HD int64_t top_scratch_bytes(const TopRows& p) {
    return p.batch() * p.rows() * top_row_bytes(p);
}
__device__ __forceinline__ TopScratch top_scratch(const TopRows& p, void* scratch, int64_t row) {
    unsigned char* at = static_cast<unsigned char*>(scratch) + row * top_row_bytes(p);
    return TopScratch{reinterpret_cast<TopTileStats*>(at),
                      reinterpret_cast<uint64_t*>(at + 8 * p.num_tiles())};
}

// What lies above a row, by a warp, from one lane's load.
__device__ __forceinline__ float score_by_warp(const TopRows& p, int64_t b, int64_t f) {
    if (p.row_scores.data == nullptr) return 0.0f;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return __shfl_sync(kFullMask, lane == 0 ? p.score(b, f) : 0.0f, 0);
}

// --- Statistics of a tile, by a warp ------------------------------------------------------------------
// Column of entry i of a thread, behind the first one of its tile. Ascending in i.
template <int kVec>
__device__ __forceinline__ int top_place(int i) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return i / kVec * kVec * kWarpSize + lane * kVec + i % kVec;
}

template <int kVec>
__device__ __forceinline__ void load_top_tile(const Row& row, int64_t columns, int64_t first,
                                              float (&x)[kTopEntries]) {
    with_type(row.dtype, [&](auto zero) {
        if constexpr (kVec * sizeof(zero) == 16) {
            const auto* source = row.as<decltype(zero)>();
            const bool aligned = is_aligned<kVec>(source);
#pragma unroll
            for (int i = 0; i < kTopEntries; i += kVec) {
                const int64_t at = first + top_place<kVec>(i);
                load_group<kVec>(source + at, columns - at, aligned, x + i);
            }
        }
    });
}

// The tree over the places of a tile; every lane gets the result.
template <int kVec>
__device__ __forceinline__ float sum_places(float (&place)[kTopPerRound]) {
    // Sixteens of places: of 8 neighbours a thread has half of one, of two times 4 a quarter each.
    constexpr int kOwn = kVec == 8 ? 8 : 4;
    if constexpr (kVec == 4) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) place[i] = place[i] + place[kOwn + i];
    }
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) place[i] = place[i] + warp_exchange(place[i], lanes);
    }
#pragma unroll
    for (int half = kOwn / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) place[i] = place[i] + place[half + i];
    }
    return place[0];
}

// Takes NaN and +inf out. Every lane gets the result; `own` is the thread's largest entry.
template <int kVec>
__device__ __forceinline__ TopTileStats top_tile_stats(float (&x)[kTopEntries], float scale,
                                                       float* own) {
    bool bad = false;
    float most = minus_infinity();
#pragma unroll
    for (int i = 0; i < kTopEntries; ++i) {
        const bool bad_entry = is_bad_logit(x[i]);
        bad = bad || bad_entry;
        x[i] = bad_entry ? minus_infinity() : x[i];
        most = fmaxf(most, x[i]);
    }
    *own = most;
    TopTileStats stats{warp_max(most), 0.0f};
    if (__any_sync(kFullMask, bad)) return TopTileStats{-minus_infinity(), 0.0f};
    if (!(stats.max > minus_infinity())) return stats;
    float place[kTopPerRound] = {};
#pragma unroll
    for (int i = 0; i < kTopEntries; ++i) {
        float& sum = place[i % kTopPerRound];
        sum = add_exp2(sum, (x[i] - stats.max) * scale);
    }
    stats.sum = sum_places<kVec>(place);
    return stats;
}

// --- The first k columns of a block -----------------------------------------------------------------
// The k-th largest value of the lanes, by a warp.
__device__ __forceinline__ float kth_of_lanes(float value, int k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int width = 2; width <= kWarpSize; width *= 2) {
#pragma unroll
        for (int distance = width / 2; distance > 0; distance /= 2) {
            const float other = warp_exchange(value, distance);
            const bool larger = ((lane & distance) == 0) == ((lane & width) == 0);
            value = larger ? fmaxf(value, other) : fminf(value, other);
        }
    }
    return __shfl_sync(kFullMask, value, k - 1);
}

// A thread's entries, by fn(entry, column).
template <int kVec, class Fn>
__device__ __forceinline__ void for_top_entries(float (&x)[kTopEntries], int64_t first, Fn fn) {
    const uint32_t from = static_cast<uint32_t>(first);
#pragma unroll
    for (int i = 0; i < kTopEntries; ++i) {
        fn(x[i], from + static_cast<uint32_t>(top_place<kVec>(i)));
    }
}

// The last of the first k orders of the block, by bisection; of fewer finite entries the last possible one.
template <int kVec>
__device__ __forceinline__ uint64_t kth_order(float (&x)[kTopEntries], int64_t first, int k,
                                              TopPlan& plan) {
    uint64_t low = 0, high = kLastFinite;
#pragma unroll 1
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        const OrderBound bound(middle);
        int count = 0;
        for_top_entries<kVec>(
            x, first, [&](float z, uint32_t column) { count += bound.holds(z, column) ? 1 : 0; });
        if (block_sum<kTopThreads>(count, plan.counts) >= k) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return high;
}

// Leaves the block's first k orders in plan.list, sorted; returns how many there are. own: of the thread's entries
// the largest.
template <int kVec>
__device__ __forceinline__ int list_top(const TopRows& p, float (&x)[kTopEntries], float own,
                                        int64_t first, TopPlan& plan) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const float kth = kth_of_lanes(own, p.k);
    if (lane == 0) plan.bounds[warp] = kth;
    __syncthreads();
    float bound = plan.bounds[0];
#pragma unroll
    for (int w = 1; w < kTopWarps; ++w) bound = fmaxf(bound, plan.bounds[w]);
    uint64_t last = bound > minus_infinity() ? order_of(bound, 0xffffffffu) : kLastFinite;
    int length;
#pragma unroll 1
    for (bool exact = false;; exact = true) {
        if (threadIdx.x == 0) plan.length = plan.foreign = 0;
        __syncthreads();
        const OrderBound reach(last);
        for_top_entries<kVec>(x, first, [&](float z, uint32_t column) {
            if (!reach.holds(z, column)) return;
            if (p.map.token(column) < 0) {
                atomicAdd(&plan.foreign, 1);
                return;
            }
            const int place = atomicAdd(&plan.length, 1);
            if (place < kTopListed) plan.list[place] = order_of(z, column);
        });
        __syncthreads();
        length = plan.length;
        const bool enough = length >= p.k || plan.foreign == 0;
        if (exact || (length <= kTopListed && enough)) break;
        if (p.map.d2t != nullptr) {
            for_top_entries<kVec>(x, first, [&](float& z, uint32_t column) {
                if (z > minus_infinity() && p.map.token(column) < 0) z = minus_infinity();
            });
        }
        last = kth_order<kVec>(x, first, p.k, plan);
    }
    int size = kWarpKeys;
    while (size < length) size *= 2;
    for (int i = length + static_cast<int>(threadIdx.x); i < size; i += kTopThreads) {
        plan.list[i] = kNoOrder;
    }
    sort_keys<kTopThreads>(plan.list, size);
    return length < p.k ? length : p.k;
}

// --- Launch 1 -------------------------------------------------------------------------------------------
template <int kVec>
__device__ __forceinline__ void read_part(const TopRows& p, int64_t b, int64_t f, TopPlan& plan,
                                          const TopScratch& out) {
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * kTopWarps + threadIdx.x / kWarpSize;
    const int64_t first = tile * kTopTile;
    float x[kTopEntries];
    load_top_tile<kVec>(Row{p.row(b, f), p.dtype}, p.columns, first, x);
    float own;
    const TopTileStats stats = top_tile_stats<kVec>(x, p.scale(b), &own);
    if (threadIdx.x % kWarpSize == 0 && tile < p.num_tiles()) out.tiles[tile] = stats;
    const int count = list_top<kVec>(p, x, own, first, plan);
    for (int i = static_cast<int>(threadIdx.x); i < p.k; i += kTopThreads) {
        out.lists[blockIdx.y * static_cast<int64_t>(p.k) + i] = i < count ? plan.list[i] : kNoOrder;
    }
}

namespace {  // a kernel of every file that launches it

__global__ void __launch_bounds__(kTopThreads, 1)
    read_top_rows_kernel(const __grid_constant__ TopRows p, void* scratch) {
    CU_SHARED(plan, TopPlan);
    const int64_t b = blockIdx.x / p.rows(), f = blockIdx.x % p.rows();
    if (!is_alive(score_by_warp(p, b, f))) return;
    const TopScratch out = top_scratch(p, scratch, blockIdx.x);
    if (p.dtype == DType::kF32) {
        read_part<4>(p, b, f, plan, out);
    } else {
        read_part<8>(p, b, f, plan, out);
    }
}

Status read_top_rows(const TopRows& p, void* scratch, Stream stream) {
    const int64_t rows = p.batch() * p.rows(), parts = top_parts(p);
    if (rows == 0) return Status{};
    const Status status = check_grid(rows, parts);
    if (!status.ok()) return status;
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(parts));
    cfg.block = dim3(kTopThreads);
    cfg.stream = stream;
    return cu::launch(cfg, read_top_rows_kernel, p, scratch);
}

}  // namespace

// --- Later launches: a row, by a warp ---------------------------------------------------------------------
// Of two ascending lists with an order to a lane, the first 32, ascending.
__device__ __forceinline__ uint64_t merge_orders(uint64_t a, uint64_t b) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const uint64_t reversed = __shfl_sync(kFullMask, b, kWarpSize - 1 - lane);
    uint64_t least = a < reversed ? a : reversed;
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        const uint64_t other = warp_exchange(least, distance);
        least = ((lane & distance) == 0) == (least < other) ? least : other;
    }
    return least;
}

struct TopOfRow {
    bool has_law;
    TopLaw law;
    uint64_t order;  // lane i: of the row's i-th column; kNoOrder: there is none
};

// score: what lies above the row.
__device__ __forceinline__ TopOfRow top_of_row(const TopRows& p, void* scratch, int64_t b,
                                               int64_t f, float score) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    TopOfRow top{false, {0.0f, p.scale(b), 0.0}, kNoOrder};
    if (!is_alive(score)) return top;
    const TopScratch in = top_scratch(p, scratch, b * p.rows() + f);
    const int64_t num_tiles = p.num_tiles();
    const TopTileStats own =
        lane < num_tiles ? in.tiles[lane] : TopTileStats{minus_infinity(), 0.0f};
    float max = own.max;  // tiles beyond the 32nd are looked at twice
    for (int64_t t = lane + kWarpSize; t < num_tiles; t += kWarpSize) {
        max = fmaxf(max, in.tiles[t].max);
    }
    max = warp_max(max);
    if (max == minus_infinity() || max == -minus_infinity()) return top;
    float sum = own.sum * exp2_of((own.max - max) * top.law.scale);
    for (int64_t t = lane + kWarpSize; t < num_tiles; t += kWarpSize) {
        const TopTileStats tile = in.tiles[t];
        sum = sum + tile.sum * exp2_of((tile.max - max) * top.law.scale);
    }
    top.has_law = true;
    top.law.max = max;
    top.law.log2_sum = log2_of(static_cast<double>(warp_sum(sum)));
    for (int64_t part = 0; part < top_parts(p); ++part) {
        const uint64_t order = lane < p.k ? in.lists[part * p.k + lane] : kNoOrder;
        top.order = part == 0 ? order : merge_orders(top.order, order);
    }
    return top;
}

}  // namespace specdec::cuda
