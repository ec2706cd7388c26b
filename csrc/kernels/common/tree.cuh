// Steps that kernels on trees share. Parents lie in global memory and are read through L1: a tree is
// a few hundred bytes, and a copy in shared memory would cost a barrier and a limit on its size.
#pragma once

#include "kernel.h"

#include "tree.h"

namespace specdec {

using Parents = View<const int32_t, 1>;  // of all requests; of a node: at(first row + node)

// What the way from a node up to the root shows.
struct Ancestry {
    int32_t depth;   // -1: the node is not in the tree
    uint32_t words;  // one word of its mask row
};

// `num_nodes` rows of the request can be in the tree. Parents not before their child, such as those
// of a cycle, end the walk, so it takes at most `node` steps whatever the data.
__device__ __forceinline__ Ancestry ancestry_of(const Parents& parents, int64_t first, int64_t node,
                                                int64_t num_nodes, int64_t word) {
    const Ancestry outside{-1, node_bit(node, word)};
    if (node >= num_nodes) return outside;
    Ancestry found{0, node_bit(node, word)};
    while (node > 0) {
        const int64_t parent = *parents.at(first + node);
        if (parent < 0 || parent >= node) return outside;
        node = parent;
        found.words |= node_bit(node, word);
        ++found.depth;
    }
    return found;
}

struct Links {
    int32_t first_child;
    int32_t next_sibling;
};

// Links of a node of the tree: the first later rows that name it, or its parent, as theirs. Such rows
// are in the tree too. Rows are read eight at a time, as one after the other would wait for each.
__device__ __forceinline__ Links links_of(const Parents& parents, int64_t first, int64_t node,
                                          int64_t num_nodes) {
    constexpr int kAtOnce = 8;
    const int32_t parent = *parents.at(first + node);
    bool want_child = true;
    bool want_sibling = node > 0;  // whatever the root's parent says, nothing is beside it
    Links links{-1, -1};
    for (int64_t j = node + 1; j < num_nodes && (want_child || want_sibling); j += kAtOnce) {
        int32_t other[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            other[i] = j + i < num_nodes ? *parents.at(first + j + i) : -1;
        }
#pragma unroll
        for (int i = kAtOnce - 1; i >= 0; --i) {  // the lowest one stays
            if (want_child && other[i] == node) links.first_child = static_cast<int32_t>(j + i);
            if (want_sibling && other[i] == parent)
                links.next_sibling = static_cast<int32_t>(j + i);
        }
        want_child = want_child && links.first_child < 0;
        want_sibling = want_sibling && links.next_sibling < 0;
    }
    return links;
}

constexpr int64_t kMaxTreeRequests = 0x7fffffff;  // blocks of a grid

// A block handles a request, `lanes` threads of a warp a row of its mask (a power of two).
struct TreeBlock {
    int lanes;
    int threads;
};

inline TreeBlock tree_block(int64_t num_words) {
    constexpr int64_t kMaxThreads = 512;
    TreeBlock block{1, 32};
    while (block.lanes < num_words && block.lanes < 32) block.lanes *= 2;
    const int64_t wanted = num_words * kMaskBits * block.lanes;
    if (wanted > block.threads) {
        block.threads = static_cast<int>(wanted < kMaxThreads ? wanted : kMaxThreads);
    }
    return block;
}

}  // namespace specdec
