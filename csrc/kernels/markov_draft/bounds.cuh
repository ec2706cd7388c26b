// Bounds of bounds.h on CUDA: vectors turned and rounded, a launch that goes over the table, and what its bounds leave
// of a chunk. A block per chunk of 512 columns, 256 threads; a warp has a tile of 16 columns, of which a lane loads
// four by four numbers at a time, for up to four requests. Bytes moved per step: the table and the base logits.
// Vanilla heads and up to 8 requests: each block first resolves the step before by itself, as a scan does, and one
// block more reports it and leaves y for the scan.
#pragma once

#include "block.cuh"
#include "dispatch.h"
#include "settle.cuh"

namespace specdec::cuda {
namespace {

constexpr int kBoundThreads = 256;
constexpr int kBoundWarps = kBoundThreads / kWarpSize;
constexpr int kBoundGroup = 8;    // requests whose codes lie in shared memory
constexpr int kBoundVectors = 4;  // of them that share a load of codes
static_assert(kMarkovChunk == kWarpSize * kMarkovTile, "a chunk's tiles are the bits of a word");

// --- Scratch ----------------------------------------------------------------------------------------
SPECDEC_HD int64_t words_of(const MarkovDraftParams& p) {
    return p.table.width / 4;
}
SPECDEC_HD int64_t markov_bound_bytes(const MarkovDraftParams& p) {
    if (p.table.codes == nullptr) return 0;
    return p.batch * (static_cast<int64_t>(sizeof(TurnedVector)) +
                      4 * (words_of(p) + markov_chunks(p) + markov_tiles(p)));
}
struct BoundScratch {
    TurnedVector* turned;  // [B]
    int32_t* words;        // [B, width / 4]
    float* low;            // [B, chunks] largest lower bounds
    float* high;           // [B, tiles] upper bounds
};
__device__ __forceinline__ BoundScratch bound_scratch_of(const MarkovDraftParams& p) {
    BoundScratch s;
    s.turned = reinterpret_cast<TurnedVector*>(static_cast<unsigned char*>(p.scratch) +
                                               2 * markov_set_bytes(p) + markov_vector_bytes(p));
    s.words = reinterpret_cast<int32_t*>(s.turned + p.batch);
    s.low = reinterpret_cast<float*>(s.words + p.batch * words_of(p));
    s.high = s.low + p.batch * markov_chunks(p);
    return s;
}

// --- Vectors ------------------------------------------------------------------------------------------
// y[0..rank) to its codes, by a whole warp; work holds a turned vector.
template <class At>
__device__ __forceinline__ void turn_vector(const MarkovDraftParams& p, At y, float* work,
                                            int32_t* words, TurnedVector* out) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const MarkovTable& table = p.table;
    float squares = 0.0f, peak = 0.0f, lost = 0.0f;
    for (int64_t i = lane; i < table.width; i += kWarpSize) {
        const float value = i < p.rank ? y(i) : 0.0f;
        squares = squares + value * value;
        work[i] = value * table.turn[i];
    }
    TurnedVector v{0.0f, norm_above(warp_sum(squares)), 0.0f};
    const bool prunable = is_prunable(v);
    __syncwarp();
    for (int64_t at = 0; at < table.width;) {
        const int64_t size = transform_size(table.width - at);
        for (int64_t half = 1; half < size; half *= 2) {
            for (int64_t pair = lane; pair < size / 2; pair += kWarpSize) {
                float* low = work + at + pair / half * 2 * half + pair % half;
                const float a = low[0], b = low[half];
                low[0] = a + b;
                low[half] = a - b;
            }
            __syncwarp();
        }
        at += size;
    }
    for (int64_t i = lane; i < table.width; i += kWarpSize) peak = fmaxf(peak, fabsf(work[i]));
    peak = warp_max(peak);
    v.scale = code_scale(peak);
    const float per_unit = codes_per_unit(peak);
    for (int64_t w = lane; w < words_of(p); w += kWarpSize) {
        unsigned word = 0;
        for (int i = 0; i < 4; ++i) {
            const float x = work[4 * w + i];
            const int code = prunable ? code_of(x, per_unit) : 0;
            const float f = fmaf(-v.scale, static_cast<float>(code), x);
            lost = lost + f * f;
            word |= (static_cast<unsigned>(code) & 0xffu) << (8 * i);
        }
        words[w] = static_cast<int32_t>(word);
    }
    v.lost = lost_above(warp_sum(lost), v.norm);
    const float infinity = bits_float(0x7f800000u);
    if (!prunable) v = TurnedVector{0.0f, infinity, infinity};
    if (lane == 0) *out = v;
    __syncwarp();  // work may be written again
}

// --- Tiles --------------------------------------------------------------------------------------------
// Bounds prune nothing where a request samples: that one needs all of W2. By a whole block.
__device__ __forceinline__ bool some_request_samples(const MarkovDraftParams& p) {
    bool samples = false;
    for (int64_t b = threadIdx.x; b < p.batch; b += blockDim.x) {
        samples = samples || !markov_law(p, b).greedy;
    }
    return __syncthreads_or(samples ? 1 : 0) != 0;
}

// A bit per tile of a chunk. By a whole warp.
__device__ __forceinline__ unsigned tiles_that_can_win(const MarkovDraftParams& p, int64_t b,
                                                       int64_t chunk) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const BoundScratch s = bound_scratch_of(p);
    const int64_t chunks = markov_chunks(p), tiles = markov_tiles(p);
    const float infinity = bits_float(0x7f800000u);
    float limit = -infinity;
    for (int64_t c = lane; c < chunks; c += kWarpSize) limit = fmaxf(limit, s.low[b * chunks + c]);
    limit = warp_max(limit);
    const int64_t tile = chunk * kWarpSize + lane;
    const float high = tile < tiles ? s.high[b * tiles + tile] : -infinity;
    return __ballot_sync(kFullMask, high >= limit && high > -infinity);
}

// Dots of a tile's codes with those of some vectors: lane l < 16 gets column 4 (l % 4) + l / 4 of each. By a whole warp.
__device__ __forceinline__ void dot_tile(const int8_t* codes, int64_t words, const int32_t* vectors,
                                         int count, int (&dots)[kBoundVectors]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int sum[kBoundVectors][4] = {};
    for (int64_t w = lane / 4; w < words; w += kWarpSize / 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(codes + w * 64 + lane % 4 * 16);
#pragma unroll
        for (int i = 0; i < kBoundVectors; ++i) {
            if (i >= count) continue;
            const int other = vectors[i * words + w];
            sum[i][0] = __dp4a(static_cast<int>(four.x), other, sum[i][0]);
            sum[i][1] = __dp4a(static_cast<int>(four.y), other, sum[i][1]);
            sum[i][2] = __dp4a(static_cast<int>(four.z), other, sum[i][2]);
            sum[i][3] = __dp4a(static_cast<int>(four.w), other, sum[i][3]);
        }
    }
    const int own = lane / 4;
#pragma unroll
    for (int i = 0; i < kBoundVectors; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int apart = 4; apart < kWarpSize; apart *= 2) {
                sum[i][n] += warp_exchange(sum[i][n], apart);
            }
        }
        dots[i] = own == 0 ? sum[i][0] : own == 1 ? sum[i][1] : own == 2 ? sum[i][2] : sum[i][3];
    }
}

struct ColumnBounds {
    float low, high;
};
// Of one column, from the three numbers of its row, 16 apart.
__device__ __forceinline__ ColumnBounds column_bounds(const float* row, int dot,
                                                      const TurnedVector& v, float base) {
    const float near = row[0] * v.scale * static_cast<float>(dot);
    const float error =
        fmaf(row[kMarkovTile], v.norm, row[2 * kMarkovTile] * v.lost) + kMarkovUnderflow;
    return ColumnBounds{base + (near - error), base + (near + error)};
}

// Bounds of a tile for one request; returns the largest lower one to every lane. By a whole warp.
__device__ __forceinline__ float bound_tile(const MarkovDraftParams& p, int64_t b, int64_t k,
                                            int64_t tile, int dot, const TurnedVector& v) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int row = 4 * (lane % 4) + lane / 4;
    const int64_t column = tile * kMarkovTile + row;
    const float infinity = bits_float(0x7f800000u);
    ColumnBounds bounds{-infinity, -infinity};
    if (lane < kMarkovTile && column < p.columns && markov_token(p, column) >= 0) {
        const float base = float_at(base_row(p, b, k), p.logits_dtype, column);
        bounds = column_bounds(p.table.rows + tile * 3 * kMarkovTile + row, dot, v, base);
    }
    // An upper bound of NaN leaves its column in; a lower one says nothing.
    if (!(bounds.high < infinity)) bounds.high = infinity;
    const float high = warp_max(bounds.high);
    if (lane == 0) bound_scratch_of(p).high[b * markov_tiles(p) + tile] = high;
    return warp_max(bounds.low == bounds.low ? bounds.low : -infinity);
}

// --- Kernel -------------------------------------------------------------------------------------------
struct BoundArgs {
    MarkovDraftParams p;
    int64_t k;
    bool resolves;
    size_t words_at, work_at;
    int64_t words, work;  // numbers of each
};

// Codes of the vectors of a step without a settle launch, by every block; the last one reports. Returns
// whether this block is done.
__device__ __forceinline__ bool resolve_vectors(const BoundArgs& args, float* work, int32_t* words,
                                                TurnedVector* turned, int* alive) {
    const MarkovDraftParams& p = args.p;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const bool reports = static_cast<int64_t>(blockIdx.x) == markov_chunks(p);
    if (warp >= p.batch) return reports;
    const int64_t token = resolve_before(p, warp, args.k, reports);
    if (reports) {
        const int64_t padded = markov_padded_rank(p);
        float* y = scratch_of(p, args.k).y;
        embed(p, token, y + warp * padded, lane, kWarpSize);
        if (lane == 0) y[p.batch * padded + warp] = token >= 0 ? 1.0f : 0.0f;
        return true;
    }
    if (lane == 0) alive[warp] = token >= 0 ? 1 : 0;
    if (token < 0) {
        for (int64_t w = lane; w < words_of(p); w += kWarpSize) words[warp * words_of(p) + w] = 0;
        return false;
    }
    const void* w1 = row_of(p.w1, token);
    turn_vector(
        p, [&](int64_t i) { return float_at(w1, p.w1.dtype, i); }, work + warp * p.table.width,
        words + warp * words_of(p), turned + warp);
    return false;
}

__global__ void __launch_bounds__(kBoundThreads, 2)
    markov_bound_kernel(const __grid_constant__ BoundArgs args) {
    CU_DYN_SHARED(memory);
    CU_SHARED(turned, TurnedVector[kBoundGroup]);
    CU_SHARED(alive, int[kBoundGroup]);
    CU_SHARED(lows, float[kBoundWarps * kBoundGroup]);
    const MarkovDraftParams& p = args.p;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t chunk = blockIdx.x, words = words_of(p);
    int32_t* shared_words = cu::smem_at<int32_t>(memory, args.words_at, args.words);
    float* work = cu::smem_at<float>(memory, args.work_at, args.work);
    const float infinity = bits_float(0x7f800000u);

    // 1. The step before, and the vectors of this one.
    if (args.resolves && resolve_vectors(args, work, shared_words, turned, alive)) return;
    if (some_request_samples(p)) return;

    const BoundScratch scratch = bound_scratch_of(p);
    for (int64_t first = 0; first < p.batch; first += kBoundGroup) {
        const int requests =
            static_cast<int>(p.batch - first < kBoundGroup ? p.batch - first : kBoundGroup);
        if (!args.resolves) {
            const float* marks = scratch_of(p, args.k).y + p.batch * markov_padded_rank(p) + first;
            for (int64_t i = threadIdx.x; i < requests * words; i += kBoundThreads) {
                const bool here = marks[i / words] > 0.0f;
                shared_words[i] = here ? scratch.words[first * words + i] : 0;
            }
            if (threadIdx.x < requests) {
                alive[threadIdx.x] = marks[threadIdx.x] > 0.0f ? 1 : 0;
                if (alive[threadIdx.x] != 0)
                    turned[threadIdx.x] = scratch.turned[first + threadIdx.x];
            }
        }
        __syncthreads();

        // 2. Bounds of the tiles.
        for (int some = 0; some < requests; some += kBoundVectors) {
            const int count = requests - some < kBoundVectors ? requests - some : kBoundVectors;
            float low[kBoundVectors] = {-infinity, -infinity, -infinity, -infinity};
            for (int i = warp; i < kWarpSize; i += kBoundWarps) {
                const int64_t tile = chunk * kWarpSize + i;
                if (tile >= markov_tiles(p)) break;
                int dots[kBoundVectors];
                dot_tile(p.table.codes + tile * kMarkovTile * p.table.width, words,
                         shared_words + some * words, count, dots);
#pragma unroll
                for (int n = 0; n < kBoundVectors; ++n) {
                    if (n >= count || alive[some + n] == 0) continue;
                    const float least =
                        bound_tile(p, first + some + n, args.k, tile, dots[n], turned[some + n]);
                    low[n] = fmaxf(low[n], least);
                }
            }
#pragma unroll
            for (int n = 0; n < kBoundVectors; ++n) {
                if (lane == 0 && n < count) lows[warp * kBoundGroup + some + n] = low[n];
            }
        }
        __syncthreads();
        if (threadIdx.x < requests && alive[threadIdx.x] != 0) {
            float low = -infinity;
            for (int w = 0; w < kBoundWarps; ++w) {
                low = fmaxf(low, lows[w * kBoundGroup + threadIdx.x]);
            }
            scratch.low[(first + threadIdx.x) * markov_chunks(p) + chunk] = low;
        }
        // No barrier: what the next group overwrites before its own one was read before the last.
    }
}

Status bound(const MarkovDraftParams& p, int64_t k, bool resolves, Stream stream) {
    static_assert(kBoundGroup == kBoundWarps, "a warp resolves a request");
    BoundArgs args{};
    args.p = p;
    args.k = k;
    args.resolves = resolves;
    const int64_t group = p.batch < kBoundGroup ? p.batch : kBoundGroup;
    args.words = group * words_of(p);
    args.work = resolves ? group * p.table.width : 0;
    cu::SmemLayout layout;
    args.words_at = layout.add<int32_t>(static_cast<size_t>(args.words));
    args.work_at = layout.add<float>(static_cast<size_t>(args.work));
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(markov_chunks(p) + (resolves ? 1 : 0)));
    cfg.block = dim3(kBoundThreads);
    cfg.smem = layout.bytes();
    cfg.stream = stream;
    return cu::launch(cfg, markov_bound_kernel, args);
}

}  // namespace
}  // namespace specdec::cuda
