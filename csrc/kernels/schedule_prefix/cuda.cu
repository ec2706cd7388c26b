// schedule_prefix on CUDA: candidates are sorted into the order of admission and admitted up to the
// first one that does not pay (or as many as the budget says).
//   Grid: one block, in one launch, as one order spans the batch. A thread walks the survivals of a
//   request, then owns kPerThread neighbours of the sorted candidates.
//   Shared memory: 32 KB of keys. A bitonic sort; steps within 64 keys stay within a warp.
//   Bytes moved: 4 B G twice, and 8 B written: what it costs is the launch and the sort.
//   Determinism: keys are all different, and sums are integers.
#include "kernel.h"

#include "params.h"
#include "sort.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPerThread = static_cast<int>(kMaxCandidates) / kThreads;

using UnitScratch = BlockScratch<unsigned long long, kThreads>;
using CountScratch = BlockScratch<int, kThreads>;

// --- Steps ----------------------------------------------------------------------------------------
// The floor of the batch, and how many candidates there are.
struct Start {
    unsigned long long tau;
    int rows, candidates;
};

// Fills keys, those of no candidate behind: kMaxCandidates of them.
__device__ __forceinline__ Start list_candidates(const SchedulePrefixParams& p, uint64_t* keys,
                                                 UnitScratch& units, CountScratch& counts) {
    for (int i = static_cast<int>(threadIdx.x); i < kMaxCandidates; i += kThreads) {
        keys[i] = kNoCandidate;
    }
    __syncthreads();
    unsigned long long tau = 0;
    int rows = 0, candidates = 0;
    for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
        if (!is_active(p, b)) continue;
        rows += 1 + static_cast<int>(p.min_drafts);
        tau += kSurvivalOne;
        visit_survivals(p, b, [&](int64_t j, float survival) {
            if (j < p.min_drafts) {
                tau += survival_units(survival);
            } else if (survival > 0.0f) {
                keys[b * p.max_drafts + j] = candidate_key(survival, j, b);
                ++candidates;
            }
        });
    }
    const Start start{block_sum<kThreads>(tau, units), block_sum<kThreads>(rows, counts),
                      block_sum<kThreads>(candidates, counts)};
    return start;
}

// How many candidates are admitted before the first one that does not raise the throughput.
__device__ __forceinline__ int admit_while_it_pays(const SchedulePrefixParams& p,
                                                   const uint64_t* keys, const Start& start,
                                                   UnitScratch& units, CountScratch& counts) {
    const int first = static_cast<int>(threadIdx.x) * kPerThread;
    unsigned long long own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        if (first + i < start.candidates) own += survival_units(survival_of_key(keys[first + i]));
    }
    unsigned long long tau = start.tau + block_inclusive_sum<kThreads>(own, units).inclusive - own;
    int end = start.candidates;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int k = first + i;
        if (k >= end) break;
        const double before = throughput(p, tau, start.rows + k);
        tau += survival_units(survival_of_key(keys[k]));
        if (!(throughput(p, tau, start.rows + k + 1) > before)) end = k;
    }
    return block_min<kThreads>(end, counts);
}

// The drafts of request b: its floor, and its candidates up to the key of the last one admitted.
__device__ __forceinline__ int drafts_of(const SchedulePrefixParams& p, int64_t b, bool any,
                                         uint64_t last) {
    int drafts = static_cast<int>(p.min_drafts);
    if (!any) return drafts;
    visit_survivals(p, b, [&](int64_t j, float survival) {
        if (j >= p.min_drafts && candidate_key(survival, j, b) <= last) {
            ++drafts;
        }
    });
    return drafts;
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kThreads, 1)
    schedule_prefix_kernel(const __grid_constant__ SchedulePrefixParams p, int sorted) {
    CU_SHARED(keys, uint64_t[kMaxCandidates]);
    CU_SHARED(units, UnitScratch);
    CU_SHARED(counts, CountScratch);

    // 1. The floor of every request, and the candidates behind it.
    const Start start = list_candidates(p, keys, units, counts);

    // 2. Admit.
    sort_keys<kThreads>(keys, sorted);
    int admitted;
    if (p.budget != nullptr) {
        admitted = min(p.budget[0], start.candidates);
    } else {
        admitted = admit_while_it_pays(p, keys, start, units, counts);
    }
    const uint64_t last = admitted > 0 ? keys[admitted - 1] : 0;

    // 3. Rows.
    int before = 0;
    for (int64_t begin = 0; begin < p.batch; begin += kThreads) {
        const int64_t b = begin + threadIdx.x;
        const bool here = b < p.batch && is_active(p, b);
        const int drafts = here ? drafts_of(p, b, admitted > 0, last) : 0;
        const int rows = here ? 1 + drafts : 0;
        const Scan<int> scan = block_inclusive_sum<kThreads>(rows, counts);
        if (b < p.batch) {
            p.num_drafts[b] = drafts;
            p.cu_rows[b] = before + scan.inclusive - rows;
        }
        before += scan.total;
    }
    if (threadIdx.x == 0) p.cu_rows[p.batch] = before;
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
Status schedule_prefix(const SchedulePrefixParams& p, Stream stream) {
    int sorted = kWarpKeys;
    while (sorted < p.batch * p.max_drafts) sorted *= 2;
    cu::LaunchCfg cfg;
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, schedule_prefix_kernel, p, sorted);
}

}  // namespace specdec::cuda
