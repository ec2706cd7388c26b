// tree_links on CUDA: every word of every mask row is found by walking from its node to the root.
//   Grid: one block per request; `lanes` threads of a warp share a node, a lane owns every lanes-th
//   word of its row, lane 0 also its depth and links. Rows of no request are spread over all blocks.
//   Bytes moved: 4 R (W + 3) written; parents once from memory, then from L1, `depth` times for a word
//   and up to `nodes` times for links. One launch, no scratch.
//   Determinism: integers, and no thread reads what another one wrote.
#include "kernel.h"

#include <algorithm>

#include "params.h"
#include "tree.cuh"

namespace specdec::cuda {
namespace {

// --- Steps ----------------------------------------------------------------------------------------
// Returns whether something is wrong with the node.
__device__ __forceinline__ bool write_node(const TreeLinksParams& p, const RowSpan& rows,
                                           int64_t node, int lane, int lanes) {
    const int64_t num_nodes = min(rows.count, p.max_nodes);
    const int64_t row = rows.first + node;
    int32_t depth;
    int64_t word = lane;
    do {
        const Ancestry found = ancestry_of(p.parents, rows.first, node, num_nodes, word);
        if (word < p.num_words) {
            p.tree_mask[row * p.num_words + word] = static_cast<int32_t>(found.words);
        }
        depth = found.depth;
        word += lanes;
    } while (word < p.num_words);
    if (lane == 0) {
        const Links links =
            depth < 0 ? Links{-1, -1} : links_of(p.parents, rows.first, node, num_nodes);
        p.depth[row] = depth;
        p.first_child[row] = links.first_child;
        p.next_sibling[row] = links.next_sibling;
    }
    return depth < 0 || (node == 0 && *p.parents.at(row) != -1);
}

__device__ __forceinline__ void write_padding(const TreeLinksParams& p, int64_t row, int lane,
                                              int lanes) {
    for (int64_t word = lane; word < p.num_words; word += lanes) {
        p.tree_mask[row * p.num_words + word] = 0;
    }
    if (lane == 0) p.depth[row] = p.first_child[row] = p.next_sibling[row] = -1;
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void tree_links_kernel(const __grid_constant__ TreeLinksParams p, int lanes) {
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    const int64_t slot = threadIdx.x / lanes;
    const int64_t slots = blockDim.x / lanes;

    // 1. The request. A batch of none still has a block, for the padding.
    if (blockIdx.x < p.batch) {
        const RowSpan rows = rows_of_request(p.cu_rows, blockIdx.x, p.num_rows);
        bool bad = false;
        for (int64_t node = slot; node < rows.count; node += slots) {
            bad = write_node(p, rows, node, lane, lanes) || bad;
        }
        bad = __syncthreads_or(bad) != 0;
        if (threadIdx.x == 0) p.status[blockIdx.x] = bad ? kBadTree : 0;
    }

    // 2. Rows of no request.
    const PaddingRows padding = padding_rows(p.cu_rows, p.batch, p.num_rows);
    for (int64_t i = blockIdx.x * slots + slot; i < padding.count; i += gridDim.x * slots) {
        write_padding(p, padding.row(i), lane, lanes);
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
Status tree_links(const TreeLinksParams& p, Stream stream) {
    if (p.batch > kMaxTreeRequests) return Status{1, "more requests than a CUDA grid holds"};
    const TreeBlock block = tree_block(p.num_words);
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(std::max<int64_t>(p.batch, 1)));
    cfg.block = dim3(static_cast<unsigned>(block.threads));
    cfg.stream = stream;
    return cu::launch(cfg, tree_links_kernel, p, block.lanes);
}

}  // namespace specdec::cuda
