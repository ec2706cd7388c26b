// expand_tree on CUDA.
//   Launch 1, grid (B * F, parts), 512 threads: common/top_rows.cuh, parts of 16384 columns of a row.
//   Launch 2, grid (B), 256 threads: a warp puts the parts of a frontier node together and writes its
//   candidates, a lane each; then the first k of the warps' candidates are those of the request.
//   Bytes moved: B F V logits once, 8 bytes per 1024 of them and 8 k per part of scratch, 12 k (F + 2) written.
//   Determinism: top_rows.h defines every sum; orders are of (value, place), and no two are equal.
#include "kernel.h"

#include "params.h"
#include "top_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// Candidates of frontier node f, by a warp; returns the lane's as an order of (score, place).
__device__ __forceinline__ uint64_t write_candidates(const ExpandTreeParams& p, int64_t b,
                                                     int64_t f) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float parent = score_by_warp(p.top, b, f);
    const TopOfRow top = top_of_row(p.top, p.scratch, b, f, parent);
    if (lane >= p.top.k) return kNoOrder;
    float score = minus_infinity();
    if (top.order != kNoOrder) {
        score = score_of(parent, top.law.logprob(value_of_order(top.order)));
    }
    const int64_t place = f * p.top.k + lane, at = b * p.top.rows() * p.top.k + place;
    p.candidate_scores[at] = score;
    p.candidate_tokens[at] = is_alive(score) ? p.top.map.token(id_of_order(top.order)) : -1;
    return order_of(score, static_cast<uint32_t>(place));
}

__global__ void __launch_bounds__(kThreads)
    expand_tree_kernel(const __grid_constant__ ExpandTreeParams p) {
    CU_SHARED(best, uint64_t[kWarps][kWarpSize]);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int64_t b = blockIdx.x;

    // 1. Every node's candidates; a node's are in order.
    uint64_t mine = kNoOrder;
    for (int64_t f = warp; f < p.top.rows(); f += kWarps) {
        mine = merge_orders(mine, write_candidates(p, b, f));
    }
    best[warp][lane] = mine;
    __syncthreads();

    // 2. Winners.
    if (warp != 0) return;
    for (int w = 1; w < kWarps; ++w) mine = merge_orders(mine, best[w][lane]);
    if (lane < p.top.k) write_winner(p, b, lane, mine);
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t expand_tree_scratch_bytes(const ExpandTreeParams& p) {
    return top_scratch_bytes(p.top);
}

Status expand_tree(const ExpandTreeParams& p, Stream stream) {
    const Status status = read_top_rows(p.top, p.scratch, stream);
    if (!status.ok()) return status;
    if (p.top.batch() > 0x7fffffff) return Status{1, "more requests than a CUDA grid holds"};
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.top.batch()));
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, expand_tree_kernel, p);
}

}  // namespace specdec::cuda
