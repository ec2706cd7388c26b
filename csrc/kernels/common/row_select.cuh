// Finding the top of a row on CUDA: its first ids in the order (value descending, id ascending), by
// count or by mass, exactly.
//
// An entry is one 64-bit number, its rank: the order-preserving key of its value above the complement
// of its id. Ranks are distinct and a larger one comes first, so a prefix of the order is {rank >= r}.
//   1. Group maxima give a lower bound for what can matter; only groups that reach it are read, and
//      entries above it are gathered in shared memory and sorted (gather, sort_list).
//   2. Where they are too many: histograms of count and mass over a range of ranks, which narrows to
//      the bucket where the prefix ends until that holds one entry (search). At most 6 passes, for
//      ties, flat rows and any k or top-p alike.
// Masses are integers (mass_units): no sum depends on the order of additions. By the whole block of
// kSelectThreads unless said otherwise; a warp owns a group at a time.
#pragma once

#include "row_stats.cuh"

namespace specdec::cuda {

// --- Traits -----------------------------------------------------------------------------------------
constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kListEntries = 2048;
constexpr int kBuckets = 2048;
constexpr int kBucketBits = 11;
constexpr int kBucketsPerThread = kBuckets / kSelectThreads;
static_assert(1 << kBucketBits == kBuckets, "a bucket is the upper bits of a range");

struct SelectPlan {
    uint64_t list[kListEntries];  // ranks
    uint64_t masses[kBuckets];
    uint32_t counts[kBuckets];
    uint32_t length;  // entries gathered, may exceed the list
    int32_t bucket;
    uint64_t before;
    uint64_t sum;
    BlockScratch<uint64_t, kSelectThreads> scan;
};

// --- Ranks ------------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t rank_of(float z, int64_t id) {
    return static_cast<uint64_t>(key_of(z)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
constexpr uint32_t kLowestKey = 0x00800000u;  // of a finite value
__device__ __forceinline__ uint64_t first_rank(uint32_t key) {
    return static_cast<uint64_t>(key) << 32 | 0xffffffffu;
}
__device__ __forceinline__ uint64_t last_rank(uint32_t key) {
    return static_cast<uint64_t>(key) << 32;
}
__device__ __forceinline__ float value_of_rank(uint64_t rank) {
    return float_of_key(static_cast<uint32_t>(rank >> 32));
}
__device__ __forceinline__ int32_t id_of_rank(uint64_t rank) {
    const uint32_t id = 0xffffffffu - static_cast<uint32_t>(rank);
    return id < 0x7fffffffu ? static_cast<int32_t>(id) : 0x7fffffff;
}

// What a row is ordered by: z, or x where the row is given without its edits.
struct RankedRow {
    VocabRow row;
    GroupMaxima groups;
    float max, scale;  // masses are those of 2^((z - max) * scale)

    __device__ __forceinline__ uint64_t units(float z) const {
        return mass_units(ptx::ex2((z - max) * scale));
    }
};

// fn(value, id) for the entries of every group that may reach `key`. By warps, without barriers.
template <class Fn>
__device__ __forceinline__ void for_entries(const RankedRow& r, uint32_t key, Fn fn) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int entries = r.groups.entries();
    for (int g = warp; g < r.groups.count(); g += kSelectWarps) {
        if ((r.groups[g] << 16 | 0xffffu) < key) continue;
        for (int s = 0; s < entries; s += 2 * kStrip) {
            const int64_t first = static_cast<int64_t>(g) * entries + s + lane * kQuad;
            float x[2][kQuad];
            r.row.load_quad(first, x[0]);
            r.row.load_quad(first + kStrip, x[1]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < kQuad; ++i) fn(x[h][i], first + h * kStrip + i);
            }
        }
    }
}

// --- Buckets ----------------------------------------------------------------------------------------
CU_NOINLINE __device__ inline void clear_buckets(SelectPlan& plan) {
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets; i += kSelectThreads) {
        plan.counts[i] = 0;
        plan.masses[i] = 0;
    }
    __syncthreads();
}

// From the top bucket down, the first one where before + sum of the buckets reaches `limit`: leaves it
// in plan.bucket, -1 when there is none, and what lies before it in plan.before.
template <class T>
CU_NOINLINE __device__ inline void find_bucket(const T* buckets, uint64_t before, uint64_t limit,
                                               SelectPlan& plan) {
    const int top = kBuckets - 1 - static_cast<int>(threadIdx.x) * kBucketsPerThread;
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kBucketsPerThread; ++i) mine += buckets[top - i];
    if (threadIdx.x == 0) {
        plan.bucket = -1;
        plan.before = before;
    }
    const Scan<uint64_t> sums = block_inclusive_sum<kSelectThreads>(mine, plan.scan);
    uint64_t here = before + sums.inclusive - mine;
    if (here < limit && here + mine >= limit) {
        int bucket = top;
        while (here + buckets[bucket] < limit) here += buckets[bucket--];
        plan.bucket = bucket;
        plan.before = here;
    }
    __syncthreads();
}

// A key that at least k entries reach: the k-th largest group maximum. The lowest one where there are
// fewer groups.
CU_NOINLINE __device__ inline uint32_t bound_of_count(const GroupMaxima& groups, int64_t k,
                                                      SelectPlan& plan) {
    if (k > groups.count()) return kLowestKey;
    constexpr int kLowBits = 16 - kBucketBits;
    uint32_t high = 0;
    uint64_t before = 0;
    for (int shift = kLowBits;; shift = 0) {
        clear_buckets(plan);
        for (int g = static_cast<int>(threadIdx.x); g < groups.count(); g += kSelectThreads) {
            const uint32_t key = groups[g];
            if (shift != 0) {
                atomicAdd(&plan.counts[key >> kLowBits], 1u);
            } else if (key >> kLowBits == high) {
                atomicAdd(&plan.counts[key & ((1u << kLowBits) - 1)], 1u);
            }
        }
        __syncthreads();
        find_bucket(plan.counts, before, static_cast<uint64_t>(k), plan);
        const uint32_t bucket = static_cast<uint32_t>(plan.bucket);
        before = plan.before;
        __syncthreads();  // plan.bucket is written again by the next search
        if (shift == 0) return max((high << kLowBits | bucket) << 16, kLowestKey);
        high = bucket;
    }
}

// --- Narrowing ------------------------------------------------------------------------------------
struct Prefix {
    bool found;     // false: everything in the range belongs to it
    uint64_t rank;  // of the last entry; what lies between two entries is as good
    uint64_t mass;  // of the prefix
};

// The shortest prefix of the order within ranks [low, high] whose count (by_mass: whose mass) is at
// least `limit`, > 0.
CU_NOINLINE __device__ inline Prefix search(const RankedRow& r, uint64_t low, uint64_t high,
                                            bool by_mass, uint64_t limit, SelectPlan& plan) {
    uint64_t before = 0, mass_before = 0;
    for (;;) {
        const int bits = high == low ? 0 : 64 - __clzll(static_cast<long long>(high - low));
        const int shift = bits > kBucketBits ? bits - kBucketBits : 0;
        clear_buckets(plan);
        for_entries(r, static_cast<uint32_t>(low >> 32), [&](float z, int64_t id) {
            const uint64_t rank = rank_of(z, id);
            if (rank < low || rank > high || id >= r.row.columns) return;
            const int bucket = static_cast<int>((rank - low) >> shift);
            atomicAdd(&plan.counts[bucket], 1u);
            atomicAdd(reinterpret_cast<unsigned long long*>(&plan.masses[bucket]),
                      static_cast<unsigned long long>(r.units(z)));
        });
        __syncthreads();
        if (by_mass) {
            find_bucket(plan.masses, before, limit, plan);
        } else {
            find_bucket(plan.counts, before, limit, plan);
        }
        const int bucket = plan.bucket;
        before = plan.before;
        uint64_t above = 0;
        for (int i = static_cast<int>(threadIdx.x); i < kBuckets; i += kSelectThreads) {
            above += i > bucket ? plan.masses[i] : 0;
        }
        mass_before += block_sum<kSelectThreads>(above, plan.scan);
        if (bucket < 0) return Prefix{false, low, mass_before};
        const uint32_t count = plan.counts[bucket];
        const uint64_t mass = plan.masses[bucket];
        __syncthreads();  // the buckets have been read
        low += static_cast<uint64_t>(bucket) << shift;
        const uint64_t last = low + (uint64_t{1} << shift) - 1;
        high = last < high ? last : high;
        if (count == 1 || shift == 0) return Prefix{true, low, mass_before + mass};
    }
}

// --- The list ---------------------------------------------------------------------------------------
// Entries with a value above -inf whose rank is at least `low`, unsorted. False: they do not fit.
CU_NOINLINE __device__ inline bool gather(const RankedRow& r, uint64_t low, SelectPlan& plan) {
    __syncthreads();  // the list and its length have been read
    if (threadIdx.x == 0) plan.length = 0;
    __syncthreads();
    for_entries(r, static_cast<uint32_t>(low >> 32), [&](float z, int64_t id) {
        const uint64_t rank = rank_of(z, id);
        if (rank < low || !(z > minus_infinity())) return;
        const uint32_t place = atomicAdd(&plan.length, 1u);
        if (place < kListEntries) plan.list[place] = rank;
    });
    __syncthreads();
    return plan.length <= kListEntries;
}

// Larger ranks first; a bitonic network over the next power of two.
CU_NOINLINE __device__ inline void sort_list(SelectPlan& plan) {
    const int length = static_cast<int>(plan.length);
    int size = 2;
    while (size < length) size *= 2;
    for (int i = length + static_cast<int>(threadIdx.x); i < size; i += kSelectThreads) {
        plan.list[i] = 0;
    }
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int distance = run / 2; distance > 0; distance /= 2) {
            for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kSelectThreads) {
                const int a = i / distance * 2 * distance + i % distance, b = a + distance;
                const bool descending = (a & run) == 0;
                const uint64_t x = plan.list[a], y = plan.list[b];
                if ((x < y) == descending) {
                    plan.list[a] = y;
                    plan.list[b] = x;
                }
            }
            __syncthreads();
        }
    }
}

// The first n entries (of rank >= low) of the order, sorted, in plan.list; returns how many there are.
CU_NOINLINE __device__ inline int top_entries(const RankedRow& r, uint64_t low, int n,
                                              SelectPlan& plan) {
    const uint64_t bound = last_rank(bound_of_count(r.groups, n, plan));
    const uint64_t reach = bound > low ? bound : low;
    if (!gather(r, reach, plan)) {
        const Prefix first =
            search(r, reach, first_rank(key_of(r.max)), false, static_cast<uint64_t>(n), plan);
        gather(r, first.found ? first.rank : reach, plan);
    }
    sort_list(plan);
    const int length = static_cast<int>(plan.length);
    return length < n ? length : n;
}

}  // namespace specdec::cuda
