// row_linear on CUDA: y[r, n] = sum_k x[r, k] w[n, k] (+ bias[n]), float32 sums, rounded once.
//   Grid: x = kOutputs outputs, y = a tile of 8, 16, 32 or 64 rows; one tile holds up to 64 rows.
//   Block: kWarps warps side by side along k. k is cut into chunks of 128 bytes; warp w owns chunks
//   w, w + kWarps, .. and streams their weights and rows of x through its own ring by cp.async, so it
//   waits for no other warp before the end. bf16 and fp16: mma.m16n8k16 with the weights as rows of
//   the product; float32: lane n owns output n for every row, by fma.
//   Bytes moved: every weight once per row tile, x once per block, y once.
//   Determinism: a sum is one chain per warp over its chunks in ascending order (float32: over k in
//   ascending order), and the warps' sums are added in order. Rows of a tile do not see each other, so
//   neither the tile, the grid nor the number of rows changes a bit.
#include "kernel.h"

#include "block.cuh"
#include "dispatch.h"
#include "params.h"

namespace specdec::cuda {
namespace {

// --- Traits --------------------------------------------------------------------------------------
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kOutputs = 32;
constexpr int kChunkBytes = 128;  // of k in one row: whole sectors, and all banks once
constexpr int kPieces = kChunkBytes / 16;
constexpr int kRingBytes = 96 * 1024;  // below the 99 KB that sm_120 gives a block
constexpr int kBlocksPerSm = 2;        // that two rings leave room for on sm_90

template <class Element, int kRows_>
struct LinearTraits {
    using T = Element;
    static constexpr int kRows = kRows_;
    static constexpr int kChunk = kChunkBytes / sizeof(T);
    static constexpr int kPieceSize = 16 / sizeof(T);
    static constexpr int kStageSize = (kOutputs + kRows) * kChunk;  // weights, then rows of x
    static constexpr int kFit = kRingBytes / (kWarps * kStageSize * static_cast<int>(sizeof(T)));
    static constexpr int kStages = kFit < 4 ? kFit : 4;
    static_assert(kStages >= 2, "one chunk in use, one in flight");
    // Rows of the exchange of sums lie this many words apart: fragments then hit all banks.
    static constexpr int kExchangeStride = kOutputs + 4;
    static_assert(kRows * kExchangeStride * sizeof(float) <= kStages * kStageSize * sizeof(T),
                  "the sums of a warp take the place of its ring");
};

struct LinearArgs {
    RowLinearParams p;
    bool aligned;  // rows of all parts of x and of weight start and end at multiples of 16 bytes
};

// --- Shared memory -------------------------------------------------------------------------------
template <class Tr>
constexpr size_t ring_bytes() {
    cu::SmemLayout layout;
    layout.add<typename Tr::T>(kWarps * Tr::kStages * Tr::kStageSize);
    return layout.bytes();
}

template <class T>
struct alignas(16) Piece {  // what one lane copies: 16 bytes of a row
    T x[16 / sizeof(T)];
};

// Element offset of a piece in a matrix of 128-byte rows. Eight rows at one piece, and eight pieces of
// one row, both lie in different banks.
template <class T>
__device__ __forceinline__ int swizzled(int row, int piece) {
    return (row * kPieces + (piece ^ (row & 7))) * static_cast<int>(16 / sizeof(T));
}

// --- Load ----------------------------------------------------------------------------------------

// The weights, as RowParts has the rows of x.
struct Whole {
    const View<const void, 2>& view;

    template <class T>
    __device__ __forceinline__ Column<T> column(int64_t k) const {
        return {static_cast<const T*>(view.data) + k, view.stride[0], view.size[1] - k};
    }
};

// Rows first .. first + kCount - 1 of `rows` at one chunk; zeros behind the matrix and behind the end of k.
// Eight lanes take the 128 bytes of a row.
template <class Tr, int kCount, class Source>
__device__ __forceinline__ void copy_rows(typename Tr::T* target, const Source& source,
                                          int64_t rows, int64_t size, int64_t first, int64_t chunk,
                                          bool aligned, int lane) {
    using T = typename Tr::T;
    const int piece = lane % 8;
    const int64_t k = chunk * Tr::kChunk + piece * Tr::kPieceSize;
    const bool inside = k < size;
    const Column<T> column = source.template column<T>(inside ? k : 0);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const int row = i * 4 + lane / 8;
        const bool valid = inside && first + row < rows;
        T* to = target + swizzled<T>(row, piece);
        if (aligned) {
            ptx::cp_async16_zfill(to, valid ? column.row(first + row) : column.data, valid);
            continue;
        }
        Piece<T> elements;
#pragma unroll
        for (int e = 0; e < Tr::kPieceSize; ++e) {
            elements.x[e] = valid && k + e < size
                                ? *source.template column<T>(k + e).row(first + row)
                                : from_float<T>(0.0f);
        }
        *reinterpret_cast<Piece<T>*>(to) = elements;
    }
}

// One group per chunk, empty behind the last one: waits count groups.
template <class Tr>
__device__ __forceinline__ void copy_chunk(typename Tr::T* stage, const LinearArgs& args,
                                           int64_t output, int64_t row, int64_t chunk, int64_t end,
                                           int lane) {
    if (chunk < end) {
        const RowLinearParams& p = args.p;
        copy_rows<Tr, kOutputs>(stage, Whole{p.weight}, p.weight.size[0], p.x.size, output, chunk,
                                args.aligned, lane);
        copy_rows<Tr, Tr::kRows>(stage + kOutputs * Tr::kChunk, p.x, p.x.rows, p.x.size, row, chunk,
                                 args.aligned, lane);
    }
    ptx::cp_async_commit();
}

// --- Sums ----------------------------------------------------------------------------------------

// Tensor cores: a thread owns outputs lane/4 + {0, 8} of every 16, rows 2 (lane%4) + {0, 1} of every 8.
template <class Tr>
struct Sums {
    using T = typename Tr::T;
    static constexpr int kOutputBlocks = kOutputs / 16, kRowBlocks = Tr::kRows / 8;
    float d[kOutputBlocks][kRowBlocks][4] = {};

    __device__ __forceinline__ void add_chunk(const T* weights, const T* x, int lane) {
#pragma unroll
        for (int step = 0; step < Tr::kChunk / 16; ++step) {
            uint32_t a[kOutputBlocks][4];
#pragma unroll
            for (int o = 0; o < kOutputBlocks; ++o) {
                ptx::ldmatrix_x4(a[o],
                                 weights + swizzled<T>(o * 16 + lane % 16, step * 2 + lane / 16));
            }
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
                uint32_t b[2];
                ptx::ldmatrix_x2(b, x + swizzled<T>(r * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
                for (int o = 0; o < kOutputBlocks; ++o) {
                    ptx::mma_m16n8k16<T>(d[o][r], a[o], b, d[o][r]);
                }
            }
        }
    }
    __device__ __forceinline__ void publish(float* exchange, int lane) const {
#pragma unroll
        for (int o = 0; o < kOutputBlocks; ++o) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = r * 8 + lane % 4 * 2 + i % 2;
                    const int output = o * 16 + lane / 4 + i / 2 * 8;
                    exchange[row * Tr::kExchangeStride + output] = d[o][r][i];
                }
            }
        }
    }
};

// float32: lane n owns output n of the block, for every row.
template <int kRows_>
struct Sums<LinearTraits<float, kRows_>> {
    using Tr = LinearTraits<float, kRows_>;
    static_assert(kOutputs == 32, "one output per lane");
    float d[kRows_] = {};

    __device__ __forceinline__ void add_chunk(const float* weights, const float* x, int lane) {
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece) {
            const float4 w =
                *reinterpret_cast<const float4*>(weights + swizzled<float>(lane, piece));
#pragma unroll
            for (int r = 0; r < kRows_; ++r) {
                const float4 v = *reinterpret_cast<const float4*>(x + swizzled<float>(r, piece));
                d[r] = fmaf(v.x, w.x, d[r]);
                d[r] = fmaf(v.y, w.y, d[r]);
                d[r] = fmaf(v.z, w.z, d[r]);
                d[r] = fmaf(v.w, w.w, d[r]);
            }
        }
    }
    __device__ __forceinline__ void publish(float* exchange, int lane) const {
#pragma unroll
        for (int r = 0; r < kRows_; ++r) exchange[r * Tr::kExchangeStride + lane] = d[r];
    }
};

// --- Kernel --------------------------------------------------------------------------------------
template <class Tr>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    row_linear_kernel(const __grid_constant__ LinearArgs args) {
    using T = typename Tr::T;
    CU_DYN_SHARED(memory);
    constexpr int kRing = Tr::kStages * Tr::kStageSize;
    T* rings = cu::smem_at<T>(memory, 0, kWarps * kRing);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    T* ring = rings + warp * kRing;
    const int64_t output = static_cast<int64_t>(blockIdx.x) * kOutputs;
    const int64_t row = static_cast<int64_t>(blockIdx.y) * Tr::kRows;
    const int64_t chunks = (args.p.x.size + Tr::kChunk - 1) / Tr::kChunk;

    // 1. This warp's chunks through its ring.
    Sums<Tr> sums;
#pragma unroll
    for (int s = 0; s < Tr::kStages - 1; ++s) {
        copy_chunk<Tr>(ring + s * Tr::kStageSize, args, output, row, warp + s * kWarps, chunks,
                       lane);
    }
    int stage = 0;
    for (int64_t chunk = warp; chunk < chunks; chunk += kWarps) {
        ptx::cp_async_wait<Tr::kStages - 2>();
        __syncwarp();  // every lane's part of the chunk is here, and nobody reads the oldest stage
        const int oldest = stage == 0 ? Tr::kStages - 1 : stage - 1;
        copy_chunk<Tr>(ring + oldest * Tr::kStageSize, args, output, row,
                       chunk + (Tr::kStages - 1) * kWarps, chunks, lane);
        const T* weights = ring + stage * Tr::kStageSize;
        sums.add_chunk(weights, weights + kOutputs * Tr::kChunk, lane);
        stage = stage + 1 == Tr::kStages ? 0 : stage + 1;
    }

    // 2. The warps' sums, in the place of their rings, in the order of the warps.
    ptx::cp_async_wait<0>();
    __syncwarp();
    sums.publish(reinterpret_cast<float*>(ring), lane);
    __syncthreads();
    const T* bias = static_cast<const T*>(args.p.bias);
    const int64_t n = output + lane;
    if (n >= args.p.weight.size[0]) return;
    for (int r = warp; r < Tr::kRows && row + r < args.p.x.rows; r += kWarps) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float* part = reinterpret_cast<const float*>(rings + w * kRing);
            sum += part[r * Tr::kExchangeStride + lane];
        }
        if (bias != nullptr) sum += to_float(bias[n]);
        store_sum<T>(args.p, row + r, n, sum);
    }
}

// --- Launch --------------------------------------------------------------------------------------

template <class Tr>
Status launch(const LinearArgs& args, Stream stream) {
    cu::LaunchCfg cfg;
    const int64_t rows = args.p.x.rows, outputs = args.p.weight.size[0];
    cfg.grid = dim3(static_cast<unsigned>((outputs + kOutputs - 1) / kOutputs),
                    static_cast<unsigned>((rows + Tr::kRows - 1) / Tr::kRows));
    cfg.block = dim3(kThreads);
    cfg.smem = ring_bytes<Tr>();
    cfg.stream = stream;
    return cu::launch(cfg, row_linear_kernel<Tr>, args);
}

bool rows_aligned(const View<const void, 2>& view, int64_t element_size) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
           view.stride[0] * element_size % 16 == 0 && view.size[1] * element_size % 16 == 0;
}

// The smallest tile that holds the rows, or the largest one, several times.
int row_tile(int64_t rows) {
    return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
}

}  // namespace

Status row_linear(const RowLinearParams& p, Stream stream) {
    LinearArgs args;
    args.p = p;
    args.aligned = rows_aligned(p.weight, dtype_size(p.dtype));
    for (int i = 0; i < p.x.count; ++i) {
        args.aligned = args.aligned && rows_aligned(p.x.part[i], dtype_size(p.dtype));
    }
    Status status;
    dispatch_float(p.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        dispatch_int<8, 16, 32, 64>(row_tile(p.x.rows), [&](auto rows) {
            status = launch<LinearTraits<T, decltype(rows)::value>>(args, stream);
        });
    });
    return status;
}

}  // namespace specdec::cuda
