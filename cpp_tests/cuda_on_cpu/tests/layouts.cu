// Tensor core instructions with the registers of all lanes visible to the test.
#include <cstring>

#include "kernel.h"

using namespace specdec;

namespace {

template <int kMatrices, bool kTranspose>
__global__ void ldmatrix_kernel(uint16_t* out) {
    CU_SHARED(rows, float4[32]);  // row i: the numbers 8 i .. 8 i + 7 as 16-bit elements
    const int lane = static_cast<int>(threadIdx.x);
    auto* elements = reinterpret_cast<uint16_t*>(&rows[lane]);
    for (int i = 0; i < 8; ++i) elements[i] = static_cast<uint16_t>(8 * lane + i);
    __syncthreads();
    uint32_t r[kMatrices];
    const void* row = &rows[lane % (8 * kMatrices)];
    if constexpr (kMatrices == 4) {
        if constexpr (kTranspose) {
            ptx::ldmatrix_x4_trans(r, row);
        } else {
            ptx::ldmatrix_x4(r, row);
        }
    } else {
        if constexpr (kTranspose) {
            ptx::ldmatrix_x2_trans(r, row);
        } else {
            ptx::ldmatrix_x2(r, row);
        }
    }
    for (int i = 0; i < kMatrices; ++i) {
        out[lane * 2 * kMatrices + 2 * i] = static_cast<uint16_t>(r[i]);
        out[lane * 2 * kMatrices + 2 * i + 1] = static_cast<uint16_t>(r[i] >> 16);
    }
}

template <class T>
__global__ void mma_kernel(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
    const int lane = static_cast<int>(threadIdx.x);
    uint32_t fa[4], fb[2];
    float fc[4], fd[4];
    for (int i = 0; i < 4; ++i) fa[i] = a[4 * lane + i];
    for (int i = 0; i < 2; ++i) fb[i] = b[2 * lane + i];
    for (int i = 0; i < 4; ++i) fc[i] = c[4 * lane + i];
    ptx::mma_m16n8k16<T>(fd, fa, fb, fc);
    for (int i = 0; i < 4; ++i) d[4 * lane + i] = fd[i];
}

// What conversions of device.h give for each input.
__global__ void convert_kernel(const float* x, uint32_t* bf16s, uint32_t* f16s, float* widened,
                               int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    bf16s[i] = ptx::pack_bf16(x[i], -x[i]);
    f16s[i] = ptx::pack_f16(x[i], -x[i]);
    widened[i] = ptx::f16_to_float(f16{static_cast<uint16_t>(i)});
}

cu::LaunchCfg one_warp() {
    cu::LaunchCfg cfg;
    cfg.block = dim3(32);
    return cfg;
}

}  // namespace

#define EMU_ENTRY extern "C" __attribute__((visibility("default"))) int

EMU_ENTRY layouts_ldmatrix(uint16_t* out, int matrices, int transpose) {
    const auto kernel =
        matrices == 4 ? (transpose != 0 ? ldmatrix_kernel<4, true> : ldmatrix_kernel<4, false>)
                      : (transpose != 0 ? ldmatrix_kernel<2, true> : ldmatrix_kernel<2, false>);
    return cu::launch(one_warp(), kernel, out).code;
}

EMU_ENTRY layouts_mma(const uint32_t* a, const uint32_t* b, const float* c, float* d, int is_bf16) {
    const auto kernel = is_bf16 != 0 ? mma_kernel<bf16> : mma_kernel<f16>;
    return cu::launch(one_warp(), kernel, a, b, c, d).code;
}

EMU_ENTRY layouts_convert(const float* x, uint32_t* bf16s, uint32_t* f16s, float* widened, int n) {
    cu::LaunchCfg cfg;
    cfg.grid = dim3((n + 255) / 256);
    cfg.block = dim3(256);
    return cu::launch(cfg, convert_kernel, x, bf16s, f16s, widened, n).code;
}
