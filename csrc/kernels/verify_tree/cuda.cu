// verify_tree on CUDA: a walk through each request's tree, which ends where no child of a node is
// accepted; then comes one token, from what the rejections left of that node's law, or from the law
// (common/verify.h has the rules of all methods).
//   p(v) = 2^((z[v] - max) * c - log2(sum)) is evaluated where it is needed and never stored; after
//   rejections max(a p - b q, 0) off the rejected ids, of which a, b and the mass are kept.
//   Launch 1, grid (R target rows + R draft rows, tiles), 256 threads: statistics of one vocabulary tile
//   of one row; rows of nodes outside the tree, and draft rows of nodes without children, are skipped.
//   A block behind the last row looks at d2t.
//   Launch 2, only with filters, grid (rows), 512 threads: the prefix that the filters keep of one row;
//   a warp owns a group of 256 entries.
//   Last launch, grid (B), 512 threads: a block walks its request's tree; its threads decide alike from
//   the statistics. A warp looks a node's children up among the parents of the rows behind it. A
//   rejection sums the rest up, a tile per warp; the draw looks at one tile. Then the outputs, and the
//   most probable ids of the accepted rows alone, since nobody asks for those of the others.
//   A thread owns 16 entries of a tile at a time. Bytes moved: target rows once, draft rows of nodes with
//   children once; per rejection that needs its mass the two rows again, one tile of them for the token.
//   Where cu_rows decreases, requests that share rows with others are inactive: scratch is by row.
//   Malformed trees: a child names a row before it as its parent, so every way is finite and within the
//   request; what the walk does not come to has no say but kBadTree.
//   Determinism: fixed trees over absolute tiles, sums of tiles in a fixed order; a request is one
//   block's, which sees nothing of the others. No atomics.
#include "kernel.h"

#include "report.cuh"
#include "walk.cuh"

namespace specdec::cuda {
namespace {

// Rows of a grid: all target rows, then, where q is read, all draft rows.
struct Slot {
    int64_t row;
    bool is_draft;
};

__device__ __forceinline__ Slot slot_of(const VerifyTreeParams& p) {
    const bool is_draft = blockIdx.x >= p.num_rows;
    return Slot{static_cast<int64_t>(blockIdx.x) - (is_draft ? p.num_rows : 0), is_draft};
}

// --- Launch 1 -------------------------------------------------------------------------------------
template <bool kEdits, bool kMore>
__global__ void __launch_bounds__(kTileThreads, kEdits  ? 2
                                                : kMore ? 4
                                                        : kTileBlocksPerSm)
    tree_statistics_kernel(const __grid_constant__ VerifyTreeParams p) {
    CU_SHARED(shared, StatsPlan);
    CU_SHARED(more, MoreStatsPlan);
    const Slot slot = slot_of(p);
    const int tile = static_cast<int>(blockIdx.y);
    const TreePlan plan = tree_plan(p);
    if (slot.is_draft && slot.row == p.num_rows) {  // the blocks behind the last row
        if (tile < plan.draft_layout.num_tiles) {
            const DraftMap map = draft_map(p, plan);
            map_statistics(map, tile, scratch_at<MapTile>(p, plan.map) + tile);
        }
        return;
    }
    const RowLayout& layout = slot.is_draft ? plan.draft_layout : plan.target_layout;
    if (tile >= layout.num_tiles) return;
    const int64_t b = request_of_row(p, slot.row);
    if (b < 0) return;
    const TreeRequest r = read_request(p, b);
    const int64_t u = slot.row - r.first;
    if (u < 0) return;  // cu_rows decreases
    if (!is_needed<kEdits>(p, r, u, slot.is_draft)) return;

    const bool sum_wanted = !r.p.greedy || wants_processed(p);
    StatsWanted wanted{slot.is_draft ? r.q.scale
                       : sum_wanted  ? r.p.scale
                                     : 0.0f,
                       false, false, false};
    if constexpr (kMore) {
        wanted.raw_sum = !slot.is_draft && wants_raw(p);
        wanted.groups = layout.groups;
    }
    VocabRow row;
    if constexpr (kEdits) {
        row = slot.is_draft ? draft_row(p, r, u) : target_row(p, r, u);
    } else if (slot.is_draft) {
        row.row = row_of(p.draft_logits, p.draft_dtype, slot.row);
        row.columns = p.draft_vocab;
    } else {
        row.row = row_of(p.target_logits, p.logits_dtype, slot.row);
        row.columns = p.vocab_size;
    }
    tile_statistics<kMore, kEdits, kMore>(
        row, tile, wanted, shared, &more,
        slot.is_draft ? draft_scratch(p, plan, slot.row) : target_scratch(p, plan, slot.row));
}

// --- Launch 2 -------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kSelectThreads, 1)
    tree_filter_kernel(const __grid_constant__ VerifyTreeParams p) {
    CU_SHARED(shared, SelectPlan);
    CU_SHARED(shared_job, Uniform<FilterJob>);
    const Slot slot = slot_of(p);
    const TreePlan plan = tree_plan(p);
    const int64_t b = request_of_row(p, slot.row);
    if (b < 0) return;
    const TreeRequest r = read_request(p, b);
    const int64_t u = slot.row - r.first;
    if (u < 0) return;  // cu_rows decreases
    const LawPlan& law = slot.is_draft ? r.q : r.p;
    if (!law.filtered) return;
    // As in launch 1: what has no statistics is not looked at.
    const bool needed = has_edits(p) ? is_needed<true>(p, r, u, slot.is_draft)
                                     : is_needed<false>(p, r, u, slot.is_draft);
    if (!needed) return;
    const RowScratch scratch =
        slot.is_draft ? draft_scratch(p, plan, slot.row) : target_scratch(p, plan, slot.row);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    if (!peak.usable()) return;
    const VocabRow row = slot.is_draft ? draft_row(p, r, u) : target_row(p, r, u);
    const FilterJob& job = shared_job.set(FilterJob{
        {row, scratch.z_maxima(), peak.max, law.scale}, scratch, law.filters, p.vocab_size, false});
    filter_row(job, shared);
}

// --- Last launch ----------------------------------------------------------------------------------
// Dynamic shared memory: a tile of q where d2t scatters it, then room to look for the most probable ids.
struct WalkSmem {
    size_t q_values, top, bytes;
};

constexpr WalkSmem walk_smem(bool has_map, bool has_top) {
    cu::SmemLayout smem;
    WalkSmem at{};
    if (has_map) at.q_values = smem.add<float>(kTileEntries);
    if (has_top) at.top = smem.add<TopPlan>(1);
    at.bytes = smem.bytes();
    return at;
}
constexpr size_t kTopBehindQ = walk_smem(true, true).top;

// Whether a row's parent lies where no tree has it.
__device__ __forceinline__ bool is_bad_tree(const VerifyTreeParams& p, const TreeRequest& r) {
    bool bad = false;
    for (int64_t u = threadIdx.x; u < r.count; u += kWalkThreads) {
        const int64_t parent = p.parents[r.first + u];
        bad = bad || (u == 0 ? parent != -1 : parent < 0 || parent >= u);
    }
    return __syncthreads_or(bad) != 0;
}

// Whether an entry of cu_rows that this thread looks at gives rows of request b to others too: what is kept by
// row would then be theirs as well.
__device__ __forceinline__ bool sees_shared_rows(const VerifyTreeParams& p, int64_t b) {
    const RowSpan rows = rows_of_request(p.cu_rows, b, p.num_rows);
    bool shared = false;
    for (int64_t i = threadIdx.x; i <= p.batch; i += kWalkThreads) {
        shared = shared || shares_rows(rows, b, i, clamp_row(p.cu_rows[i], p.num_rows));
    }
    return shared;
}

__global__ void __launch_bounds__(kWalkThreads, 1)
    tree_walk_kernel(const __grid_constant__ VerifyTreeParams p) {
    CU_SHARED(shared, WalkShared);
    CU_DYN_SHARED(dynamic);
    if (threadIdx.x == 0) {
        shared.plan = tree_plan(p);
        shared.r = read_request(p, blockIdx.x);
    }
    const bool is_alone = __syncthreads_or(sees_shared_rows(p, blockIdx.x)) == 0;
    const bool has_map = shared.plan.has_map;
    float* q_values = has_map ? cu::smem_at<float>(dynamic, 0, kTileEntries) : nullptr;
    TopPlan* top = nullptr;
    if (top_n(p) > 0) top = cu::smem_at<TopPlan>(dynamic, has_map ? kTopBehindQ : 0, 1);
    float* masses = scratch_at<float>(p, shared.plan.masses) +
                    static_cast<int64_t>(blockIdx.x) * shared.plan.target_layout.num_tiles;
    const Walk w{p, shared, masses, q_values};
    if (shared.r.count == 0 || !is_alone) {
        write_outputs(w, 0, -1, 0, top);
        return;
    }
    walk(w);
    const bool is_bad = is_bad_tree(p, shared.r);
    const int64_t token = token_after(w);
    if (threadIdx.x == 0) w.nodes()[shared.depth] = shared.at;
    __syncthreads();
    write_outputs(w, shared.depth, token, shared.at.status | (is_bad ? kBadTree : 0), top);
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t verify_tree_scratch_bytes(const VerifyTreeParams& p) {
    return tree_plan(p).bytes;
}

Status verify_tree(const VerifyTreeParams& p, Stream stream) {
    if (p.batch == 0) return Status{};
    const TreePlan plan = tree_plan(p);
    const int64_t num_tiles = plan.target_layout.num_tiles,
                  draft_tiles = plan.draft_layout.num_tiles;
    const int64_t most_tiles = num_tiles < draft_tiles && plan.has_q ? draft_tiles : num_tiles;
    const int64_t rows = p.num_rows * (plan.has_q ? 2 : 1);
    Status status = check_grid(rows + 1, most_tiles);
    if (!status.ok()) return status;

    cu::LaunchCfg cfg;
    cfg.stream = stream;
    if (p.num_rows > 0) {
        const bool more = p.controls.any_filters || p.logprobs_wanted.count >= 0;
        cfg.block = dim3(kTileThreads);
        cfg.grid = dim3(static_cast<unsigned>(rows + (plan.has_map ? 1 : 0)),
                        static_cast<unsigned>(most_tiles));
        status = has_edits(p) ? cu::launch(cfg, tree_statistics_kernel<true, true>, p)
                 : more       ? cu::launch(cfg, tree_statistics_kernel<false, true>, p)
                              : cu::launch(cfg, tree_statistics_kernel<false, false>, p);
        if (!status.ok()) return status;
    }
    if (p.num_rows > 0 && p.controls.any_filters) {
        cfg.grid = dim3(static_cast<unsigned>(rows));
        cfg.block = dim3(kSelectThreads);
        status = cu::launch(cfg, tree_filter_kernel, p);
        if (!status.ok()) return status;
    }
    cfg.smem = walk_smem(plan.has_map, top_n(p) > 0).bytes;
    cfg.block = dim3(kWalkThreads);
    cfg.grid = dim3(static_cast<unsigned>(p.batch));
    return cu::launch(cfg, tree_walk_kernel, p);
}

}  // namespace specdec::cuda
