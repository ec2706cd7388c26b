// Launching a kernel and laying out shared memory. Included through kernel.h only.
#pragma once

#include <utility>

#include "kernel.h"

namespace specdec::cu {

struct LaunchCfg {
    dim3 grid{1, 1, 1};
    dim3 block{1, 1, 1};
    size_t smem = 0;  // bytes of dynamic shared memory: SmemLayout::bytes()
    Stream stream = nullptr;
    bool cooperative = false;   // needed by ptx::grid_sync: every block is resident at once
    bool programmatic = false;  // may start before the previous kernel of the stream has ended; the
        // kernel must call ptx::grid_dependency_wait() before reading its data
};

// Byte offsets of the arrays in dynamic shared memory. constexpr, so that a kernel and its launcher
// compute the same plan; on the emulator every array is followed by a red zone.
class SmemLayout {
  public:
    template <class T>
    constexpr size_t add(size_t count, size_t alignment = 16) {
        const size_t align = alignment < alignof(T) ? alignof(T) : alignment;
        const size_t offset = (bytes_ + align - 1) / align * align;
        device_bytes_ = (device_bytes_ + align - 1) / align * align + count * sizeof(T);
        bytes_ = offset + count * sizeof(T) + kRedZone;
        return offset;
    }
    // What to pass as LaunchCfg::smem.
    constexpr size_t bytes() const { return bytes_; }
    // What the GPU needs, for static_assert against the limit of an architecture.
    constexpr size_t device_bytes() const { return device_bytes_; }

  private:
#if SPECDEC_EMULATED
    static constexpr size_t kRedZone = 128;
#else
    static constexpr size_t kRedZone = 0;
#endif
    size_t bytes_ = 0;
    size_t device_bytes_ = 0;
};

#if !SPECDEC_EMULATED

namespace detail {
inline Status status_of(cudaError_t error) {
    if (error == cudaSuccess) return Status{};
    cudaGetLastError();  // a refused launch must not surface in a later, unrelated call
    return Status{static_cast<int>(error), cudaGetErrorString(error)};
}

template <class T>
struct identity {
    using type = T;
};
}  // namespace detail

// `count` elements of T at byte `offset` of dynamic shared memory.
template <class T>
__device__ __forceinline__ T* smem_at(unsigned char* base, size_t offset, size_t /*count*/) {
    return reinterpret_cast<T*>(base + offset);
}

template <class... Params, class... Args>
[[nodiscard]] Status launch(const LaunchCfg& cfg, void (*kernel)(Params...), Args&&... args) {
    constexpr size_t kSmemWithoutOptIn = 48 * 1024;
    if (cfg.smem > kSmemWithoutOptIn) {
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(cfg.smem));
        if (error != cudaSuccess) return detail::status_of(error);
    }
    cudaLaunchAttribute attributes[2];
    unsigned num_attributes = 0;
    if (cfg.cooperative) {
        attributes[num_attributes].id = cudaLaunchAttributeCooperative;
        attributes[num_attributes++].val.cooperative = 1;
    }
    if (cfg.programmatic) {
        attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = cfg.grid;
    config.blockDim = cfg.block;
    config.dynamicSmemBytes = cfg.smem;
    config.stream = static_cast<cudaStream_t>(cfg.stream);
    config.attrs = attributes;
    config.numAttrs = num_attributes;
    return detail::status_of(
        cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...));
}

// Number of multiprocessors of the current device.
[[nodiscard]] inline Status sm_count(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return detail::status_of(error);
    return detail::status_of(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}

// How many blocks of `kernel` the device holds at once: the largest grid of a cooperative launch.
template <class... Params>
[[nodiscard]] Status max_resident_blocks(void (*kernel)(Params...), int threads, size_t smem,
                                         int* count) {
    int sms = 0;
    int per_sm = 0;
    const Status status = sm_count(&sms);
    if (status.code != 0) return status;
    constexpr size_t kSmemWithoutOptIn = 48 * 1024;
    if (smem > kSmemWithoutOptIn) {
        const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(smem));
        if (error != cudaSuccess) return detail::status_of(error);
    }
    const cudaError_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, smem);
    *count = sms * per_sm;
    return detail::status_of(error);
}

[[nodiscard]] inline Status memset_async(void* data, int byte, size_t bytes, Stream stream) {
    return detail::status_of(cudaMemsetAsync(data, byte, bytes, static_cast<cudaStream_t>(stream)));
}

#define CU_SHARED(name, ...) \
    __shared__ typename ::specdec::cu::detail::identity<__VA_ARGS__>::type name
#define CU_DYN_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

#endif  // !SPECDEC_EMULATED

}  // namespace specdec::cu

#if SPECDEC_EMULATED
#include "host_launch.h"  // cpp_tests/cuda_on_cpu
#endif
