// tree_links on the CPU: depth and mask of a node from those of its parent, which comes first; links
// by threading nodes onto their parents' child lists from the last one to the first.
// Work: a thread takes whole requests. Bytes moved: 4 R (W + 4) written, 4 R (W + 2) read.
// Determinism: integers; a request depends on its own rows alone.
#include <algorithm>

#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// What a row holds that is in no tree.
void write_outside(const TreeLinksParams& p, int64_t row) {
    std::fill_n(p.tree_mask + row * p.num_words, p.num_words, 0);
    p.depth[row] = p.first_child[row] = p.next_sibling[row] = -1;
}

// Whether the node is a child of a node of the tree.
bool is_child(const TreeLinksParams& p, const RowSpan& rows, int64_t node) {
    const int64_t parent = *p.parents.at(rows.first + node);
    return parent >= 0 && parent < node && p.depth[rows.first + parent] >= 0;
}

// Returns the status bits.
int32_t request_tree(const TreeLinksParams& p, const RowSpan& rows) {
    const int64_t num_nodes = std::min(rows.count, p.max_nodes);
    bool bad = rows.count > num_nodes || (rows.count > 0 && *p.parents.at(rows.first) != -1);

    // 1. Depths and masks, parents before children.
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i;
        int32_t* mask = p.tree_mask + row * p.num_words;
        write_outside(p, row);
        if (i < num_nodes && i == 0) {
            p.depth[row] = 0;
        } else if (i < num_nodes && is_child(p, rows, i)) {
            const int64_t parent_row = rows.first + *p.parents.at(row);
            std::copy_n(p.tree_mask + parent_row * p.num_words, p.num_words, mask);
            p.depth[row] = p.depth[parent_row] + 1;
        } else {
            bad = true;
        }
        const int64_t word = i / kMaskBits;
        if (word < p.num_words) {
            mask[word] =
                static_cast<int32_t>(static_cast<uint32_t>(mask[word]) | node_bit(i, word));
        }
    }

    // 2. Links.
    link_children(
        num_nodes, [&](int64_t node) { return p.depth[rows.first + node] >= 0; },
        [&](int64_t node) { return *p.parents.at(rows.first + node); }, p.first_child + rows.first,
        p.next_sibling + rows.first);
    return bad ? kBadTree : 0;
}

}  // namespace

void tree_links(const TreeLinksParams& p) {
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
