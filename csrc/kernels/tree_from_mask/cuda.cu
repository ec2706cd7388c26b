// tree_from_mask on CUDA: the parent that every row names, then depths by walking up, then links.
//   Grid: one block per request. In step 1 `lanes` threads of a warp share a row, a lane owns every
//   lanes-th word; in steps 2 and 3 a thread owns every blockDim-th node. Rows of no request are
//   spread over all blocks.
//   Bytes moved: masks read twice from memory or L1, 16 R written; parents from L1, `depth` times and
//   up to `nodes` times for links. One launch, no scratch: step 1 leaves parents in the output.
//   Determinism: integers; barriers stand between writing parents and reading those of others.
#include "kernel.h"

#include <algorithm>

#include "block.cuh"
#include "params.h"
#include "tree.cuh"

namespace specdec::cuda {
namespace {

constexpr int32_t kNoParent = -1;  // of the root
constexpr int32_t kBadRow = -2;    // the row is not that of its parent plus its own bit

// --- Steps ----------------------------------------------------------------------------------------
// The parent that a row names, or kBadRow; all lanes of the warp call, those of a row get the same.
__device__ __forceinline__ int32_t parent_of_row(const TreeFromMaskParams& p, const RowSpan& rows,
                                                 int64_t node, int lane, int lanes) {
    const int64_t num_words = p.tree_mask.size[1];
    const bool has_row = node < rows.count && node < num_words * kMaskBits;
    int32_t parent = kNoParent;
    for (int64_t word = lane; has_row && word < num_words; word += lanes) {
        const uint32_t below = mask_word(p, rows, node, word) & bits_below(node, word);
        if (below != 0) {
            parent = static_cast<int32_t>(word * kMaskBits) + 31 - __clz(static_cast<int>(below));
        }
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
        parent = max(parent, __shfl_xor_sync(kFullMask, parent, distance));
    }

    int good = has_row && (parent >= 0 || node == 0);
    for (int64_t word = lane; good && word < num_words; word += lanes) {
        const uint32_t inherited = parent < 0 ? 0u : mask_word(p, rows, parent, word);
        good = mask_word(p, rows, node, word) == (inherited | node_bit(node, word));
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
        good = min(good, __shfl_xor_sync(kFullMask, good, distance));
    }
    return good ? parent : kBadRow;
}

__device__ __forceinline__ void write_parents(const TreeFromMaskParams& p, const RowSpan& rows,
                                              int lanes) {
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    const int64_t slots = blockDim.x / lanes;
    for (int64_t first = 0; first < rows.count; first += slots) {
        const int64_t node = first + threadIdx.x / lanes;
        const int32_t parent = parent_of_row(p, rows, node, lane, lanes);
        if (lane == 0 && node < rows.count) p.parents[rows.first + node] = parent;
    }
}

// Depths and links from parents; returns whether a node of this thread is outside the tree.
__device__ __forceinline__ bool write_links(const TreeFromMaskParams& p, const RowSpan& rows) {
    Parents parents;
    parents.data = p.parents;
    parents.stride[0] = 1;
    const bool has_root = rows.count > 0 && p.parents[rows.first] == kNoParent;
    const int64_t num_nodes = has_root ? rows.count : 0;
    bool bad = false;
    for (int64_t node = threadIdx.x; node < rows.count; node += blockDim.x) {
        const int64_t row = rows.first + node;
        const int32_t depth = ancestry_of(parents, rows.first, node, num_nodes, 0).depth;
        const Links links =
            depth < 0 ? Links{-1, -1} : links_of(parents, rows.first, node, num_nodes);
        p.depth[row] = depth;
        p.first_child[row] = links.first_child;
        p.next_sibling[row] = links.next_sibling;
        bad = bad || depth < 0;
    }
    return bad;
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void tree_from_mask_kernel(const __grid_constant__ TreeFromMaskParams p, int lanes) {
    // A batch of none still has a block, for the padding.
    if (blockIdx.x < p.batch) {
        const RowSpan rows = rows_of_request(p.cu_rows, blockIdx.x, p.num_rows);

        // 1. Parents, as the rows name them.
        write_parents(p, rows, lanes);
        __syncthreads();

        // 2. Depths and links.
        const bool bad = __syncthreads_or(write_links(p, rows)) != 0;

        // 3. Nodes outside the tree lose the parent that they named.
        for (int64_t node = threadIdx.x; bad && node < rows.count; node += blockDim.x) {
            if (p.depth[rows.first + node] < 0) p.parents[rows.first + node] = kNoParent;
        }
        if (threadIdx.x == 0) p.status[blockIdx.x] = bad ? kBadTree : 0;
    }

    // 4. Rows of no request.
    const PaddingRows padding = padding_rows(p.cu_rows, p.batch, p.num_rows);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (int64_t i = thread; i < padding.count; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const int64_t row = padding.row(i);
        p.parents[row] = p.depth[row] = p.first_child[row] = p.next_sibling[row] = -1;
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
Status tree_from_mask(const TreeFromMaskParams& p, Stream stream) {
    if (p.batch > kMaxTreeRequests) return Status{1, "more requests than a CUDA grid holds"};
    const TreeBlock block = tree_block(p.tree_mask.size[1]);
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(std::max<int64_t>(p.batch, 1)));
    cfg.block = dim3(static_cast<unsigned>(block.threads));
    cfg.stream = stream;
    return cu::launch(cfg, tree_from_mask_kernel, p, block.lanes);
}

}  // namespace specdec::cuda
