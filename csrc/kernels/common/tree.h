// Draft trees over the rows of a request. A node's number is its row within the request, node 0 is
// the root, and every parent comes before its children, so walking up a tree always ends.
// A tree mask has one row of 32-bit words per node: bit j % 32 of word j / 32 is set iff node j is the
// row's node or one of its ancestors.
#pragma once

#include "rows.h"

namespace specdec {

constexpr int64_t kMaskBits = 32;
constexpr int64_t kMaxTreeNodes = 0x7fffffff;  // node numbers and depths are int32

// Word `word` of a mask with bits 0 .. count-1.
SPECDEC_HD uint32_t bits_below(int64_t count, int64_t word) {
    const int64_t n = count - word * kMaskBits;
    return n <= 0 ? 0u : (n >= kMaskBits ? 0xffffffffu : (1u << n) - 1u);
}

// Word `word` of a mask with bit `node` alone.
SPECDEC_HD uint32_t node_bit(int64_t node, int64_t word) {
    return node / kMaskBits == word ? 1u << (node % kMaskBits) : 0u;
}

// Links the nodes 1 .. num_nodes-1 that lie in the tree, inside(node), to their parents, parent_of(node):
// siblings in ascending order. Both arrays hold -1 for every node before. A parent that is none is passed
// over: where cu_rows decreases, another thread may have written what inside(node) reads.
template <class Link, class Inside, class ParentOf>
inline void link_children(int64_t num_nodes, const Inside& inside, const ParentOf& parent_of,
                          Link* first_child, Link* next_sibling) {
    // From the last node up, every node becomes the head of its parent's list.
    for (int64_t node = num_nodes - 1; node > 0; --node) {
        if (!inside(node)) continue;
        const int64_t parent = parent_of(node);
        if (parent < 0 || parent >= node) continue;
        Link& head = first_child[parent];
        next_sibling[node] = head;
        head = static_cast<Link>(node);
    }
}

}  // namespace specdec
