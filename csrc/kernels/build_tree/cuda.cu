// build_tree on CUDA: one launch, one block of 512 threads per request, everything in shared memory.
//   1. Candidates are sorted by (score, index), at most 2048 keys; the first N - 1 are a bit each.
//   2. A thread per chosen candidate: its place among them by counting bits, its parent's place, and the way up.
//   3. Numbers: places in ascending order; only where a parent comes after its child, one after the other.
//   4. A thread per word of the mask: from a node up to the root; ids, positions and links beside it.
//   Bytes moved: C (8 + id) read, N (20 + id + 4 W) written.
//   Determinism: orders are of (score, index), and no two are equal; the rest are integers.
#include "kernel.h"

#include "params.h"
#include "sort.cuh"
#include "tree_nodes.cuh"

namespace specdec::cuda {
namespace {

// --- Traits ---------------------------------------------------------------------------------------
constexpr int kThreads = 512;
constexpr int kMaxNodes = static_cast<int>(kMaxDraftedNodes);
constexpr int kMaxCandidates = static_cast<int>(kMaxBuildCandidates);
constexpr int kRoot = -1;    // as the parent of a place
constexpr int kNobody = -2;  // neither the root nor chosen

struct Plan {
    uint64_t keys[kMaxCandidates];
    uint32_t chosen[kMaxCandidates / 32];  // a bit per candidate
    int candidate[kMaxNodes];              // of a place, ascending
    int parent[kMaxNodes];                 // of a place: a place, kRoot or kNobody
    int number[kMaxNodes];                 // of a place: its node; 0: it has none
    int32_t node_candidate[kMaxNodes];     // of a node; -1: there is no node
    int32_t node_parent[kMaxNodes];
    BlockScratch<int, kThreads> scan;
};

// --- Steps ----------------------------------------------------------------------------------------
// Marks the best usable candidates; returns how many they are.
__device__ __forceinline__ int choose(const BuildTreeParams& p, int64_t b, int sorted, Plan& plan) {
    for (int i = static_cast<int>(threadIdx.x); i < sorted; i += kThreads) {
        plan.keys[i] = i < p.num_candidates ? candidate_order(p, b, i) : kNoOrder;
    }
    for (int i = static_cast<int>(threadIdx.x); i < kMaxCandidates / 32; i += kThreads) {
        plan.chosen[i] = 0;
    }
    sort_keys<kThreads>(plan.keys, sorted);
    const int rank = static_cast<int>(threadIdx.x);
    const bool taken =
        rank < p.nodes.num_nodes - 1 && rank < p.num_candidates && plan.keys[rank] != kNoOrder;
    if (taken) {
        const uint32_t candidate = id_of_order(plan.keys[rank]);
        atomicOr(&plan.chosen[candidate / 32], 1u << (candidate % 32));
    }
    return __syncthreads_count(taken);
}

__device__ __forceinline__ bool is_chosen(const Plan& plan, int64_t candidate) {
    return (plan.chosen[candidate / 32] >> (candidate % 32) & 1u) != 0;
}

// Chosen candidates below one.
__device__ __forceinline__ int place_of(const Plan& plan, int candidate) {
    int place = __popc(plan.chosen[candidate / 32] & ((1u << (candidate % 32)) - 1));
    for (int w = 0; w < candidate / 32; ++w) place += __popc(plan.chosen[w]);
    return place;
}

// Candidates and parents of all places. Barrier before reading them.
__device__ __forceinline__ void list_places(const BuildTreeParams& p, int64_t b, int count,
                                            Plan& plan) {
    const int rank = static_cast<int>(threadIdx.x);
    if (rank >= count) return;
    const int candidate = static_cast<int>(id_of_order(plan.keys[rank]));
    const int place = place_of(plan, candidate);
    const int32_t parent = *p.parents.at(b, candidate);
    plan.candidate[place] = candidate;
    plan.number[place] = 0;
    plan.parent[place] = parent == -1 ? kRoot
                         : parent >= 0 && parent < p.num_candidates && is_chosen(plan, parent)
                             ? place_of(plan, parent)
                             : kNobody;
}

// Whether the parents of a place lead to the root.
__device__ __forceinline__ bool leads_to_root(const Plan& plan, int place, int count) {
    int at = plan.parent[place];
    for (int steps = 0; at >= 0 && steps < count; ++steps) at = plan.parent[at];
    return at == kRoot;
}

// Numbers where some child comes before its parent, by one warp: the lowest place whose parent has one, as long as
// there is some.
__device__ __forceinline__ void number_in_turn(int count, Plan& plan) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int next = 1;; ++next) {
        int lowest = kMaxNodes;
        for (int place = count - 1 - lane; place >= 0; place -= kWarpSize) {
            const int parent = plan.parent[place];
            const bool ready = parent == kRoot || (parent >= 0 && plan.number[parent] > 0);
            if (ready && plan.number[place] == 0) lowest = place;
        }
        lowest = warp_min(lowest);
        if (lowest == kMaxNodes) return;
        __syncwarp();  // numbers have been read
        if (lane == 0) plan.number[lowest] = next;
        __syncwarp();
    }
}

// Gives numbers; returns how many nodes there are with the root.
__device__ __forceinline__ int number_places(int count, Plan& plan) {
    const int place = static_cast<int>(threadIdx.x);
    const bool inside = place < count && leads_to_root(plan, place, count);
    const Scan<int> before = block_inclusive_sum<kThreads>(inside ? 1 : 0, plan.scan);
    if (__syncthreads_or(inside && plan.parent[place] > place) != 0) {
        if (threadIdx.x < kWarpSize) number_in_turn(count, plan);
    } else if (inside) {
        plan.number[place] = before.inclusive;
    }
    __syncthreads();
    return 1 + before.total;
}

// From places to nodes. Barriers before and after.
__device__ __forceinline__ void fill_nodes(const BuildTreeParams& p, int count, Plan& plan) {
    for (int node = static_cast<int>(threadIdx.x); node < p.nodes.num_nodes; node += kThreads) {
        plan.node_candidate[node] = plan.node_parent[node] = -1;
    }
    __syncthreads();
    const int place = static_cast<int>(threadIdx.x);
    if (place < count && plan.number[place] > 0) {
        const int node = plan.number[place], parent = plan.parent[place];
        plan.node_candidate[node] = plan.candidate[place];
        plan.node_parent[node] = parent == kRoot ? 0 : plan.number[parent];
    }
    __syncthreads();
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kThreads)
    build_tree_kernel(const __grid_constant__ BuildTreeParams p, int sorted) {
    CU_SHARED(plan, Plan);
    const int64_t b = blockIdx.x;
    const int count = choose(p, b, sorted, plan);
    list_places(p, b, count, plan);
    __syncthreads();
    const int nodes = number_places(count, plan);
    fill_nodes(p, count, plan);
    write_tree(p.nodes, b, plan.node_parent, [&](int node) {
        const int32_t candidate = plan.node_candidate[node];
        return candidate < 0 ? int64_t{-1} : candidate_token(p, b, candidate);
    });
    if (threadIdx.x == 0) p.nodes.status[b] = nodes < p.nodes.num_nodes ? kBadTree : 0;
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
Status build_tree(const BuildTreeParams& p, Stream stream) {
    if (p.batch > kMaxTreeRequests) return Status{1, "more requests than a CUDA grid holds"};
    int sorted = kWarpKeys;
    while (sorted < p.num_candidates) sorted *= 2;
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.batch));
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, build_tree_kernel, p, sorted);
}

}  // namespace specdec::cuda
