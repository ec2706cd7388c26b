// What a call of chain or tree verification wants on CUDA, from its arguments alone.
#pragma once

#include "row_stats.cuh"
#include "verify.h"

namespace specdec::cuda {

SPECDEC_HD bool wants_raw(const VerifyParams& p) {
    return p.logprobs_wanted.count >= 0 && !p.logprobs_wanted.processed;
}
SPECDEC_HD bool wants_processed(const VerifyParams& p) {
    return p.logprobs_wanted.count >= 0 && p.logprobs_wanted.processed;
}
// Whether rows may have edits: beside the controls, d2t takes ids outside the vocabulary away.
SPECDEC_HD bool has_edits(const VerifyParams& p) {
    return p.controls.any_edits || (p.draft_controls && p.d2t != nullptr);
}
SPECDEC_HD int top_n(const VerifyParams& p) {
    return p.logprobs_wanted.count > 0 ? p.logprobs_wanted.count : 0;
}

__device__ __forceinline__ bool is_token(const VerifyParams& p, int64_t id) {
    return id >= 0 && id < p.vocab_size;
}

__device__ __forceinline__ void write_id(const VerifyParams& p, void* ids, int64_t i, int64_t id) {
    if (p.input_ids.dtype == DType::kI64) {
        static_cast<int64_t*>(ids)[i] = id;
    } else {
        static_cast<int32_t*>(ids)[i] = static_cast<int32_t>(id);
    }
}

// Natural logarithm of the probability of an id, of the row before its edits or (processed) of its law;
// 0 where the row has none. By a whole warp.
CU_NOINLINE __device__ inline float logprob_of(const VocabRow& row, const RowScratch& scratch,
                                               const LawPlan& plan, bool processed, int64_t id) {
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    if (processed) {
        if (!peak.usable()) return 0.0f;
        return log_of(law_of(scratch, peak.max, plan.scale, plan.filtered), row.at(id), id);
    }
    if (!peak.raw_usable()) return 0.0f;
    const RawLse lse = raw_lse(scratch, peak.max);
    return (entry_of(row.row, id) - lse.max) - lse.log_sum;
}

}  // namespace specdec::cuda
