// block_tree on CUDA.
//   Launch 1, grid (B * G, parts), 512 threads: common/top_rows.cuh.
//   Launch 2, grid (B), 256 threads: a warp puts the parts of a position together; one warp then takes path after
//   path, the best of those that may be next: a taken path makes room for its next sibling and adds its first
//   child, so that there is one more of them than nodes. All threads write masks and links.
//   Bytes moved: B G V logits once; per node its results. Everything else lies in shared memory.
//   Determinism: top_rows.h defines every sum, params.h the order; no two paths are equal in it.
#include "kernel.h"

#include "params.h"
#include "top_rows.cuh"
#include "tree_nodes.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxNodes = static_cast<int>(kMaxDraftedNodes);
constexpr int kMaxRows = static_cast<int>(kMaxBlockRows);

struct Plan {
    float logprob[kMaxRows][kMaxTop];  // -inf: there is no such token
    int32_t column[kMaxRows][kMaxTop];
    uint64_t paths[kMaxNodes];  // that may be taken next; kNoOrder: none any more
    int32_t parent[kMaxNodes];
    int32_t depth[kMaxNodes];
    int32_t rank[kMaxNodes];
    float score[kMaxNodes];
    int count;
};

// --- Steps ----------------------------------------------------------------------------------------
// Tokens of the request's positions, a warp each; whether one without a law was among those of this warp.
__device__ __forceinline__ bool list_positions(const BlockTreeParams& p, int64_t b, Plan& plan) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    bool lawless = false;
    for (int g = static_cast<int>(threadIdx.x) / kWarpSize; g < p.top.rows(); g += kWarps) {
        const TopOfRow top = top_of_row(p.top, p.scratch, b, g, 0.0f);
        lawless = lawless || !top.has_law;
        const bool some = top.order != kNoOrder;
        plan.logprob[g][lane] =
            some ? score_of(0.0f, top.law.logprob(value_of_order(top.order))) : minus_infinity();
        plan.column[g][lane] = some ? static_cast<int32_t>(id_of_order(top.order)) : -1;
    }
    return lawless;
}

__device__ __forceinline__ uint64_t path_at(const BlockTreeParams& p, const Plan& plan, int depth,
                                            int parent, int rank) {
    if (depth > p.top.rows() || rank >= p.top.k) return kNoOrder;
    return block_path(plan.score[parent], depth, parent, rank, plan.logprob[depth - 1][rank]);
}

// The least of all lanes.
__device__ __forceinline__ uint64_t first_of_warp(uint64_t order) {
    const uint32_t high = __reduce_min_sync(kFullMask, static_cast<uint32_t>(order >> 32));
    const uint32_t mine = order >> 32 == high ? static_cast<uint32_t>(order) : 0xffffffffu;
    return static_cast<uint64_t>(high) << 32 | __reduce_min_sync(kFullMask, mine);
}

// Takes paths until the tree is full or none is left. By one warp; a lane reads the places that are its own.
__device__ __forceinline__ void take_paths(const BlockTreeParams& p, Plan& plan) {
    const int lane = static_cast<int>(threadIdx.x);
    const int most = static_cast<int>(p.nodes.num_nodes);
    if (lane == 0) {
        plan.parent[0] = -1;
        plan.depth[0] = plan.rank[0] = 0;
        plan.score[0] = 0.0f;
        plan.paths[0] = path_at(p, plan, 1, 0, 0);
    }
    __syncwarp();
    int count = 1;
    for (; count < most; ++count) {
        uint64_t mine = kNoOrder;
        int place = 0;
        for (int i = lane; i < count; i += kWarpSize) {
            const uint64_t order = plan.paths[i];
            place = order < mine ? i : place;
            mine = order < mine ? order : mine;
        }
        const uint64_t best = first_of_warp(mine);
        if (best == kNoOrder) break;
        if (mine == best) {
            const BlockPath path = BlockPath::of(best);
            plan.parent[count] = path.parent;
            plan.depth[count] = path.depth;
            plan.rank[count] = path.rank;
            plan.score[count] = path.score;
            plan.paths[place] = path_at(p, plan, path.depth, path.parent, path.rank + 1);
            plan.paths[count] = path_at(p, plan, path.depth + 1, count, 0);
        }
        __syncwarp();
    }
    for (int i = count + lane; i < most; i += kWarpSize) plan.parent[i] = -1;
    if (lane == 0) plan.count = count;
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kThreads)
    block_tree_kernel(const __grid_constant__ BlockTreeParams p) {
    CU_SHARED(plan, Plan);
    const int64_t b = blockIdx.x;
    const bool lawless = __syncthreads_or(list_positions(p, b, plan)) != 0;
    if (threadIdx.x < kWarpSize) take_paths(p, plan);
    __syncthreads();
    write_tree(p.nodes, b, plan.parent, [&](int node) {
        if (node == 0 || node >= plan.count) return int64_t{-1};
        return p.top.map.token(plan.column[plan.depth[node] - 1][plan.rank[node]]);
    });
    if (threadIdx.x == 0) {
        p.nodes.status[b] =
            (plan.count < p.nodes.num_nodes ? kBadTree : 0) | (lawless ? kDraftNan : 0);
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t block_tree_scratch_bytes(const BlockTreeParams& p) {
    return top_scratch_bytes(p.top);
}

Status block_tree(const BlockTreeParams& p, Stream stream) {
    const Status status = read_top_rows(p.top, p.scratch, stream);
    if (!status.ok()) return status;
    if (p.top.batch() > kMaxTreeRequests) return Status{1, "more requests than a CUDA grid holds"};
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.top.batch()));
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, block_tree_kernel, p);
}

}  // namespace specdec::cuda
