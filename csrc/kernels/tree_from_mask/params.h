// tree_from_mask: the inverse of tree_links, parents, depths and links of draft trees from their masks.
//   Bits at or past the request's rows are ignored. Node 0 is the root iff its row is its own bit. The
//   parent of node i > 0 is the highest bit below i of its row; i is in the tree iff its row is that of
//   its parent plus its own bit and the parent is in the tree. A node outside the tree, such as every
//   one without a bit of its own (i >= 32 W): parent, depth and links -1. So are rows of no request.
//   kBadTree: a node is outside its tree.
#pragma once

#include "isa.h"
#include "tree.h"

namespace specdec {

struct TreeFromMaskParams {
    View<const int32_t, 2> tree_mask;  // [R, W]
    const int32_t* cu_rows;            // [B+1]
    int64_t batch;
    int64_t num_rows;       // R
    int32_t* parents;       // [R] node numbers within the request
    int32_t* depth;         // [R]
    int32_t* first_child;   // [R]
    int32_t* next_sibling;  // [R]
    int32_t* status;        // [B]
};

// Word `word` of the mask row of a node, without bits that stand for no row of the request.
SPECDEC_HD uint32_t mask_word(const TreeFromMaskParams& p, const RowSpan& rows, int64_t node,
                              int64_t word) {
    const int32_t* row = p.tree_mask.at(rows.first + node);
    return static_cast<uint32_t>(row[word]) & bits_below(rows.count, word);
}

namespace cuda {
Status tree_from_mask(const TreeFromMaskParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(tree_from_mask, ::specdec::TreeFromMaskParams)
