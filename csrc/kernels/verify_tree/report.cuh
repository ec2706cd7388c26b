// The outputs of a request, by the block that walked its tree.
#pragma once

#include "node.cuh"
#include "row_top.cuh"

namespace specdec::cuda {

struct TopPlan {
    FilterJob job;
    SelectPlan select;
};

// The most probable ids at a node of the path, to place `first` of the outputs.
CU_NOINLINE __device__ inline void report_top(const Walk& w, int64_t u, int64_t first, int n,
                                              TopPlan& top) {
    const VerifyTreeParams& p = w.p;
    const LawPlan& law = w.shared.r.p;
    const RowScratch scratch = w.scratch_of(u);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    __syncthreads();  // the job before has been done
    if (threadIdx.x == 0) {
        top.job = FilterJob{{w.row_of_node(u), scratch.z_maxima(), peak.max, law.scale},
                            scratch,
                            law.filters,
                            p.vocab_size,
                            false};
    }
    __syncthreads();
    // The launch that filtered the row left where what is kept ends.
    Kept kept{0, -1};
    if (law.filtered && peak.usable()) kept.rank = rank_of(scratch.cut->z, scratch.cut->id);
    top_of_row(top.job, peak, law.filtered, kept, n, wants_processed(p), top.select,
               [&](int i, int64_t id, float logprob) {
                   write_id(p, p.top_ids, first + i, id);
                   p.top_logprobs[first + i] = logprob;
               });
}

// Writes every output; `token` follows the nodes 0..accepted of the way (-1: an inactive request).
CU_NOINLINE __device__ inline void write_outputs(const Walk& w, int64_t accepted, int64_t token,
                                                 int32_t status, TopPlan* top) {
    const VerifyTreeParams& p = w.p;
    const TreeNode* way = w.nodes();
    const int n = top_n(p);
    const int64_t b = w.shared.r.index, width = p.max_path + 1;
    const int64_t written = token < 0 ? 0 : accepted + 1;
    const auto id_at = [&](int64_t i) {
        return i < accepted    ? p.input_ids[w.shared.r.first + way[i + 1].node]
               : i == accepted ? token
                               : -1;
    };
    for (int64_t i = threadIdx.x; i < width; i += kWalkThreads) {
        write_id(p, p.tokens, b * width + i, id_at(i));
        p.path[b * width + i] = i < written ? way[i].node : -1;
        if (i >= written || p.logprobs_wanted.count < 0) p.logprobs[b * width + i] = 0.0f;
    }
    if (p.logprobs_wanted.count >= 0) {
        for (int64_t i = threadIdx.x / kWarpSize; i < written; i += kWalkWarps) {
            const int64_t u = way[i].node;
            const float logprob = logprob_of(w.row_of_node(u), w.scratch_of(u), w.shared.r.p,
                                             wants_processed(p), id_at(i));
            if (threadIdx.x % kWarpSize == 0) p.logprobs[b * width + i] = logprob;
        }
    }
    for (int64_t i = 0; n > 0 && i < written; ++i) {
        report_top(w, way[i].node, (b * width + i) * n, n, *top);
    }
    for (int64_t i = written * n + threadIdx.x; i < width * n; i += kWalkThreads) {
        write_id(p, p.top_ids, b * width * n + i, -1);
        p.top_logprobs[b * width * n + i] = 0.0f;
    }
    if (threadIdx.x != 0) return;
    p.num_accepted[b] = static_cast<int32_t>(accepted);
    p.status[b] = status;
}

}  // namespace specdec::cuda
