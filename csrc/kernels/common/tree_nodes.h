// A drafted tree as results of an op (build_tree, block_tree): N rows a request, real nodes first. Behind the last
// node: ids, parents and links -1, of the mask the own bit, the anchor's position. kBadTree: there are fewer than N.
#pragma once

#include "tree.h"
#include "view.h"

namespace specdec {

constexpr int64_t kMaxDraftedNodes = 256;

struct TreeNodes {
    IndexView anchor_ids;  // [B]
    IndexView positions;   // [B] of the anchors
    int64_t num_nodes;     // N, 1 .. kMaxDraftedNodes
    int64_t num_words;     // ceil(N / 32)
    DType id_type;
    void* input_ids;          // [B, N] in id_type
    int32_t* parents;         // [B, N]
    int32_t* tree_mask;       // [B, N, num_words]
    int64_t* node_positions;  // [B, N]
    int32_t* first_child;     // [B, N]
    int32_t* next_sibling;    // [B, N]
    int32_t* status;          // [B]
};

// token: of a node but the anchor; -1, like parent and depth, behind the last node.
SPECDEC_HD void write_node(const TreeNodes& t, int64_t b, int64_t node, int64_t token,
                           int32_t parent, int32_t depth) {
    const int64_t at = b * t.num_nodes + node;
    const int64_t id = node == 0 ? t.anchor_ids[b] : token;
    if (t.id_type == DType::kI64) {
        static_cast<int64_t*>(t.input_ids)[at] = id;
    } else {
        static_cast<int32_t*>(t.input_ids)[at] = static_cast<int32_t>(id);
    }
    t.parents[at] = parent;
    t.node_positions[at] = t.positions[b] + (depth > 0 ? depth : 0);
}

// On the host. The tree of request b: `count` nodes with the anchor, node n > 0 with token_of(n) and parent_of(n) < n.
template <class TokenOf, class ParentOf>
inline void write_tree(const TreeNodes& t, int64_t b, int64_t count, const TokenOf& token_of,
                       const ParentOf& parent_of) {
    const int64_t first = b * t.num_nodes;
    int32_t* mask = t.tree_mask + first * t.num_words;
    for (int64_t node = 0; node < t.num_nodes; ++node) {
        const bool inside = node < count;
        const int32_t parent = inside && node > 0 ? parent_of(node) : -1;
        int64_t depth = inside ? 0 : -1;
        if (parent >= 0) {
            depth = t.node_positions[first + parent] - t.node_positions[first] + 1;
        }
        write_node(t, b, node, inside && node > 0 ? token_of(node) : -1, parent,
                   static_cast<int32_t>(depth));
        for (int64_t word = 0; word < t.num_words; ++word) {
            const uint32_t above =
                parent < 0 ? 0u : static_cast<uint32_t>(mask[parent * t.num_words + word]);
            mask[node * t.num_words + word] = static_cast<int32_t>(above | node_bit(node, word));
        }
        t.first_child[first + node] = t.next_sibling[first + node] = -1;
    }
    link_children(
        count, [](int64_t) { return true; }, [&](int64_t node) { return t.parents[first + node]; },
        t.first_child + first, t.next_sibling + first);
}

}  // namespace specdec
