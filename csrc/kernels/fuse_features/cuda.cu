// fuse_features on CUDA, behind the product: RMSNorm of rows of float32 sums, rounded once.
//   Grid: one block per row; thread t has elements t, t + kThreads, ..
//   Bytes moved: the sums twice, the second time from cache, norm weights and y once per row. The launch
//   comes behind that of row_linear's kernel.
//   Determinism: the order of block.cuh; a row does not know others.
#include "kernel.h"

#include "block.cuh"
#include "dispatch.h"
#include "params.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void fuse_features_kernel(FuseFeaturesParams p) {
    CU_SHARED(scratch, BlockScratch<float, kThreads>);
    const float* s = p.sums.at(blockIdx.x);
    T* y = p.y.as<T>().at(blockIdx.x);
    const int64_t size = p.sums.size[1];
    float sum = 0.0f;
    for (int64_t n = threadIdx.x; n < size; n += kThreads) sum += s[n] * s[n];
    const float mean = block_sum<kThreads>(sum, scratch) / static_cast<float>(size);
    const float factor = 1.0f / sqrtf(mean + p.eps);
    for (int64_t n = threadIdx.x; n < size; n += kThreads) {
        const float weight = float_at(p.norm_weight.data, p.norm_weight.dtype, n);
        y[n] = from_float<T>(s[n] * factor * weight);
    }
}

}  // namespace

Status fuse_features(const FuseFeaturesParams& p, Stream stream) {
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.sums.size[0]));
    cfg.block = dim3(kThreads);
    cfg.stream = stream;
    Status status;
    dispatch_float(p.dtype, [&](auto tag) {
        status = cu::launch(cfg, fuse_features_kernel<typename decltype(tag)::type>, p);
    });
    return status;
}

}  // namespace specdec::cuda
