// next_round on CUDA: a warp looks for the token that ends the round of its request, then writes the
// draft block behind it.
//   Grid: one warp per request; a lane owns every 32nd token and every 32nd row of the block.
//   Bytes moved: the tokens that may be emitted, a page per block row; B (20 block_len + 9) written for
//   int32 ids. One launch: what it costs is the launch.
//   Determinism: integers, and no thread reads what another one wrote.
#include "kernel.h"

#include "block.cuh"
#include "params.h"

namespace specdec::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

// --- Steps ----------------------------------------------------------------------------------------
// How many of the first `most` tokens are emitted: up to a stop token, and none from a negative id on.
__device__ __forceinline__ int64_t count_emitted(const NextRoundParams& p, int64_t b, int64_t most,
                                                 int lane) {
    int64_t end = most;
    for (int64_t j = lane; j < end; j += kWarpSize) {
        const int64_t token = token_at(p, b, j);
        if (token < 0) {
            end = j;
        } else if (is_stop(p, token)) {
            end = j + 1;
        }
    }
    return warp_min(end);
}

// --- Kernel ---------------------------------------------------------------------------------------
__global__ void next_round_kernel(const __grid_constant__ NextRoundParams p) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t b = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
    if (b >= p.batch) return;
    const bool active = is_active(p, b);
    // 1. Emit.
    const int64_t emitted = count_emitted(p, b, active ? most_emitted(p, b) : 0, lane);
    const int64_t anchor = emitted > 0 ? token_at(p, b, emitted - 1) : -1;
    // 2. The request.
    const int64_t start = p.seq_lens[b] + emitted;
    const bool finished = active && (is_stop(p, anchor) || emitted >= room_of(p, b));
    if (lane == 0) {
        p.new_seq_lens[b] = static_cast<int32_t>(start);
        p.num_emitted[b] = static_cast<int32_t>(emitted);
        p.finished[b] = finished;
    }
    // 3. The block.
    for (int64_t j = lane; j < p.block_len; j += kWarpSize) {
        write_row(p, b, j,
                  active && !finished ? block_row(p, b, j, anchor, start) : padding_row(p));
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
Status next_round(const NextRoundParams& p, Stream stream) {
    constexpr int64_t kMaxBlocks = 0x7fffffff;
    const int64_t blocks = (p.batch + kWarpsPerBlock - 1) / kWarpsPerBlock;
    if (blocks > kMaxBlocks) return Status{1, "more requests than a CUDA grid holds"};
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(blocks));
    cfg.block = dim3(kWarpsPerBlock * kWarpSize);
    cfg.stream = stream;
    return cu::launch(cfg, next_round_kernel, p);
}

}  // namespace specdec::cuda
