// What one row of a chain says about the draft after it (common/verify.h has the rules).
#pragma once

#include "request.cuh"

namespace specdec::cuda {

enum class Verdict : int32_t {
    kAccept,  // goes on with the next row; method `block`: may, its acceptance is q's and p's ratio
    kArgmax,  // the token is the row's argmax
    kFallback,  // the row has no law
    kBonus,     // the token comes from p
    kResidual,  // the token comes from max(p - q, 0)
    kRedraw,    // the token comes from p, after a rejection
};

struct Decision {
    int64_t row;    // where the chain ends, = number of accepted drafts
    int64_t draft;  // the one that was tested there
    RowLaw p, q;
    float p_draft, q_draft;  // of `draft`
    Verdict verdict;
    int32_t status;
    int32_t argmax;
};

__device__ __forceinline__ float coin_of(const VerifyChainParams& p, const Request& r,
                                         int64_t node) {
    return uniform_at(p.seeds[r.index], p.positions[r.index], node, Purpose::kAccept);
}

// q of a target id; a token without a draft id has none. By a whole warp.
__device__ __forceinline__ float q_of(const VerifyChainParams& p, const Plan& plan,
                                      const Request& r, int64_t j, const RowLaw& q, int64_t id) {
    const DraftMap map = draft_map(p, plan);
    const int64_t column = map.exists() ? column_of(map, id) : id;
    return column < 0 ? 0.0f : q(draft_row(p, r, j).at(column), column);
}

// What row j says. By a whole warp; every lane gets the result.
CU_NOINLINE __device__ inline Decision judge(const VerifyChainParams& p, const Plan& plan,
                                             const Request& r, int64_t j) {
    const RowScratch scratch = target_scratch(p, plan, r.index, j);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    Decision d{};
    d.row = j;
    d.draft = j + 1 < r.num_rows ? p.input_ids[r.first + j + 1] : -1;
    d.argmax = peak.argmax;
    d.q_draft = 1.0f;
    d.verdict = Verdict::kFallback;
    d.status = peak.status();
    if (d.status != 0) return d;
    const bool is_chain = is_token(p, d.draft);
    if (!is_chain && d.draft != -1) d.status = kBadId;
    if (r.p.greedy) {
        d.verdict = is_chain && d.draft == peak.argmax ? Verdict::kAccept : Verdict::kArgmax;
        return d;
    }
    d.verdict = Verdict::kBonus;
    d.p = law_of(scratch, peak.max, r.p.scale, r.p.filtered);
    if (!is_chain || p.method == Method::kSampled) return d;

    if (r.draft_row >= 0) {
        const RowScratch q_scratch = draft_scratch(p, plan, r.index, j);
        const RowPeak q_peak = row_peak(q_scratch.tiles, q_scratch.num_tiles);
        if (!q_peak.usable()) {
            d.status = kDraftNan;
            return d;
        }
        d.q = law_of(q_scratch, q_peak.max, r.q.scale, r.q.filtered);
        d.q_draft = q_of(p, plan, r, j, d.q, d.draft);
    }
    d.p_draft = d.p(target_row(p, r, j).at(d.draft), d.draft);
    if (p.method == Method::kBlock) {
        d.verdict = Verdict::kAccept;
    } else if (p.method == Method::kTypical) {
        const float entropy = entropy_of(scratch, d.p, r.p.filtered);
        const float bound = fminf(p.posterior_threshold, p.posterior_alpha * expf(-entropy));
        d.verdict = d.p_draft > bound ? Verdict::kAccept : Verdict::kRedraw;
    } else {
        const float coin = coin_of(p, r, j + 1);
        d.verdict = coin * d.q_draft < d.p_draft ? Verdict::kAccept : Verdict::kResidual;
    }
    return d;
}

// The first row that does not accept, in `end` for all threads; rows are judged side by side, so no row
// behind it has a say. For `block`, alphas [K+1], which belong to this block, get the acceptance of
// every row down to there, and that of `end` is returned.
__device__ __forceinline__ float walk_down(const VerifyChainParams& p, const Plan& plan,
                                           const Request& r, Decision* decisions, float* alphas,
                                           Decision& end) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float alpha = 1.0f;
    for (int64_t first = 0;; first += kTileWarps) {
        Decision mine{};
        mine.verdict = Verdict::kArgmax;  // ends the search among rows no chain comes to
        if (is_reachable(p, r, first + warp)) mine = judge(p, plan, r, first + warp);
        if (first > 0) __syncthreads();  // the previous decisions have been read
        if (threadIdx.x % kWarpSize == 0) decisions[warp] = mine;
        __syncthreads();
        for (int w = 0; w < kTileWarps; ++w) {
            const Decision& d = decisions[w];
            if (p.method == Method::kBlock && threadIdx.x == 0) alphas[first + w] = alpha;
            if (d.verdict != Verdict::kAccept) {
                if (threadIdx.x == 0) end = d;
                __syncthreads();
                return alpha;
            }
            if (p.method != Method::kBlock) continue;
            const float scaled = alpha * d.p_draft;
            alpha = scaled < d.q_draft ? scaled / d.q_draft : scaled > 0.0f ? 1.0f : 0.0f;
        }
    }
}

// The decision of one row, for all threads.
CU_NOINLINE __device__ inline const Decision& judge_alone(const VerifyChainParams& p,
                                                          const Plan& plan, const Request& r,
                                                          int64_t j, Decision* decisions) {
    __syncthreads();  // decisions have been read
    if (threadIdx.x < kWarpSize) {
        const Decision d = judge(p, plan, r, j);
        if (threadIdx.x == 0) decisions[0] = d;
    }
    __syncthreads();
    return decisions[0];
}

}  // namespace specdec::cuda
