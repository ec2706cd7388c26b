// build_tree: a draft tree of at most N nodes from scored candidates, EAGLE-2's rerank (arXiv 2406.16858).
//   Node 0 is the anchor. The N - 1 best usable candidates by (score descending, index ascending) are chosen; a
//   token below 0 or a score of -inf or NaN is not usable. Of the chosen those whose parents, chosen too, lead
//   to the root become nodes; the others (a parent outside the list, not chosen, in a cycle) are left out.
//   Numbers go to the lowest candidate whose parent has one, one after the other.
//   Behind the last node: ids, parents, links -1, of the mask the own bit, the anchor's position.
//   kBadTree: there are fewer than N nodes.
#pragma once

#include "isa.h"
#include "order.h"
#include "tree.h"

namespace specdec {

constexpr int64_t kMaxBuildCandidates = 2048;
constexpr int64_t kMaxBuildNodes = 256;

struct BuildTreeParams {
    View<const void, 2> tokens;  // [B, C] in id_type
    DType id_type;
    View<const float, 2> scores;     // [B, C]
    View<const int32_t, 2> parents;  // [B, C] candidates, -1: the root
    IndexView anchor_ids;            // [B]
    IndexView positions;             // [B] of the anchors
    int64_t batch;
    int64_t num_candidates;   // C, at most kMaxBuildCandidates
    int64_t num_nodes;        // N, 1 .. kMaxBuildNodes
    int64_t num_words;        // ceil(N / 32)
    void* input_ids;          // [B, N] in id_type
    int32_t* node_parents;    // [B, N]
    int32_t* tree_mask;       // [B, N, num_words]
    int64_t* node_positions;  // [B, N]
    int32_t* first_child;     // [B, N]
    int32_t* next_sibling;    // [B, N]
    int32_t* status;          // [B]
};

SPECDEC_HD int64_t candidate_token(const BuildTreeParams& p, int64_t b, int64_t c) {
    const int64_t at = b * p.tokens.stride[0] + c * p.tokens.stride[1];
    return p.id_type == DType::kI64 ? static_cast<const int64_t*>(p.tokens.data)[at]
                                    : static_cast<const int32_t*>(p.tokens.data)[at];
}

// Where candidate c comes in the choice; kNoOrder: never.
SPECDEC_HD uint64_t candidate_order(const BuildTreeParams& p, int64_t b, int64_t c) {
    const float score = *p.scores.at(b, c);
    const bool usable = score > -bits_float(0x7f800000u) && candidate_token(p, b, c) >= 0;
    return usable ? order_of(score, static_cast<uint32_t>(c)) : kNoOrder;
}

// candidate -1: no node, 0 .. C-1: a node; depth -1: no node. Number 0 is the anchor.
SPECDEC_HD void write_node(const BuildTreeParams& p, int64_t b, int64_t node, int64_t candidate,
                           int32_t parent, int32_t depth) {
    const int64_t at = b * p.num_nodes + node;
    const int64_t id = node == 0       ? p.anchor_ids[b]
                       : candidate < 0 ? -1
                                       : candidate_token(p, b, candidate);
    if (p.id_type == DType::kI64) {
        static_cast<int64_t*>(p.input_ids)[at] = id;
    } else {
        static_cast<int32_t*>(p.input_ids)[at] = static_cast<int32_t>(id);
    }
    p.node_parents[at] = parent;
    p.node_positions[at] = p.positions[b] + (depth > 0 ? depth : 0);
}

namespace cuda {
Status build_tree(const BuildTreeParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(build_tree, ::specdec::BuildTreeParams)
