// sample on CUDA: token = draw from the row's law under its controls by inverse CDF with one uniform,
// or the argmax of its processed logits.
//   Launch 1, grid (R, tiles), 256 threads: statistics of one vocabulary tile of one row; a thread
//   owns 16 entries of it, in registers, and edits them there.
//   Launch 2, only with filters or top ids, grid (R), 512 threads: the prefix that the row's filters
//   keep, and its most probable ids; a warp owns a group of 256 entries.
//   Last launch, grid (R), 256 threads: the row's statistics from its tiles, then a tile by its mass,
//   and one more look at that tile for the id.
//   Bytes moved: every logit once, 8 to 16 KB per row again, 16 bytes per tile of statistics; with
//   filters 32 bytes per tile more and the groups that can be kept.
//   Determinism: fixed trees over absolute tiles, integer sums elsewhere; a row's result depends on
//   that row alone.
#include "kernel.h"

#include "params.h"
#include "philox.h"
#include "row_top.cuh"
#include "vocab_draw.cuh"

namespace specdec::cuda {
namespace {

// --- Steps ----------------------------------------------------------------------------------------
SPECDEC_HD bool wants_processed(const SampleParams& p) {
    return p.logprobs_wanted.processed;
}

SPECDEC_HD int top_n(const SampleParams& p) {
    return p.logprobs_wanted.count > 0 ? p.logprobs_wanted.count : 0;
}

SPECDEC_HD RowLayout layout_of(const SampleParams& p) {
    RowNeeds needs;
    needs.edited = p.controls.any_edits;
    needs.filtered = p.controls.any_filters;
    needs.raw = true;
    needs.entropy = false;
    needs.top = top_n(p) > 0;
    needs.raw_top = !wants_processed(p);
    return row_layout(p.vocab_size, needs);
}

__device__ __forceinline__ VocabRow logits_of(const SampleParams& p, int64_t row) {
    VocabRow r;
    r.row = row_of(p.logits, p.logits_dtype, row);
    r.columns = p.vocab_size;
    r.edits = edits_of(p.controls, row, row, DraftsBefore{}, IdMap{}, p.vocab_size);
    return r;
}

// --- Kernels --------------------------------------------------------------------------------------
template <bool kEdits, bool kMore>
__global__ void __launch_bounds__(kTileThreads, kEdits  ? 2
                                                : kMore ? 4
                                                        : kTileBlocksPerSm)
    sample_statistics_kernel(const __grid_constant__ SampleParams p) {
    CU_SHARED(plan, StatsPlan);
    CU_SHARED(more, MoreStatsPlan);
    const int64_t row = blockIdx.x;
    const int tile = static_cast<int>(blockIdx.y);
    const float temperature = temperature_of(p.controls, row);
    // Greedy rows want the sum at temperature 1, for lse.
    const float scale = is_greedy(temperature) ? kLog2E : exponent_scale(temperature);
    const StatsWanted wanted{scale, true, false, kMore && layout_of(p).groups};
    VocabRow logits;
    if constexpr (kEdits) {
        logits = logits_of(p, row);
    } else {
        logits.row = row_of(p.logits, p.logits_dtype, row);
        logits.columns = p.vocab_size;
    }
    tile_statistics<true, kEdits, kMore>(logits, tile, wanted, plan, &more,
                                         layout_of(p).at(p.scratch, row));
}

__global__ void __launch_bounds__(kSelectThreads, 1)
    sample_filter_kernel(const __grid_constant__ SampleParams p) {
    CU_SHARED(plan, SelectPlan);
    CU_SHARED(shared_job, Uniform<FilterJob>);
    const int64_t row = blockIdx.x;
    const LawPlan law = law_plan(p.controls, row, p.vocab_size, wants_processed(p));
    const int n = top_n(p);
    if (!law.filtered && n == 0) return;
    const RowScratch scratch = layout_of(p).at(p.scratch, row);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    const FilterJob& job =
        shared_job.set(FilterJob{{logits_of(p, row), scratch.z_maxima(), peak.max, law.scale},
                                 scratch,
                                 law.filters,
                                 p.vocab_size,
                                 false});
    filter_and_report(job, peak, law.filtered, n, wants_processed(p), plan,
                      [&](int i, int64_t id, float logprob) {
                          p.top_ids[row * n + i] = id;
                          p.top_logprobs[row * n + i] = logprob;
                      });
}

__global__ void __launch_bounds__(kTileThreads, 2)
    sample_draw_kernel(const __grid_constant__ SampleParams p) {
    CU_SHARED(strips, float[kStrips]);
    CU_SHARED(fallback, FallbackPlan);
    CU_SHARED(shared_row, Uniform<VocabRow>);
    CU_SHARED(shared_pick, Uniform<Pick>);
    const int64_t row = blockIdx.x;
    const VocabRow& logits = shared_row.set(logits_of(p, row));
    const RowScratch scratch = layout_of(p).at(p.scratch, row);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    const LawPlan plan = law_plan(p.controls, row, p.vocab_size, wants_processed(p));
    RowLaw law{};
    if (peak.usable()) law = law_of(scratch, peak.max, plan.scale, plan.filtered);

    int64_t token = peak.argmax;
    if (!peak.usable()) {
        if (p.controls.any_edits) token = fallback_token(logits, peak.status(), fallback);
    } else if (!plan.greedy) {
        const float u = uniform_at(p.seeds[row], p.positions[row], 0, Purpose::kSample);
        pick_from_law(logits, scratch, law, plan.filtered, u, shared_pick);
        token = draw(shared_pick.get(), strips);
    }
    if (threadIdx.x >= kWarpSize) return;

    float logprob = 0.0f;
    float lse = 0.0f;
    if (peak.raw_usable()) {
        const RawLse raw = raw_lse(scratch, peak.max);
        lse = raw.max + raw.log_sum;
        logprob = (entry_of(logits.row, token) - raw.max) - raw.log_sum;
    }
    if (wants_processed(p)) {
        logprob = peak.usable() ? log_of(law, logits.at(token), token) : 0.0f;
    }
    if (threadIdx.x == 0) {
        p.tokens[row] = token;
        p.logprob[row] = logprob;
        p.lse[row] = lse;
        p.status[row] = peak.status();
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t sample_scratch_bytes(const SampleParams& p) {
    return p.logits.size[0] * layout_of(p).bytes();
}

Status sample(const SampleParams& p, Stream stream) {
    const int64_t rows = p.logits.size[0];
    const int64_t num_tiles = num_vocab_tiles(p.vocab_size);
    if (rows == 0) return Status{};
    Status status = check_grid(rows, num_tiles);
    if (!status.ok()) return status;

    const bool selects = p.controls.any_filters || top_n(p) > 0;
    cu::LaunchCfg cfg;
    cfg.block = dim3(kTileThreads);
    cfg.stream = stream;
    cfg.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(num_tiles));
    status = p.controls.any_edits ? cu::launch(cfg, sample_statistics_kernel<true, true>, p)
             : selects            ? cu::launch(cfg, sample_statistics_kernel<false, true>, p)
                                  : cu::launch(cfg, sample_statistics_kernel<false, false>, p);
    if (!status.ok()) return status;

    cfg.grid = dim3(static_cast<unsigned>(rows));
    if (selects) {
        cfg.block = dim3(kSelectThreads);
        status = cu::launch(cfg, sample_filter_kernel, p);
        if (!status.ok()) return status;
    }
    cfg.block = dim3(kTileThreads);
    return cu::launch(cfg, sample_draw_kernel, p);
}

}  // namespace specdec::cuda
