// markov_draft on CUDA: one pass over W2 per draft.
//   Scan launch of a step, a block per chunk of 512 columns, 256 threads: four threads per row of W2 hold it in
//   registers and go through the requests of the batch; then a warp per request takes the chunk's
//   statistics. Vanilla heads and up to 8 requests: each block first resolves the step before by itself (a warp
//   per request), so that a step is one launch, and one block more reports it.
//   With a table and greedy requests alone, a bound launch goes before the scan, and the scan computes the tiles of
//   columns that can win (bounds.cuh).
//   Settle launch, a block per request: the last tokens; before every scan with other heads or more
//   requests, where it computes y too.
//   Bytes moved per step: W2 and the base logits once from memory (a chunk of W2 again from L2 for every 32
//   requests), 4 bytes per column and request written, 8 bytes per chunk.
//   Determinism: params.h defines every sum; neither grid nor batch enters.
#include "kernel.h"

#include <type_traits>

#include "bounds.cuh"
#include "dispatch.h"
#include "products.cuh"
#include "settle.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRowsPerWarp = 8;    // of W2 at a time: four threads each
constexpr int kHeldSteps = 8;      // of aligned bf16 rows that stay in registers: a rank of 256
constexpr int kGroup = 32;         // requests whose logits lie in shared memory
constexpr int kResolved = kWarps;  // requests that every block resolves by itself

// --- Shared memory --------------------------------------------------------------------------------
// Logits of a group of requests [group, kMarkovChunk], then y of the requests that the block resolves.
struct ScanPlan {
    size_t z_at, y_at, bytes;
    int group;
    int64_t y_floats;
};

ScanPlan scan_plan(const MarkovDraftParams& p, bool resolves) {
    ScanPlan plan;
    plan.group = static_cast<int>(p.batch < kGroup ? p.batch : kGroup);
    plan.y_floats = resolves ? plan.group * markov_padded_rank(p) : 0;
    cu::SmemLayout layout;
    plan.z_at = layout.add<float>(static_cast<size_t>(plan.group * kMarkovChunk));
    plan.y_at = layout.add<float>(static_cast<size_t>(plan.y_floats));
    plan.bytes = layout.bytes();
    return plan;
}

struct ScanArgs {
    MarkovDraftParams p;
    ScanPlan plan;
    int64_t k;
    bool resolves;  // the step before, in the prologue
    bool prunes;    // there are bounds of this step, unless a request samples
    bool aligned;   // rows of W2 are whole steps from multiples of 16 bytes
};

// --- Products -------------------------------------------------------------------------------------
// z[request, column of the chunk] = W2[column] . y[request], for the requests of a group and the tiles of the chunk that
// they need, a bit each.
template <class T, bool kHeld>
__device__ __forceinline__ void dot_chunk(const ScanArgs& args, int64_t chunk, const float* y,
                                          int requests, const unsigned* needed, float* z) {
    const MarkovDraftParams& p = args.p;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int quarter = lane % 4;
    const int64_t padded = markov_padded_rank(p);
    const int64_t steps = padded / kStepSize;
    const int64_t begin = chunk * kMarkovChunk;
    const int64_t n = p.columns - begin < kMarkovChunk ? p.columns - begin : kMarkovChunk;
    unsigned some = args.prunes ? 0u : ~0u;
    for (int b = 0; args.prunes && b < requests; ++b) some |= needed[b];
#pragma unroll 1
    for (int64_t first = warp * kRowsPerWarp; first < n; first += kWarps * kRowsPerWarp) {
        const unsigned tile = 1u << (first / kMarkovTile);
        if ((some & tile) == 0) continue;
        const int64_t column = first + lane / 4;
        const int64_t row = begin + (column < n ? column : n - 1);
        const T* w2 = static_cast<const T*>(row_of(p.w2, row));
        StepWeights<T> held[kHeld ? kHeldSteps : 1];
        if constexpr (kHeld) {
#pragma unroll
            for (int s = 0; s < kHeldSteps; ++s) {
                if (s < steps) held[s] = load_step<T>(w2, s, p.rank, quarter, true);
            }
        }
#pragma unroll 1
        for (int b = 0; b < requests; ++b) {
            if (args.prunes && (needed[b] & tile) == 0) continue;
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if constexpr (kHeld) {
#pragma unroll
                for (int s = 0; s < kHeldSteps; ++s) {
                    if (s < steps) add_step(held[s], y + b * padded, s, quarter, sum);
                }
            } else {
#pragma unroll 2
                for (int64_t s = 0; s < steps; ++s) {
                    const StepWeights<T> w = load_step<T>(w2, s, p.rank, quarter, args.aligned);
                    add_step(w, y + b * padded, s, quarter, sum);
                }
            }
            const float dot = fold_sums(sum);
            if (quarter == 0 && column < n) z[b * kMarkovChunk + column] = dot;
        }
    }
}

// --- Statistics -----------------------------------------------------------------------------------
// Logits of a chunk of one request, and what later steps need of them; tiles that are not needed are as good as -inf.
// By a whole warp.
__device__ __forceinline__ void finish_chunk(const ScanArgs& args, int64_t b, int64_t chunk,
                                             const float* dots, unsigned needed) {
    constexpr int kPerLane = static_cast<int>(kMarkovChunk) / kWarpSize;
    const MarkovDraftParams& p = args.p;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t begin = chunk * kMarkovChunk;
    const int64_t left = p.columns - begin - lane;
    const float infinity = bits_float(0x7f800000u);
    if (needed == 0) {
        if (lane == 0) {
            scratch_of(p, args.k).stats[b * markov_chunks(p) + chunk] = ChunkStats{-infinity, 0.0f};
        }
        return;
    }
    const auto here = [&](int i) {
        return i * kWarpSize < left && (needed >> (i * kWarpSize + lane) / kMarkovTile & 1u) != 0;
    };
    float z[kPerLane];
    with_floats(base_row(p, b, args.k), p.logits_dtype, [&](const auto* base) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            z[i] = here(i)
                       ? dots[i * kWarpSize + lane] + to_float(base[begin + i * kWarpSize + lane])
                       : -infinity;
        }
    });
    if (p.d2t != nullptr) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int64_t column = begin + i * kWarpSize + lane;
            if (i * kWarpSize < left && markov_token(p, column) < 0) z[i] = -infinity;
        }
    }
    float* out = z_row(p, b, args.k) + begin + lane;
    float most = -infinity;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        if (i * kWarpSize < left) out[i * kWarpSize] = z[i];
        bad = bad || is_bad_logit(z[i]);
        most = fmaxf(most, z[i]);
    }
    most = __any_sync(kFullMask, bad) != 0 ? infinity : warp_max(most);
    float sum = 0.0f;
    const MarkovLaw law = markov_law(p, b);
    if (most < infinity && most > -infinity && needs_sum(p, law)) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sum = sum + exp2_of((z[i] - most) * law.scale);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        scratch_of(p, args.k).stats[b * markov_chunks(p) + chunk] = ChunkStats{most, sum};
    }
}

// A request that has ended: no law, and what comes after it has ended too.
__device__ __forceinline__ void end_chunk(const ScanArgs& args, int64_t b, int64_t chunk) {
    const MarkovDraftParams& p = args.p;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const float infinity = bits_float(0x7f800000u);
    const int64_t begin = chunk * kMarkovChunk;
    if (lane == 0) {
        scratch_of(p, args.k).stats[b * markov_chunks(p) + chunk] = ChunkStats{infinity, 0.0f};
    }
    if (p.logits == nullptr) return;
    float* out = logits_row(p, b, args.k);
    const int64_t end = begin + kMarkovChunk < p.columns ? begin + kMarkovChunk : p.columns;
    for (int64_t i = begin + lane; i < end; i += kWarpSize) out[i] = -infinity;
}

// --- Kernels --------------------------------------------------------------------------------------
template <class T, bool kHeld>
__global__ void __launch_bounds__(kThreads, 2)
    markov_scan_kernel(const __grid_constant__ ScanArgs args) {
    CU_DYN_SHARED(memory);
    CU_SHARED(alive, int[kGroup]);
    CU_SHARED(needed, unsigned[kGroup]);
    const MarkovDraftParams& p = args.p;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t chunk = blockIdx.x, chunks = markov_chunks(p);
    const int64_t padded = markov_padded_rank(p);
    const int64_t group = args.plan.group;
    float* z = cu::smem_at<float>(memory, args.plan.z_at, group * kMarkovChunk);
    float* shared_y = cu::smem_at<float>(memory, args.plan.y_at, args.plan.y_floats);

    // 1. The step before, by every block; the last one reports it.
    if (args.resolves) {
        if (warp < p.batch) {
            const bool reports = chunk == chunks;
            const int64_t token = resolve_before(p, warp, args.k, reports);
            if (!reports) {
                embed(p, token, shared_y + warp * padded, lane, kWarpSize);
                if (lane == 0) alive[warp] = token >= 0 ? 1 : 0;
            }
        }
        if (chunk == chunks) {
            for (int64_t b = 0; b < p.batch; ++b) fill_tail(p, b, args.k);
            return;
        }
    }

    const bool bounded = args.prunes && !some_request_samples(p);
    for (int64_t first = 0; first < p.batch; first += group) {
        const int requests = static_cast<int>(p.batch - first < group ? p.batch - first : group);
        const float* y = args.resolves ? shared_y : scratch_of(p, args.k).y + first * padded;
        if (!args.resolves && threadIdx.x < requests) {
            // settle leaves a token of -1 in the step before, or an anchor outside.
            const int64_t b = first + threadIdx.x;
            alive[threadIdx.x] = scratch_of(p, args.k).y[p.batch * padded + b] > 0.0f ? 1 : 0;
        }
        __syncthreads();
        if (args.prunes) {
            for (int b = warp; b < requests; b += kWarps) {
                unsigned tiles = alive[b] != 0 ? ~0u : 0u;
                if (bounded && tiles != 0) tiles = tiles_that_can_win(p, first + b, chunk);
                if (lane == 0) needed[b] = tiles;
            }
            __syncthreads();
        }

        // 2. Products, with every row of W2 once per group.
        dot_chunk<T, kHeld>(args, chunk, y, requests, needed, z);
        __syncthreads();

        // 3. Logits and statistics.
        for (int b = warp; b < requests; b += kWarps) {
            if (alive[b] != 0) {
                const unsigned tiles = args.prunes ? needed[b] : ~0u;
                finish_chunk(args, first + b, chunk, z + b * kMarkovChunk, tiles);
            } else {
                end_chunk(args, first + b, chunk);
            }
        }
        __syncthreads();  // the next group overwrites z, alive and needed
    }
}

__global__ void __launch_bounds__(kThreads, 2)
    markov_settle_kernel(const __grid_constant__ MarkovDraftParams p, int64_t k) {
    CU_SHARED(token, int64_t[1]);
    CU_SHARED(work, float[kMarkovTableWidth]);
    const int64_t b = blockIdx.x;
    if (threadIdx.x < kWarpSize) {
        const int64_t before = resolve_before(p, b, k, true);
        if (threadIdx.x == 0) token[0] = before;
    }
    __syncthreads();
    if (k >= p.steps) return;
    fill_tail(p, b, k);
    const int64_t padded = markov_padded_rank(p);
    float* y = scratch_of(p, k).y;
    if (threadIdx.x == 0) y[p.batch * padded + b] = token[0] >= 0 ? 1.0f : 0.0f;
    y += b * padded;
    if (token[0] < 0 || p.head == MarkovHead::kVanilla) {
        embed(p, token[0], y, static_cast<int>(threadIdx.x), kThreads);
    } else {
        head_output(p, b, k, token[0], y);
    }
    if (p.table.codes == nullptr || token[0] < 0) return;
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
        const BoundScratch s = bound_scratch_of(p);
        turn_vector(
            p, [&](int64_t i) { return y[y_place(p, i)]; }, work, s.words + b * words_of(p),
            s.turned + b);
    }
}

// --- Launch ---------------------------------------------------------------------------------------
Status settle(const MarkovDraftParams& p, int64_t k, Stream stream) {
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.batch));
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, markov_settle_kernel, p, k);
}

Status scan(const ScanArgs& args, Stream stream) {
    const MarkovDraftParams& p = args.p;
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(markov_chunks(p) + (args.resolves ? 1 : 0)));
    cfg.block = dim3(kThreads);
    cfg.smem = args.plan.bytes;
    cfg.stream = stream;
    Status status;
    dispatch_float(p.w2.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if constexpr (std::is_same_v<T, bf16>) {
            if (args.aligned && p.rank <= kHeldSteps * kStepSize) {
                status = cu::launch(cfg, markov_scan_kernel<T, true>, args);
                return;
            }
        }
        status = cu::launch(cfg, markov_scan_kernel<T, false>, args);
    });
    return status;
}

}  // namespace

int64_t markov_draft_scratch_bytes(const MarkovDraftParams& p) {
    return 2 * markov_set_bytes(p) + markov_vector_bytes(p) + markov_bound_bytes(p);
}

Status markov_draft(const MarkovDraftParams& call, Stream stream) {
    constexpr int64_t kMaxBlocks = 0x7fffffff;
    if (call.batch > kMaxBlocks) return Status{1, "more requests than a CUDA grid holds"};
    MarkovDraftParams p = call;
    // Codes are loaded by 16 bytes.
    if (reinterpret_cast<uintptr_t>(p.table.codes) % 16 != 0) p.table.codes = nullptr;
    const int64_t row_bytes = p.w2.stride * dtype_size(p.w2.dtype);
    ScanArgs args;
    args.p = p;
    const bool resolves = !p.follows && p.head == MarkovHead::kVanilla && p.batch <= kResolved &&
                          p.columns > 0 && markov_padded_rank(p) <= kHeldSteps * kStepSize;
    args.prunes = p.table.codes != nullptr;
    args.resolves = resolves && !args.prunes;
    args.plan = scan_plan(p, args.resolves);
    args.aligned = p.rank % kStepSize == 0 && row_bytes % 16 == 0 &&
                   reinterpret_cast<uintptr_t>(p.w2.data) % 16 == 0;
    for (args.k = 0; args.k < p.steps; ++args.k) {
        if (!resolves) {
            const Status status = settle(p, args.k, stream);
            if (!status.ok()) return status;
        }
        if (p.columns == 0) continue;
        if (args.prunes) {
            const Status status = bound(p, args.k, resolves, stream);
            if (!status.ok()) return status;
        }
        const Status status = scan(args, stream);
        if (!status.ok()) return status;
    }
    return p.follows ? Status{} : settle(p, p.steps, stream);
}

}  // namespace specdec::cuda
