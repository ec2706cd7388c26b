// Kernels that do one thing many times; speed.py prints what each costs on the emulator.
#include "kernel.h"

using namespace specdec;

namespace {

__global__ void barriers_kernel(int rounds) {
    for (int i = 0; i < rounds; ++i) __syncthreads();
}

__global__ void shuffles_kernel(int rounds, float* out) {
    float x = static_cast<float>(threadIdx.x);
    for (int i = 0; i < rounds; ++i) x = __shfl_xor_sync(0xffffffffu, x, 1);
    out[threadIdx.x] = x;
}

__global__ void mma_kernel(int rounds, float* out) {
    float d[4] = {};
    const uint32_t a[4] = {threadIdx.x, 1, 2, 3};
    const uint32_t b[2] = {1, 2};
    for (int i = 0; i < rounds; ++i) ptx::mma_m16n8k16<bf16>(d, a, b, d);
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

__global__ void stream_kernel(const float4* in, float4* out, int n) {
    const int step = static_cast<int>(gridDim.x * blockDim.x);
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += step) {
        float4 v = in[i];
        v.x += 1.0f;
        out[i] = v;
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int speed_run(int what, int rounds, int threads,
                                                                float* in, float* out) {
    cu::LaunchCfg cfg;
    cfg.block = dim3(threads);
    switch (what) {
        case 0:
            return cu::launch(cfg, barriers_kernel, rounds).code;
        case 1:
            return cu::launch(cfg, shuffles_kernel, rounds, out).code;
        case 2:
            return cu::launch(cfg, mma_kernel, rounds, out).code;
        default:
            cfg.grid = dim3(16);
            return cu::launch(cfg, stream_kernel, reinterpret_cast<const float4*>(in),
                              reinterpret_cast<float4*>(out), rounds)
                .code;
    }
}
