// A request of verify_tree on CUDA: its rows, which of them are needed, and the scratch of a call.
#pragma once

#include "draft_map.cuh"
#include "params.h"
#include "tree.h"
#include "verify_call.cuh"

namespace specdec::cuda {

// --- Scratch ----------------------------------------------------------------------------------------
// A node on the way that the last launch has come.
struct alignas(16) TreeNode {
    double a, b;  // what is left of p: max(a p - b q, 0) off the rejected children
    // Of q, where drawn children are not put back: factor = 1 / (1 - removed).
    double factor, removed;
    RowLaw p, q;
    float alpha;  // traversal: with which it is accepted
    float mass;   // of what is left, as summed up last
    float raw_q;  // of the child tested last
    int32_t node;
    int32_t list;    // its children are [list, list + count) of the request's
    int32_t count;   // children in all, or those looked at where nothing is left for more
    int32_t next;    // the first one that has not been rejected
    int32_t status;  // of the nodes from the anchor to this one
    int32_t own_status;
    int32_t argmax;
};

// A child that its node offers: its id is a token.
struct TreeChild {
    int32_t node, id;
};

// Statistics of the target rows [R] and of the draft rows [R], facts about d2t [draft tiles], residual
// masses [B, tiles], nodes [R] and children [R]; sized from capacities, uninitialised on entry.
struct TreePlan {
    RowLayout target_layout, draft_layout;
    int64_t target, draft, map, masses, nodes, children, bytes;
    bool has_q;    // draft rows are read at all
    bool has_map;  // and their columns are looked up through d2t
};

SPECDEC_HD TreePlan tree_plan(const VerifyTreeParams& p) {
    TreePlan plan;
    RowNeeds needs;
    needs.edited = p.controls.any_edits;
    needs.filtered = p.controls.any_filters;
    needs.raw = wants_raw(p);
    needs.entropy = false;
    needs.top = top_n(p) > 0;
    needs.raw_top = wants_raw(p);
    plan.target_layout = row_layout(p.vocab_size, needs);
    needs.filtered = needs.filtered && p.draft_controls;
    needs.raw = needs.top = needs.raw_top = false;
    plan.draft_layout = row_layout(p.draft_vocab, needs);

    plan.has_q = p.draft_logits.data != nullptr;
    plan.has_map = plan.has_q && p.d2t != nullptr;
    const int64_t tiles = plan.target_layout.num_tiles;
    plan.target = 0;
    plan.draft = p.num_rows * plan.target_layout.bytes();
    plan.nodes = plan.draft + (plan.has_q ? p.num_rows * plan.draft_layout.bytes() : 0);
    plan.map = plan.nodes + p.num_rows * static_cast<int64_t>(sizeof(TreeNode));
    plan.children = plan.map + (plan.has_map ? plan.draft_layout.num_tiles : 0) *
                                   static_cast<int64_t>(sizeof(MapTile));
    plan.masses = plan.children + p.num_rows * static_cast<int64_t>(sizeof(TreeChild));
    plan.bytes = plan.masses + p.batch * tiles * static_cast<int64_t>(sizeof(float));
    return plan;
}

template <class T>
__device__ __forceinline__ T* scratch_at(const VerifyTreeParams& p, int64_t bytes) {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(p.scratch) + bytes);
}

__device__ __forceinline__ RowScratch target_scratch(const VerifyTreeParams& p,
                                                     const TreePlan& plan, int64_t row) {
    return plan.target_layout.at(scratch_at<void>(p, plan.target), row);
}

__device__ __forceinline__ RowScratch draft_scratch(const VerifyTreeParams& p, const TreePlan& plan,
                                                    int64_t row) {
    return plan.draft_layout.at(scratch_at<void>(p, plan.draft), row);
}

__device__ __forceinline__ DraftMap draft_map(const VerifyTreeParams& p, const TreePlan& plan) {
    return DraftMap{IdMap{p.d2t, p.d2t_is_offset}, scratch_at<MapTile>(p, plan.map), p.draft_vocab,
                    p.vocab_size};
}

// --- A request --------------------------------------------------------------------------------------
struct TreeRequest {
    int64_t index;
    int64_t first;  // its first row
    int64_t count;  // nodes; 0: inactive
    Siblings siblings;
    LawPlan p, q;
    bool reads_q;  // else q is one-hot at every child, or not used
};

__device__ __forceinline__ TreeRequest read_request(const VerifyTreeParams& p, int64_t b) {
    TreeRequest r;
    const RowSpan rows = rows_of_request(p.cu_rows, b, p.num_rows);
    r.index = b;
    r.first = rows.first;
    r.count = rows.count;
    r.p = law_plan(p.controls, b, p.vocab_size, wants_processed(p));
    r.q = r.p;
    r.q.filtered = p.draft_controls && !r.p.filters.none;
    const float draft_temperature = p.draft_temperature == nullptr ? 1.0f : p.draft_temperature[b];
    r.q.scale = exponent_scale(draft_temperature);
    r.siblings = is_greedy(draft_temperature) ? Siblings::kDeterministic : p.siblings;
    r.reads_q = r.siblings != Siblings::kDeterministic && !r.p.greedy;
    return r;
}

// The request that a row belongs to, -1: none. By a whole warp, which narrows cu_rows to a 32nd with
// every step; every lane gets the result.
__device__ __forceinline__ int64_t request_of_row(const VerifyTreeParams& p, int64_t row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int64_t low = 0, high = p.batch + 1;  // how many requests begin at or before the row
    while (low < high) {
        const int64_t step = (high - low + kWarpSize - 1) / kWarpSize;
        const int64_t probe = low + (lane + 1) * step - 1;
        const bool before = probe < high && p.cu_rows[probe] <= row;
        const int passed = __popc(__ballot_sync(kFullMask, before));
        low += passed * step;
        high = high < low + step - 1 ? high : low + step - 1;
    }
    return low > p.batch ? -1 : low - 1;
}

// --- Its rows ---------------------------------------------------------------------------------------
// Row of node u under the request's controls: the drafts on the way to it come before it.
__device__ __forceinline__ VocabRow target_row(const VerifyTreeParams& p, const TreeRequest& r,
                                               int64_t u) {
    VocabRow row;
    row.row = row_of(p.target_logits, p.logits_dtype, r.first + u);
    row.columns = p.vocab_size;
    row.edits = edits_of(p.controls, r.index, r.first + u,
                         DraftsBefore{p.input_ids, p.parents, r.first, u}, IdMap{}, p.vocab_size);
    return row;
}

// Where q of the children of node u is read; no row where it is one-hot.
__device__ __forceinline__ VocabRow draft_row(const VerifyTreeParams& p, const TreeRequest& r,
                                              int64_t u) {
    VocabRow row;
    if (!r.reads_q) return row;
    row.row = row_of(p.draft_logits, p.draft_dtype, r.first + u);
    row.columns = p.draft_vocab;
    if (!p.draft_controls) return row;
    row.edits =
        edits_of(p.controls, r.index, r.first + u, DraftsBefore{p.input_ids, p.parents, r.first, u},
                 IdMap{p.d2t, p.d2t_is_offset}, p.vocab_size);
    return row;
}

// --- Which rows are needed --------------------------------------------------------------------------
__device__ __forceinline__ bool has_good_parent(const VerifyTreeParams& p, const TreeRequest& r,
                                                int64_t u) {
    const int64_t parent = p.parents[r.first + u];
    return parent >= 0 && parent < u;
}

// Whether a path can come to node u. Rows of nodes that none comes to need no statistics; edits look up
// the drafts on the way, which must then be one. Without edits the node alone is looked at: a load
// after the other up to the root would take longer than reading a row now and then for nothing.
template <bool kWholeWay>
__device__ __forceinline__ bool is_reachable(const VerifyTreeParams& p, const TreeRequest& r,
                                             int64_t u) {
    if (u >= r.count) return false;
    for (int64_t depth = 0; u > 0; u = p.parents[r.first + u], ++depth) {
        if (depth >= p.max_path) return false;
        if (!has_good_parent(p, r, u) || !is_token(p, p.input_ids[r.first + u])) return false;
        if (!kWholeWay) break;
    }
    return true;
}

// Whether a node has a child whose id is a token. By the whole block; every thread gets the result.
__device__ __forceinline__ bool has_children(const VerifyTreeParams& p, const TreeRequest& r,
                                             int64_t u) {
    bool found = false;
    for (int64_t c = u + 1 + threadIdx.x; c < r.count; c += blockDim.x) {
        if (p.parents[r.first + c] == u) found = found || is_token(p, p.input_ids[r.first + c]);
    }
    return __syncthreads_or(found) != 0;
}

// A draft row is read where a child is tested against it. By the whole block.
template <bool kWholeWay>
__device__ __forceinline__ bool is_needed(const VerifyTreeParams& p, const TreeRequest& r,
                                          int64_t u, bool is_draft) {
    if (is_draft && !r.reads_q) return false;
    return is_reachable<kWholeWay>(p, r, u) && (!is_draft || has_children(p, r, u));
}

}  // namespace specdec::cuda
