// Access patterns whose cost is known.
#include "kernel.h"

using namespace specdec;

namespace {

template <class T>
__global__ void strided_kernel(const T* in, T* out, int stride, int offset) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const T value = in[i * stride + offset];  // @strided_read
    out[i] = value;                           // @strided_write
}

// Words of shared memory at a stride, as 4, 8 or 16 bytes per lane.
template <class T>
__global__ void shared_kernel(T* out, int stride) {
    CU_SHARED(a, T[32 * 32]);
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 32 * 32; i += 32) a[i] = T{};
    __syncthreads();
    out[lane] = a[lane * stride];  // @shared_read
}

// Lanes that skip an iteration must not shift the accesses of the others.
__global__ void uneven_kernel(const float* in, float* out) {
    const int lane = static_cast<int>(threadIdx.x);
    float sum = 0.0f;
    for (int i = 0; i < 8; ++i) {
        if (lane % 8 != i) sum += in[32 * i + lane];  // @uneven_read
        __syncwarp();
    }
    out[lane] = sum;
}

template <class T>
int strided(const void* in, void* out, int threads, int stride, int offset) {
    cu::LaunchCfg cfg;
    cfg.block = dim3(threads);
    return cu::launch(cfg, strided_kernel<T>, static_cast<const T*>(in), static_cast<T*>(out),
                      stride, offset)
        .code;
}

template <class T>
int shared(void* out, int stride) {
    cu::LaunchCfg cfg;
    cfg.block = dim3(32);
    return cu::launch(cfg, shared_kernel<T>, static_cast<T*>(out), stride).code;
}

}  // namespace

#define EMU_ENTRY extern "C" __attribute__((visibility("default"))) int

EMU_ENTRY counters_strided(const void* in, void* out, int bytes, int threads, int stride,
                           int offset) {
    switch (bytes) {
        case 2:
            return strided<bf16>(in, out, threads, stride, offset);
        case 4:
            return strided<float>(in, out, threads, stride, offset);
        default:
            return strided<float4>(in, out, threads, stride, offset);
    }
}

EMU_ENTRY counters_shared(void* out, int bytes, int stride) {
    switch (bytes) {
        case 4:
            return shared<float>(out, stride);
        case 8:
            return shared<float2>(out, stride);
        default:
            return shared<float4>(out, stride);
    }
}

EMU_ENTRY counters_uneven(const float* in, float* out) {
    cu::LaunchCfg cfg;
    cfg.block = dim3(32);
    return cu::launch(cfg, uneven_kernel, in, out).code;
}
