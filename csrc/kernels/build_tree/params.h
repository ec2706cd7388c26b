// build_tree: a draft tree of at most N nodes from scored candidates, EAGLE-2's rerank (arXiv 2406.16858).
//   Node 0 is the anchor. The N - 1 best usable candidates by (score descending, index ascending) are chosen; a
//   token below 0 or a score of -inf or NaN is not usable. Of the chosen those whose parents, chosen too, lead
//   to the root become nodes; the others (a parent outside the list, not chosen, in a cycle) are left out.
//   Numbers go to the lowest candidate whose parent has one, one after the other. Results: common/tree_nodes.h.
#pragma once

#include "isa.h"
#include "order.h"
#include "tree_nodes.h"

namespace specdec {

constexpr int64_t kMaxBuildCandidates = 2048;

struct BuildTreeParams {
    View<const void, 2> tokens;      // [B, C] in nodes.id_type
    View<const float, 2> scores;     // [B, C]
    View<const int32_t, 2> parents;  // [B, C] candidates, -1: the root
    int64_t batch;
    int64_t num_candidates;  // C, at most kMaxBuildCandidates
    TreeNodes nodes;
};

SPECDEC_HD int64_t candidate_token(const BuildTreeParams& p, int64_t b, int64_t c) {
    const int64_t at = b * p.tokens.stride[0] + c * p.tokens.stride[1];
    return p.nodes.id_type == DType::kI64 ? static_cast<const int64_t*>(p.tokens.data)[at]
                                          : static_cast<const int32_t*>(p.tokens.data)[at];
}

// Where candidate c comes in the choice; kNoOrder: never.
SPECDEC_HD uint64_t candidate_order(const BuildTreeParams& p, int64_t b, int64_t c) {
    const float score = *p.scores.at(b, c);
    const bool usable = score > -bits_float(0x7f800000u) && candidate_token(p, b, c) >= 0;
    return usable ? order_of(score, static_cast<uint32_t>(c)) : kNoOrder;
}

namespace cuda {
Status build_tree(const BuildTreeParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(build_tree, ::specdec::BuildTreeParams)
