// Top-k, top-p and min-p of one row on CUDA, by one block, and its most probable ids.
//
// All three keep a prefix of the order of row_select.cuh, so the result is the shortest, one rank. The
// sparse way: what can be kept fits the list, sorted; sums over its prefix. The dense way (flat rows,
// top_p near 1, large k): one search per filter. Which way is taken depends on the row alone.
//   A filtered row's statistics are restated: each tile's sum becomes what the tile keeps, so that draws
// and residuals see a filtered row as any other, and pass over tiles that keep nothing.
#pragma once

#include "row_select.cuh"

namespace specdec::cuda {

constexpr float kMassUnit = 9.094947017729282e-13f;  // 2^-40

// A row whose filters or most probable ids are looked for.
struct FilterJob {
    RankedRow z;
    RowScratch scratch;
    Filters filters;
    int64_t vocab_size;  // top_k from there up is off
    bool entropy;        // the mean exponent is wanted
};

// --- Limits -----------------------------------------------------------------------------------------
// Least key that min-p keeps: (z - max) * scale >= min_cut holds from it up.
__device__ __forceinline__ uint32_t min_p_key(const RankedRow& r, float min_cut) {
    uint32_t low = kLowestKey, high = key_of(r.max);
    if (min_cut == minus_infinity()) return low;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if ((float_of_key(middle) - r.max) * r.scale >= min_cut) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Least mass that the kept ids must have together: "keep while the mass before is < top_p * whole".
__device__ __forceinline__ uint64_t mass_limit(float top_p, double whole) {
    const double limit = ceil(static_cast<double>(top_p) * whole);
    return limit > 1.0 ? static_cast<uint64_t>(limit) : 1;
}

struct Kept {
    uint64_t rank;  // of the last one
    int count;      // in plan.list; -1: the list does not hold them
};

// --- The sparse way ---------------------------------------------------------------------------------
// The kept prefix of the sorted list. whole: mass that top_p is a share of, 0: that of the top k.
CU_NOINLINE __device__ inline Kept kept_of_list(const FilterJob& job, uint32_t floor, double whole,
                                                SelectPlan& plan) {
    constexpr int kEach = kListEntries / kSelectThreads;
    const int length = static_cast<int>(plan.length);
    const int first = static_cast<int>(threadIdx.x) * kEach;
    uint64_t mass[kEach];
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        mass[i] = first + i < length ? job.z.units(value_of_rank(plan.list[first + i])) : 0;
        mine += mass[i];
    }
    const Scan<uint64_t> sums = block_inclusive_sum<kSelectThreads>(mine, plan.scan);
    const uint64_t start = sums.inclusive - mine;

    int count = length;
    if (job.filters.top_k < count) count = static_cast<int>(job.filters.top_k);
    uint64_t limit = ~uint64_t{0};
    if (job.filters.top_p < 1.0f) {
        uint64_t of_top_k = 0;
        for (int i = 0; i < kEach; ++i) of_top_k += first + i < count ? mass[i] : 0;
        of_top_k = block_sum<kSelectThreads>(of_top_k, plan.scan);
        limit = mass_limit(job.filters.top_p, whole > 0.0 ? whole : static_cast<double>(of_top_k));
    }
    uint64_t before = start, keeps = 0;
    for (int i = 0; i < kEach; ++i) {
        const bool inside = first + i < count;
        const uint32_t key = inside ? static_cast<uint32_t>(plan.list[first + i] >> 32) : 0;
        keeps += inside && before < limit && key >= floor ? 1 : 0;
        before += mass[i];
    }
    const int kept = static_cast<int>(block_sum<kSelectThreads>(keeps, plan.scan));
    return Kept{plan.list[kept > 0 ? kept - 1 : 0], kept > 0 ? kept : 1};
}

// Mass of what was gathered.
CU_NOINLINE __device__ inline uint64_t mass_of_list(const RankedRow& r, SelectPlan& plan) {
    uint64_t mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(plan.length);
         i += kSelectThreads) {
        mine += r.units(value_of_rank(plan.list[i]));
    }
    return block_sum<kSelectThreads>(mine, plan.scan);
}

// Whether the list holds all that can be kept. floor: of min-p; whole: mass of the row.
__device__ __forceinline__ bool gather_kept(const FilterJob& job, uint32_t floor, double whole,
                                            SelectPlan& plan) {
    const Filters& f = job.filters;
    const bool has_p = f.top_p < 1.0f;
    if (f.top_k < job.vocab_size) {
        // Under top-p the whole top-k set is needed, as its mass is what top_p is a share of.
        const uint32_t bound = bound_of_count(job.z.groups, f.top_k, plan);
        const uint32_t reach = has_p && !f.joint ? bound : max(bound, floor);
        return gather(job.z, last_rank(reach), plan);
    }
    if (!has_p) return gather(job.z, last_rank(floor), plan);
    // Top-p says nothing about values: more and more groups, until there is mass enough.
    const uint64_t limit = mass_limit(f.top_p, whole);
    for (int64_t groups = 64;; groups *= 8) {
        const uint32_t bound = bound_of_count(job.z.groups, groups, plan);
        const uint32_t reach = max(bound, floor);
        if (!gather(job.z, last_rank(reach), plan)) return false;
        const bool is_all = bound == kLowestKey || reach == floor;
        if (is_all || mass_of_list(job.z, plan) >= limit) return true;
    }
}

// --- The dense way ----------------------------------------------------------------------------------
__device__ __forceinline__ Kept search_kept(const FilterJob& job, uint32_t floor, double whole,
                                            SelectPlan& plan) {
    const Filters& f = job.filters;
    const uint64_t top = first_rank(key_of(job.z.max));
    uint64_t cut = last_rank(kLowestKey);
    if (f.top_k < job.vocab_size) {
        const uint64_t bound = last_rank(bound_of_count(job.z.groups, f.top_k, plan));
        const Prefix k = search(job.z, bound, top, false, static_cast<uint64_t>(f.top_k), plan);
        if (k.found) cut = k.rank;
        if (!f.joint) whole = static_cast<double>(k.mass);
    }
    if (last_rank(floor) > cut) cut = last_rank(floor);
    if (f.top_p < 1.0f) {
        const Prefix p = search(job.z, cut, top, true, mass_limit(f.top_p, whole), plan);
        if (p.found) cut = p.rank;
    }
    return Kept{cut, -1};
}

// --- Restating the row ------------------------------------------------------------------------------
// Every tile's kept mass, and its exponent sum relative to the row where wanted. Returns the total.
CU_NOINLINE __device__ inline uint64_t restate_from_list(const FilterJob& job, int count,
                                                         SelectPlan& plan) {
    uint64_t total = 0;
    for (int first = 0; first < job.scratch.num_tiles; first += kBuckets) {
        clear_buckets(plan);
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
            const uint64_t rank = plan.list[i];
            const int tile = id_of_rank(rank) / kTileEntries - first;
            if (tile < 0 || tile >= kBuckets) continue;
            const uint64_t units = job.z.units(value_of_rank(rank));
            total += units;
            atomicAdd(reinterpret_cast<unsigned long long*>(&plan.masses[tile]),
                      static_cast<unsigned long long>(units));
        }
        __syncthreads();
        for (int t = static_cast<int>(threadIdx.x);
             t < kBuckets && first + t < job.scratch.num_tiles; t += kSelectThreads) {
            job.scratch.tiles[first + t].sum = static_cast<float>(plan.masses[t]) * kMassUnit;
        }
        __syncthreads();
    }
    return block_sum<kSelectThreads>(total, plan.scan);
}

CU_NOINLINE __device__ inline uint64_t restate_from_row(const FilterJob& job, uint64_t cut,
                                                        SelectPlan& plan) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    uint64_t total = 0;
    for (int tile = warp; tile < job.scratch.num_tiles; tile += kSelectWarps) {
        const int64_t first = tile * kVocabTile + lane * kQuad;
        uint64_t units = 0;
        float moment = 0.0f;
        if (first_rank(key_of(job.scratch.tiles[tile].max)) >= cut) {
            for (int s = 0; s < kStrips; ++s) {
                float z[kQuad];
                job.z.row.load_quad(first + s * kStrip, z);
#pragma unroll
                for (int i = 0; i < kQuad; ++i) {
                    if (rank_of(z[i], first + s * kStrip + i) < cut) continue;
                    const float exponent = (z[i] - job.z.max) * job.z.scale;
                    const float weight = ptx::ex2(exponent);
                    units += mass_units(weight);
                    if (weight > 0.0f) moment = moment + weight * exponent;
                }
            }
        }
        units = warp_sum(units);
        moment = warp_sum(moment);
        if (lane == 0) {
            job.scratch.tiles[tile].sum = static_cast<float>(units) * kMassUnit;
            if (job.entropy) job.scratch.exponent_sum[tile] = moment;
            total += units;
        }
    }
    return block_sum<kSelectThreads>(total, plan.scan);
}

// Sum of weight * exponent over what is kept, in a fixed order. Valid in warp 0.
CU_NOINLINE __device__ inline float exponent_sum(const FilterJob& job, const Kept& kept,
                                                 SelectPlan& plan) {
    const int count = kept.count < 0 ? job.scratch.num_tiles : kept.count;
    __syncthreads();  // of the dense way: every tile's sum is there
    if (threadIdx.x >= kWarpSize) return 0.0f;
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarpSize) {
        if (kept.count < 0) {
            sum = sum + job.scratch.exponent_sum[i];
            continue;
        }
        const float exponent = (value_of_rank(plan.list[i]) - job.z.max) * job.z.scale;
        const float weight = ptx::ex2(exponent);
        if (weight > 0.0f) sum = sum + weight * exponent;
    }
    return warp_sum(sum);
}

// Filters a usable row: writes its RowCut and restates its tiles. The list holds what is kept, sorted,
// if the result says so.
__device__ __forceinline__ Kept filter_row(const FilterJob& job, SelectPlan& plan) {
    const uint32_t floor = min_p_key(job.z, job.filters.min_cut);
    const double row_mass = static_cast<double>(row_sum(job.scratch.tiles, job.scratch.num_tiles,
                                                        job.z.max, job.z.scale)) *
                            1099511627776.0;
    const bool of_top_k = job.filters.top_k < job.vocab_size && !job.filters.joint;
    const double whole = of_top_k ? 0.0 : row_mass;
    Kept kept;
    if (gather_kept(job, floor, row_mass, plan)) {
        sort_list(plan);
        kept = kept_of_list(job, floor, whole, plan);
    } else {
        kept = search_kept(job, floor, row_mass, plan);
    }
    const uint64_t total = kept.count < 0 ? restate_from_row(job, kept.rank, plan)
                                          : restate_from_list(job, kept.count, plan);
    const float moment = job.entropy ? exponent_sum(job, kept, plan) : 0.0f;
    if (threadIdx.x == 0) {
        const double mass = static_cast<double>(total) * (1.0 / 1099511627776.0);
        *job.scratch.cut =
            RowCut{value_of_rank(kept.rank), id_of_rank(kept.rank),
                   static_cast<float>(log2_of(mass)), moment / static_cast<float>(mass)};
    }
    __syncthreads();
    return kept;
}

}  // namespace specdec::cuda
