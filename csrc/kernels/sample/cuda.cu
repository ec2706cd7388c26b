// sample on CUDA: token = draw from softmax(logits / T) by inverse CDF with one uniform, or argmax.
//   Launch 1, grid (R, tiles), 256 threads: statistics of one vocabulary tile of one row; a thread
//   owns 16 entries of it, in registers.
//   Launch 2, grid (R), 256 threads: the row's statistics from its tiles, then a tile by its mass,
//   and one more look at that tile for the id.
//   Bytes moved: every logit once, 8 to 16 KB per row again, 16 bytes per tile of statistics.
//   Determinism: fixed trees over absolute tiles; a row's result depends on that row alone.
#include "kernel.h"

#include "params.h"
#include "philox.h"
#include "vocab_draw.cuh"

namespace specdec::cuda {
namespace {

// --- Steps ----------------------------------------------------------------------------------------
__device__ __forceinline__ float temperature_of(const SampleParams& p, int64_t row) {
    return p.temperature == nullptr ? 1.0f : p.temperature[row];
}

__device__ __forceinline__ TileStats* statistics_of(const SampleParams& p, int64_t row,
                                                    int num_tiles) {
    return static_cast<TileStats*>(p.scratch) + row * num_tiles;
}

// --- Kernels --------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    sample_statistics_kernel(const __grid_constant__ SampleParams p) {
    CU_SHARED(plan, StatsPlan);
    const int64_t row = blockIdx.x;
    const int tile = static_cast<int>(blockIdx.y);
    const float temperature = temperature_of(p, row);
    // Greedy rows want the raw sum only, for lse.
    const float scale = is_greedy(temperature) ? kLog2E : exponent_scale(temperature);
    tile_statistics<true>(row_of(p.logits, p.logits_dtype, row), p.vocab_size, tile, scale, plan,
                          statistics_of(p, row, gridDim.y) + tile);
}

__global__ void __launch_bounds__(kTileThreads)
    sample_draw_kernel(const __grid_constant__ SampleParams p, int num_tiles) {
    CU_SHARED(strips, float[kStrips]);
    const int64_t row = blockIdx.x;
    const Row logits = row_of(p.logits, p.logits_dtype, row);
    const TileStats* tiles = statistics_of(p, row, num_tiles);
    const RowPeak peak = row_peak(tiles, num_tiles);
    const float temperature = temperature_of(p, row);

    int64_t token = peak.argmax;
    if (peak.usable && !is_greedy(temperature)) {
        const float scale = exponent_scale(temperature);
        const float u = uniform_at(p.seeds[row], p.positions[row], 0, Purpose::kSample);
        const Bucket tile = pick_tile(tiles, num_tiles, peak.max, scale, u);
        const EntryMass weight =
            softmax_in_tile(logits, p.vocab_size, load_stats(tiles + tile.index), scale);
        token = draw_in_tile(weight, tile.index, tile.fraction, strips);
    }
    if (threadIdx.x >= kWarpSize) return;

    float logprob = 0.0f;
    float lse = 0.0f;
    if (peak.usable) {
        const float sum = row_sum<&TileStats::raw_sum>(tiles, num_tiles, peak.max, kLog2E);
        const float log_sum = logf(sum);
        logprob = (entry_of(logits, token) - peak.max) - log_sum;
        lse = peak.max + log_sum;
    }
    if (threadIdx.x == 0) {
        p.tokens[row] = token;
        p.logprob[row] = logprob;
        p.lse[row] = lse;
        p.status[row] = peak.usable ? 0 : kTargetNan;
    }
}

}  // namespace

int64_t sample_scratch_bytes(int64_t num_rows, int64_t vocab_size) {
    return num_rows * num_vocab_tiles(vocab_size) * static_cast<int64_t>(sizeof(TileStats));
}

Status sample(const SampleParams& p, Stream stream) {
    const int64_t rows = p.logits.size[0];
    const int64_t num_tiles = num_vocab_tiles(p.vocab_size);
    if (rows == 0) return Status{};
    Status status = check_grid(rows, num_tiles);
    if (!status.ok()) return status;

    cu::LaunchCfg cfg;
    cfg.block = dim3(kTileThreads);
    cfg.stream = stream;
    cfg.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(num_tiles));
    status = cu::launch(cfg, sample_statistics_kernel, p);
    if (!status.ok()) return status;
    cfg.grid = dim3(static_cast<unsigned>(rows));
    return cu::launch(cfg, sample_draw_kernel, p, static_cast<int>(num_tiles));
}

}  // namespace specdec::cuda
