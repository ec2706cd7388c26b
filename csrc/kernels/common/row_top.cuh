// The most probable ids of a row on CUDA, with their log-probabilities: the last step of the launch that
// also filters the row (row_filter.cuh).
#pragma once

#include "row_filter.cuh"

namespace specdec::cuda {

// Calls write(i, id, logprob) for i < n, each i once, by different threads; -1 and 0 where there are
// fewer ids. processed: of the law, else of x. kept: of filter_row, where the row is filtered.
template <class Write>
__device__ __forceinline__ void top_of_row(const FilterJob& job, const RowPeak& peak, bool filtered,
                                           const Kept& kept, int n, bool processed,
                                           SelectPlan& plan, Write write) {
    int count = 0;
    RawLse lse{0.0f, 0.0f};
    RowLaw law{};
    if (processed) {
        if (peak.usable()) {
            law = law_of(job.scratch, peak.max, job.z.scale, filtered);
            if (!filtered) {
                count = top_entries(job.z, last_rank(kLowestKey), n, plan);
            } else if (kept.count < 0) {
                count = top_entries(job.z, kept.rank, n, plan);
            } else {
                count = n < kept.count ? n : kept.count;
            }
        }
    } else if (peak.raw_usable()) {
        lse = raw_lse(job.scratch, peak.max);
        const RankedRow raw{job.z.row.raw(), job.scratch.raw_maxima(), lse.max, kLog2E};
        count = top_entries(raw, last_rank(kLowestKey), n, plan);
    }
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kSelectThreads) {
        if (i >= count) {
            write(i, -1, 0.0f);
            continue;
        }
        const uint64_t rank = plan.list[i];
        const float value = value_of_rank(rank);
        const int32_t id = id_of_rank(rank);
        write(i, id, processed ? log_of(law, value, id) : (value - lse.max) - lse.log_sum);
    }
}

// The whole launch for one row. n: ids to report, 0: none.
template <class Write>
__device__ __forceinline__ void filter_and_report(const FilterJob& job, const RowPeak& peak,
                                                  bool filtered, int n, bool processed,
                                                  SelectPlan& plan, Write write) {
    Kept kept{0, -1};
    if (filtered && peak.usable()) kept = filter_row(job, plan);
    if (n > 0) top_of_row(job, peak, filtered, kept, n, processed, plan, write);
}

}  // namespace specdec::cuda
