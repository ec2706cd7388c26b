// A node on the way of the last launch: what it offers, and how a child is tested (common/verify.h has
// the rules). By warp 0 alone unless said otherwise: decisions are a chain of single numbers.
#pragma once

#include "philox.h"
#include "rest.cuh"

namespace specdec::cuda {

struct WalkShared {
    TreePlan plan;
    TreeRequest r;
    TreeNode at;  // where the walk is, written by thread 0
    int64_t depth;
    Uniform<Rest> rest_room;
    Bucket tile;  // of the draw
    bool ends;    // the path ends at `at`, else `rest` is to be summed up
    float strips[kStrips];
    int64_t token;
    FallbackScratch<kWalkThreads> fallback;
};

// What a walk is made of.
struct Walk {
    const VerifyTreeParams& p;
    WalkShared& shared;
    float* masses;    // [tiles], of the node whose rest was summed up last
    float* q_values;  // shared memory for a tile of q where d2t scatters it

    // What all warps sum up or draw from.
    __device__ __forceinline__ Rest& rest() const { return shared.rest_room.get(); }
    __device__ __forceinline__ TreeNode* nodes() const {
        return scratch_at<TreeNode>(p, shared.plan.nodes) + shared.r.first;
    }
    __device__ __forceinline__ TreeChild* children() const {
        return scratch_at<TreeChild>(p, shared.plan.children) + shared.r.first;
    }
    // A child of the node where the walk is.
    __device__ __forceinline__ TreeChild child(int32_t k) const {
        return children()[shared.at.list + k];
    }
    __device__ __forceinline__ float number(int64_t index, Purpose purpose) const {
        const int64_t b = shared.r.index;
        return uniform_at(p.seeds[b], p.positions[b], index, purpose);
    }
    __device__ __forceinline__ RowScratch scratch_of(int64_t u) const {
        return target_scratch(p, shared.plan, shared.r.first + u);
    }
    __device__ __forceinline__ VocabRow row_of_node(int64_t u) const {
        return target_row(p, shared.r, u);
    }
};

__device__ __forceinline__ bool is_first_lane() {
    return threadIdx.x % kWarpSize == 0;
}

// --- Coming to a node -------------------------------------------------------------------------------
struct Listing {
    int32_t count, status;
};

// The children of node u whose ids are tokens, in order; each id once unless it may be drawn twice. Of a
// node of the tree every row that names it as its parent is one.
CU_NOINLINE __device__ inline Listing list_children(const Walk& w, int64_t u, TreeChild* list) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t first_row = w.shared.r.first, count = w.shared.r.count;
    const bool each_once = w.shared.r.siblings != Siblings::kSampledWithReplacement;
    Listing found{0, 0};
    for (int64_t first = u + 1; first < count; first += kWarpSize) {
        const int64_t c = first + lane;
        const bool is_child = c < count && w.p.parents[first_row + c] == u;
        const int64_t my_id = is_child ? w.p.input_ids[first_row + c] : 0;
        unsigned left = __ballot_sync(kFullMask, is_child);
        while (left != 0) {
            const int source = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            const int64_t id = __shfl_sync(kFullMask, my_id, source);
            if (!is_token(w.p, id)) {
                if (id != -1) found.status |= kBadId;
                continue;
            }
            bool again = false;
            for (int32_t k = lane; each_once && k < found.count; k += kWarpSize) {
                again = again || list[k].id == id;
            }
            if (__any_sync(kFullMask, again)) continue;
            if (lane == 0) {
                list[found.count] =
                    TreeChild{static_cast<int32_t>(first + source), static_cast<int32_t>(id)};
            }
            __syncwarp();  // for the search for the next id
            ++found.count;
        }
    }
    return found;
}

// Makes node u at `depth` the one where the walk is, after nodes with these status bits. Its children go
// to the request's list from `list` on; alpha: with which it is accepted, for traversal.
CU_NOINLINE __device__ inline void come_to(const Walk& w, int64_t u, int64_t depth, int32_t list,
                                           int32_t status, float alpha) {
    const TreeRequest& r = w.shared.r;
    const RowScratch scratch = w.scratch_of(u);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    const int32_t own_status = peak.status();
    const bool has_law = own_status == 0 && !r.p.greedy;
    Listing found{0, 0};
    if (own_status == 0 && depth < w.p.max_path) {
        found = list_children(w, u, w.children() + list);
    }
    status |= own_status | found.status;

    RowLaw law{}, q_law{};
    if (has_law) law = law_of(scratch, peak.max, r.p.scale, r.p.filtered);
    if (has_law && r.reads_q && found.count > 0) {
        const RowScratch q_scratch = draft_scratch(w.p, w.shared.plan, r.first + u);
        const RowPeak q_peak = row_peak(q_scratch.tiles, q_scratch.num_tiles);
        if (q_peak.usable()) {
            q_law = law_of(q_scratch, q_peak.max, r.q.scale, r.q.filtered);
        } else {
            status |= kDraftNan;
            found.count = 0;
        }
    }
    __syncwarp();  // the node before has been read
    if (is_first_lane()) {
        TreeNode& at = w.shared.at;
        at.a = at.factor = 1.0;
        at.b = at.removed = 0.0;
        at.p = law;
        at.q = q_law;
        at.alpha = alpha;
        at.mass = at.raw_q = 0.0f;
        at.node = static_cast<int32_t>(u);
        at.list = list;
        at.count = found.count;
        at.next = 0;
        at.status = status;
        at.own_status = own_status;
        at.argmax = peak.argmax;
        w.shared.depth = depth;
    }
    __syncwarp();
}

// Leaves the node where the walk is for its child k.
__device__ __forceinline__ void go_down(const Walk& w, int32_t k, float alpha) {
    const TreeNode& at = w.shared.at;
    if (is_first_lane()) w.nodes()[w.shared.depth] = at;
    come_to(w, w.child(k).node, w.shared.depth + 1, at.list + at.count, at.status, alpha);
}

// Back to the parent. The walk is not at the anchor.
__device__ __forceinline__ void go_up(const Walk& w) {
    __syncwarp();  // the node has been read
    if (is_first_lane()) {
        --w.shared.depth;
        w.shared.at = w.nodes()[w.shared.depth];
    }
    __syncwarp();
}

// --- Testing a child --------------------------------------------------------------------------------
struct Chances {
    float p;      // of what is left
    float q;      // of its law without the rejected children
    float raw_q;  // of its law
};

// What is compared for the next child.
CU_NOINLINE __device__ inline Chances chances_of(const Walk& w, int64_t id) {
    const TreeNode& at = w.shared.at;
    const DraftMap map = draft_map(w.p, w.shared.plan);
    const int64_t column = map.exists() ? column_of(map, id) : id;
    Chances c;
    c.raw_q = 0.0f;
    if (column >= 0) {
        c.raw_q = at.q(draft_row(w.p, w.shared.r, at.node).at(column), column);
    }
    c.q = static_cast<float>(at.factor) * c.raw_q;
    c.p = static_cast<float>(at.a) * at.p(w.row_of_node(at.node).at(id), id);
    c.p = fmaxf(c.p - static_cast<float>(at.b) * c.raw_q, 0.0f);
    // With replacement an id may be a child twice.
    if (RejectedIds{w.children() + at.list, at.next}.holds(id)) c.p = 0.0f;
    return c;
}

// The child with an id, -1: none.
__device__ __forceinline__ int32_t child_of(const Walk& w, int64_t id) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int32_t count = w.shared.at.count;
    for (int32_t first = 0; first < count; first += kWarpSize) {
        const bool here = first + lane < count && w.child(first + lane).id == id;
        const unsigned found = __ballot_sync(kFullMask, here);
        if (found != 0) return first + __ffs(static_cast<int>(found)) - 1;
    }
    return -1;
}

// One number against the cumulative p of the children: the first one that it lies below, -1: none, and
// then p off the children is left. Lanes look p up side by side.
CU_NOINLINE __device__ inline int32_t one_coin(const Walk& w) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const TreeNode& at = w.shared.at;
    const float u = w.number(at.node + 1, Purpose::kAccept);
    float below = 0.0f;
    for (int32_t first = 0; first < at.count; first += kWarpSize) {
        float mine = 0.0f;
        if (first + lane < at.count) {
            const int64_t id = w.child(first + lane).id;
            mine = at.p(w.row_of_node(at.node).at(id), id);
        }
        for (int k = 0; k < kWarpSize && first + k < at.count; ++k) {
            below = below + __shfl_sync(kFullMask, mine, k);
            if (u < below) return first + k;
        }
    }
    return -1;
}

}  // namespace specdec::cuda
