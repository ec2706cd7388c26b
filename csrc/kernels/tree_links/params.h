// tree_links: masks, depths and links of the draft trees of a batch, from their parents.
//   Node i > 0 is in the tree iff i < max_nodes, 0 <= parent < i and its parent is in the tree; node 0
//   is the root whatever its parent says. A node outside the tree: depth -1, links -1, of the mask its
//   own bit (where there is one). Rows of no request: depth and links -1, mask 0.
//   kBadTree: a node is outside its tree, or the root names a parent.
#pragma once

#include "isa.h"
#include "tree.h"

namespace specdec {

struct TreeLinksParams {
    View<const int32_t, 1> parents;  // [R] node numbers within the request
    const int32_t* cu_rows;          // [B+1]
    int64_t batch;
    int64_t num_rows;       // R
    int64_t max_nodes;      // at most kMaxTreeNodes
    int64_t num_words;      // W = ceil(max_nodes / 32)
    int32_t* tree_mask;     // [R, W]
    int32_t* depth;         // [R]
    int32_t* first_child;   // [R]
    int32_t* next_sibling;  // [R]
    int32_t* status;        // [B]
};

namespace cuda {
Status tree_links(const TreeLinksParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(tree_links, ::specdec::TreeLinksParams)
