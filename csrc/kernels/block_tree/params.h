// block_tree: the best tree of at most N nodes from the logits of a block drafter, whose law of a position does not
// depend on the path: best-first search over products of per-position probabilities (as DDTree does).
//   Position g has the first k tokens of its row (common/top_rows.h); a node of depth g + 1 is one of them below
//   any node of depth g. Its score is its parent's plus its log-probability, float32, the anchor's is 0.
//   Nodes are numbered as they are taken: always the path with the best score whose parent is in the tree, by
//   (score descending, depth, number of the parent, rank of the token at its position). A score never exceeds the
//   parent's, so the first n nodes are the tree of n nodes.
//   kDraftNan: a position has no law; there are no nodes from there on. kBadTree: fewer than N nodes.
#pragma once

#include "isa.h"
#include "top_rows.h"
#include "tree_nodes.h"

namespace specdec {

constexpr int64_t kMaxBlockRows = 64;

struct BlockTreeParams {
    TopRows top;      // [B, G], G at most kMaxBlockRows
    TreeNodes nodes;  // id_type: that of anchor_ids
    void* scratch;    // CUDA: block_tree_scratch_bytes(p) bytes, uninitialised
};

// A path that may be taken next, as an order: (score, depth, parent, rank). All are different.
struct BlockPath {
    float score;
    int depth, parent, rank;

    SPECDEC_HD uint64_t order() const {
        return order_of(score, static_cast<uint32_t>(depth) << 13 |
                                   static_cast<uint32_t>(parent) << 5 |
                                   static_cast<uint32_t>(rank));
    }
    SPECDEC_HD static BlockPath of(uint64_t order) {
        const uint32_t id = id_of_order(order);
        return BlockPath{value_of_order(order), static_cast<int>(id >> 13),
                         static_cast<int>(id >> 5 & 0xffu), static_cast<int>(id & 0x1fu)};
    }
};

// The order of the path of `rank` at depth `depth` below node `parent`; kNoOrder: there is none. logprob: of that
// token, -inf where the position has no such token.
SPECDEC_HD uint64_t block_path(float parent_score, int depth, int parent, int rank, float logprob) {
    const float score = parent_score + logprob;
    return is_alive(score) ? BlockPath{score, depth, parent, rank}.order() : kNoOrder;
}

namespace cuda {
int64_t block_tree_scratch_bytes(const BlockTreeParams& p);
Status block_tree(const BlockTreeParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(block_tree, ::specdec::BlockTreeParams)
