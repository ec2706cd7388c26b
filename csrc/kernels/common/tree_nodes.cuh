// Writing a drafted tree on CUDA, from its parents in shared memory.
#pragma once

#include "tree.cuh"
#include "tree_nodes.h"

namespace specdec::cuda {

// By the whole block, a thread per word of the mask. node_parent: [N], -1 for the anchor and behind the last node;
// token_of(node) is -1 there.
template <class TokenOf>
__device__ __forceinline__ void write_tree(const TreeNodes& t, int64_t b,
                                           const int32_t* node_parent, const TokenOf& token_of) {
    const int num_nodes = static_cast<int>(t.num_nodes), words = static_cast<int>(t.num_words);
    Parents parents;
    parents.data = node_parent;
    parents.size[0] = num_nodes;
    parents.stride[0] = 1;
    const int threads = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < num_nodes * words; i += threads) {
        const int node = i / words, word = i % words;
        const Ancestry found = ancestry_of(parents, 0, node, num_nodes, word);
        t.tree_mask[(b * num_nodes + node) * words + word] = static_cast<int32_t>(found.words);
        if (word != 0) continue;
        const Links links = found.depth < 0 ? Links{-1, -1} : links_of(parents, 0, node, num_nodes);
        write_node(t, b, node, token_of(node), node_parent[node], found.depth);
        t.first_child[b * num_nodes + node] = links.first_child;
        t.next_sibling[b * num_nodes + node] = links.next_sibling;
    }
}

}  // namespace specdec::cuda
