// Correct kernels that use every part of the emulator. They must give the right answer under every
// schedule and must not be reported by any detector.
#include "block.cuh"
#include "kernel.h"

using namespace specdec;

#define EMU_ENTRY extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kThreads = 256;

// out[block] = sum, max, argmax, inclusive scan of one row of n values per block.
__global__ void reduce_kernel(const float* x, int n, float* out, float* scan) {
    CU_SHARED(sums, BlockScratch<float, kThreads>);
    CU_SHARED(maxima, BlockScratch<ArgMax, kThreads>);
    const float* row = x + static_cast<int64_t>(blockIdx.x) * n;
    float sum = 0.0f;
    ArgMax best{-INFINITY, 0x7fffffff};
    float carry = 0.0f;
    for (int base = 0; base < n; base += kThreads) {
        const int i = base + static_cast<int>(threadIdx.x);
        const float value = i < n ? row[i] : 0.0f;
        sum += value;
        if (i < n) best = ArgMaxOp{}(best, ArgMax{value, i});
        const Scan<float> s = block_inclusive_sum<kThreads>(value, sums);
        if (i < n) scan[static_cast<int64_t>(blockIdx.x) * n + i] = carry + s.inclusive;
        carry += s.total;
    }
    sum = block_sum<kThreads>(sum, sums);
    best = block_argmax<kThreads>(best, maxima);
    // The same scratch again at once, by another operation.
    const float most = block_max<kThreads>(best.value, sums);
    const float least = block_min<kThreads>(static_cast<float>(threadIdx.x), sums);
    if (threadIdx.x == 0) {
        out[3 * blockIdx.x] = sum;
        out[3 * blockIdx.x + 1] = most + least;
        out[3 * blockIdx.x + 2] = static_cast<float>(best.index);
    }
}

// 32x32 tiles through shared memory; kPad = 1 avoids bank conflicts, 0 has 32-way ones.
template <int kPad>
__global__ void transpose_kernel(const float* in, float* out, int rows, int columns) {
    CU_SHARED(tile, float[32][32 + kPad]);
    const int x = static_cast<int>(threadIdx.x);
    const int column = static_cast<int>(blockIdx.x) * 32 + x;
    for (int y = static_cast<int>(threadIdx.y); y < 32; y += static_cast<int>(blockDim.y)) {
        const int row = static_cast<int>(blockIdx.y) * 32 + y;
        if (row < rows && column < columns) tile[y][x] = in[row * columns + column];
    }
    __syncthreads();
    const int out_column = static_cast<int>(blockIdx.y) * 32 + x;
    for (int y = static_cast<int>(threadIdx.y); y < 32; y += static_cast<int>(blockDim.y)) {
        const int out_row = static_cast<int>(blockIdx.x) * 32 + y;
        if (out_row < columns && out_column < rows) out[out_row * rows + out_column] = tile[x][y];
    }
}

// c[m,n] = a[m,k] * b[k,n], both row-major and 16 bit; 64x64 tiles, four warps of 32x32, two stages
// of cp.async. m, n, k multiples of 64.
template <class T>
struct MatmulPlan {
    static constexpr int kTile = 64;
    static constexpr int kDepth = 64;
    static constexpr int kStages = 2;
    static constexpr int kStrideA = kDepth + 8;  // rows start 4 banks apart
    static constexpr int kStrideB = kTile + 8;
    cu::SmemLayout layout;
    size_t a = layout.add<T>(kStages * kTile * kStrideA);
    size_t b = layout.add<T>(kStages * kDepth * kStrideB);
};

template <class T>
__global__ void matmul_kernel(const T* a, const T* b, float* c, int n, int k) {
    using Plan = MatmulPlan<T>;
    const Plan plan;
    CU_DYN_SHARED(smem);
    T* tile_a = cu::smem_at<T>(smem, plan.a, Plan::kStages * Plan::kTile * Plan::kStrideA);
    T* tile_b = cu::smem_at<T>(smem, plan.b, Plan::kStages * Plan::kDepth * Plan::kStrideB);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int row0 = static_cast<int>(blockIdx.y) * Plan::kTile;
    const int column0 = static_cast<int>(blockIdx.x) * Plan::kTile;
    const auto load = [&](int stage, int k0) {
        T* to_a = tile_a + stage * Plan::kTile * Plan::kStrideA;
        T* to_b = tile_b + stage * Plan::kDepth * Plan::kStrideB;
        for (int i = thread; i < Plan::kTile * Plan::kDepth / 8; i += 128) {
            const int row = i / (Plan::kDepth / 8), column = i % (Plan::kDepth / 8) * 8;
            ptx::cp_async16(to_a + row * Plan::kStrideA + column,
                            a + static_cast<int64_t>(row0 + row) * k + k0 + column);
        }
        for (int i = thread; i < Plan::kDepth * Plan::kTile / 8; i += 128) {
            const int row = i / (Plan::kTile / 8), column = i % (Plan::kTile / 8) * 8;
            ptx::cp_async16(to_b + row * Plan::kStrideB + column,
                            b + static_cast<int64_t>(k0 + row) * n + column0 + column);
        }
        ptx::cp_async_commit();
    };

    float sum[2][4][4] = {};
    load(0, 0);
    for (int k0 = 0, stage = 0; k0 < k; k0 += Plan::kDepth, stage ^= 1) {
        if (k0 + Plan::kDepth < k) {
            load(stage ^ 1, k0 + Plan::kDepth);
        } else {
            ptx::cp_async_commit();
        }
        ptx::cp_async_wait<1>();
        __syncthreads();
        const T* from_a =
            tile_a + stage * Plan::kTile * Plan::kStrideA + warp / 2 * 32 * Plan::kStrideA;
        const T* from_b = tile_b + stage * Plan::kDepth * Plan::kStrideB + warp % 2 * 32;
        for (int kk = 0; kk < Plan::kDepth; kk += 16) {
            uint32_t fa[2][4];
            for (int i = 0; i < 2; ++i) {
                ptx::ldmatrix_x4(
                    fa[i], from_a + (i * 16 + lane % 16) * Plan::kStrideA + kk + lane / 16 * 8);
            }
            for (int j = 0; j < 4; ++j) {
                uint32_t fb[2];
                ptx::ldmatrix_x2_trans(fb, from_b + (kk + lane % 16) * Plan::kStrideB + j * 8);
                for (int i = 0; i < 2; ++i) ptx::mma_m16n8k16<T>(sum[i][j], fa[i], fb, sum[i][j]);
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) {
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + warp / 2 * 32 + i * 16 + half * 8 + lane / 4;
                const int column = column0 + warp % 2 * 32 + j * 8 + lane % 4 * 2;
                *reinterpret_cast<float2*>(c + static_cast<int64_t>(row) * n + column) =
                    make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
            }
        }
    }
}

// Histogram in shared memory by atomics, then the last block to finish adds the partial histograms:
// fence, ticket, fence. The ticket is left at zero for the next launch.
__global__ void last_block_kernel(const unsigned char* x, int n, unsigned* partial,
                                  unsigned* ticket, unsigned* out) {
    CU_SHARED(bins, unsigned[256]);
    CU_SHARED(is_last, bool);
    bins[threadIdx.x] = 0;
    __syncthreads();
    const int step = static_cast<int>(gridDim.x * blockDim.x);
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += step) {
        atomicAdd(&bins[x[i]], 1u);
    }
    __syncthreads();
    partial[blockIdx.x * 256 + threadIdx.x] = bins[threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    unsigned sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b * 256 + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *ticket = 0;
}

// Blocks pass a value along a chain by release and acquire: out[b] = sum of in[0..b].
__global__ void chain_kernel(const int* in, int* running, unsigned* ready, int* out) {
    CU_SHARED(before, int);
    const unsigned b = blockIdx.x;
    if (threadIdx.x == 0) {
        if (b > 0) {
            while (ptx::ld_acquire(&ready[b - 1]) == 0) __nanosleep(20);
        }
        before = b > 0 ? running[b - 1] : 0;
        running[b] = before + in[b];
        ptx::st_release(&ready[b], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 33) out[b] = before + in[b];
}

// Neighbours over the whole grid, several rounds, one grid barrier per round.
__global__ void grid_kernel(float* x, float* y, int rounds) {
    const int n = static_cast<int>(gridDim.x * blockDim.x);
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    for (int r = 0; r < rounds; ++r) {
        y[i] = x[(i + 1) % n] + x[(i + n - 1) % n];
        ptx::grid_sync();
        x[i] = 0.5f * y[i];
        ptx::grid_sync();
    }
}

// Warp 0 produces, warps 1..3 consume, over two buffers and named barriers.
__global__ void named_barrier_kernel(const int* in, int* out, int rounds) {
    CU_SHARED(buffer, int[2][32]);
    constexpr int kFull = 1, kEmpty = 3, kAll = 128;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
        for (int r = 0; r < rounds; ++r) {
            if (r >= 2) ptx::bar_sync(kEmpty + r % 2, kAll);
            buffer[r % 2][lane] = in[r * 32 + lane];
            ptx::bar_arrive(kFull + r % 2, kAll);
        }
    } else {
        for (int r = 0; r < rounds; ++r) {
            ptx::bar_sync(kFull + r % 2, kAll);
            out[(r * 3 + warp - 1) * 32 + lane] = buffer[r % 2][31 - lane] * warp;
            if (r + 2 < rounds) ptx::bar_arrive(kEmpty + r % 2, kAll);
        }
    }
}

// Every collective once; one row of 32 results per collective.
__global__ void warp_kernel(const int* in, int* out) {
    CU_SHARED(slot, int[32]);
    const int lane = static_cast<int>(threadIdx.x);
    const int x = in[lane];
    const unsigned u = static_cast<unsigned>(x);
    int row = 0;
    const auto put = [&](int value) { out[32 * row++ + lane] = value; };
    put(__shfl_sync(kFullMask, x, (lane + 5) % 32));
    put(__shfl_sync(kFullMask, x, 3, 8));
    put(__shfl_up_sync(kFullMask, x, 4));
    put(__shfl_down_sync(kFullMask, x, 3, 16));
    put(__shfl_xor_sync(kFullMask, x, 17));
    put(static_cast<int>(__ballot_sync(kFullMask, x > 0)));
    put(__any_sync(kFullMask, x == 7));
    put(__all_sync(kFullMask, x < 1000));
    put(static_cast<int>(__match_any_sync(kFullMask, x % 3)));
    put(__reduce_add_sync(kFullMask, x));
    put(__reduce_min_sync(kFullMask, x));
    put(__reduce_max_sync(kFullMask, x));
    put(static_cast<int>(__reduce_max_sync(kFullMask, u)));
    put(static_cast<int>(__reduce_xor_sync(kFullMask, u)));
    put(static_cast<int>(__reduce_and_sync(kFullMask, u | 1u)));
    slot[lane] = x;
    __syncwarp();
    put(slot[31 - lane]);
    __syncwarp();
    // Half warps on their own ways, each with its own mask.
    if (lane < 16) {
        slot[lane] = __shfl_xor_sync(0x0000ffffu, x, 1);
        __syncwarp(0x0000ffffu);
        put(slot[15 - lane]);
    } else {
        slot[lane] = 2 * __shfl_xor_sync(0xffff0000u, x, 2);
        __syncwarp(0xffff0000u);
        put(slot[47 - lane]);
    }
    __syncwarp();
    put(__syncthreads_count(x > 0));
    put(__syncthreads_or(x == 7));
    put(__syncthreads_and(x < 1000));
}

__global__ void dot_bytes_kernel(const int* a, const int* b, int* out) {
    const int i = static_cast<int>(threadIdx.x);
    out[i] = __dp4a(a[i], b[i], 100 * i);
}

cu::LaunchCfg config(dim3 grid, dim3 block, size_t smem = 0, bool cooperative = false) {
    cu::LaunchCfg cfg;
    cfg.grid = grid;
    cfg.block = block;
    cfg.smem = smem;
    cfg.cooperative = cooperative;
    return cfg;
}

template <class T>
int matmul(const void* a, const void* b, float* c, int m, int n, int k) {
    const MatmulPlan<T> plan;
    return cu::launch(config(dim3(n / 64, m / 64), dim3(128), plan.layout.bytes()),
                      matmul_kernel<T>, static_cast<const T*>(a), static_cast<const T*>(b), c, n, k)
        .code;
}

}  // namespace

EMU_ENTRY correct_reduce(const float* x, int rows, int n, float* out, float* scan) {
    return cu::launch(config(dim3(rows), dim3(kThreads)), reduce_kernel, x, n, out, scan).code;
}

EMU_ENTRY correct_transpose(const float* in, float* out, int rows, int columns, int padded) {
    const dim3 grid((columns + 31) / 32, (rows + 31) / 32);
    const auto kernel = padded != 0 ? transpose_kernel<1> : transpose_kernel<0>;
    return cu::launch(config(grid, dim3(32, 8)), kernel, in, out, rows, columns).code;
}

EMU_ENTRY correct_matmul(const void* a, const void* b, float* c, int m, int n, int k, int is_bf16) {
    return is_bf16 != 0 ? matmul<bf16>(a, b, c, m, n, k) : matmul<f16>(a, b, c, m, n, k);
}

EMU_ENTRY correct_last_block(const unsigned char* x, int n, int blocks, unsigned* partial,
                             unsigned* ticket, unsigned* out) {
    return cu::launch(config(dim3(blocks), dim3(256)), last_block_kernel, x, n, partial, ticket,
                      out)
        .code;
}

EMU_ENTRY correct_chain(const int* in, int blocks, int* running, unsigned* ready, int* out) {
    return cu::launch(config(dim3(blocks), dim3(64), 0, true), chain_kernel, in, running, ready,
                      out)
        .code;
}

EMU_ENTRY correct_grid(float* x, float* y, int blocks, int rounds) {
    return cu::launch(config(dim3(blocks), dim3(96), 0, true), grid_kernel, x, y, rounds).code;
}

EMU_ENTRY correct_named(const int* in, int* out, int rounds) {
    return cu::launch(config(dim3(1), dim3(128)), named_barrier_kernel, in, out, rounds).code;
}

EMU_ENTRY correct_warp(const int* in, int* out) {
    return cu::launch(config(dim3(1), dim3(32)), warp_kernel, in, out).code;
}

EMU_ENTRY correct_dot_bytes(const int* a, const int* b, int* out) {
    return cu::launch(config(dim3(1), dim3(64)), dot_bytes_kernel, a, b, out).code;
}
