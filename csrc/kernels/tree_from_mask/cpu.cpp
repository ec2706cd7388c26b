// tree_from_mask on the CPU: nodes in order, each compared with its parent's row, which is decided
// before; links by threading nodes onto their parents' child lists from the last one to the first.
// Work: a thread takes whole requests. Bytes moved: 4 R (W + 4) each way at most.
// Determinism: integers; a request depends on its own rows alone.
#include <algorithm>

#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

void write_outside(const TreeFromMaskParams& p, int64_t row) {
    p.parents[row] = p.depth[row] = p.first_child[row] = p.next_sibling[row] = -1;
}

// The highest bit of the node's row below its own one, or -1.
int64_t highest_ancestor(const TreeFromMaskParams& p, const RowSpan& rows, int64_t node) {
    for (int64_t word = node / kMaskBits; word >= 0; --word) {
        const uint32_t below = mask_word(p, rows, node, word) & bits_below(node, word);
        if (below != 0) return word * kMaskBits + 31 - __builtin_clz(below);
    }
    return -1;
}

// Whether the node's row is its parent's plus its own bit; the root's parent is -1, a row of no bits.
bool is_row_of_child(const TreeFromMaskParams& p, const RowSpan& rows, int64_t node,
                     int64_t parent) {
    for (int64_t word = 0; word < p.tree_mask.size[1]; ++word) {
        const uint32_t inherited = parent < 0 ? 0u : mask_word(p, rows, parent, word);
        if (mask_word(p, rows, node, word) != (inherited | node_bit(node, word))) return false;
    }
    return true;
}

// Returns the status bits.
int32_t request_tree(const TreeFromMaskParams& p, const RowSpan& rows) {
    const int64_t num_nodes = std::min(rows.count, p.tree_mask.size[1] * kMaskBits);
    bool bad = rows.count > num_nodes;

    // 1. Parents and depths, parents before children.
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i;
        write_outside(p, row);
        if (i >= num_nodes) continue;
        const int64_t parent = highest_ancestor(p, rows, i);
        const bool has_parent = parent >= 0 && p.depth[rows.first + parent] >= 0;
        if ((i == 0 || has_parent) && is_row_of_child(p, rows, i, parent)) {
            p.parents[row] = static_cast<int32_t>(parent);
            p.depth[row] = i == 0 ? 0 : p.depth[rows.first + parent] + 1;
        } else {
            bad = true;
        }
    }

    // 2. Links.
    link_children(
        num_nodes, [&](int64_t node) { return p.depth[rows.first + node] >= 0; },
        [&](int64_t node) { return p.parents[rows.first + node]; }, p.first_child + rows.first,
        p.next_sibling + rows.first);
    return bad ? kBadTree : 0;
}

}  // namespace

void tree_from_mask(const TreeFromMaskParams& p) {
    // A tree of 64 nodes takes about a microsecond: fewer are not worth waking a thread.
    constexpr int64_t kGrain = 32;
    parallel_for(0, p.batch, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            p.status[b] = request_tree(p, rows_of_request(p.cu_rows, b, p.num_rows));
        }
    });
    const PaddingRows padding = padding_rows(p.cu_rows, p.batch, p.num_rows);
    for (int64_t i = 0; i < padding.count; ++i) write_outside(p, padding.row(i));
}

}  // namespace specdec::cpu::SPECDEC_ISA
