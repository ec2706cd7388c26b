// Launches of the tensor-core kernel and its combine kernel, for one (type, head_dim, value_dim).
#pragma once

#include "attend.h"
#include "combine.cuh"
#include "dispatch.h"

namespace specdec::cuda {

// cp.async wants 16-byte aligned rows; strides of size-1 dimensions do not matter, but checking them
// costs nothing but speed.
template <class T, int N>
bool rows_aligned(const View<T, N>& view, int64_t element_size) {
    bool ok = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < N - 1; ++d) ok = ok && view.stride[d] * element_size % 16 == 0;
    return ok;
}

template <class Tr>
Status launch_attend(const VerifyAttentionParams& p, const AttendPlan& plan, Stream stream) {
    constexpr SharedPlan shared = kSharedPlan<Tr>;
    static_assert(
        shared.device_bytes + sizeof(ScheduleScratch<Tr::kThreads>) <= kSmallestSharedMemory,
        "fits every architecture of the build");
    AttendArgs args;
    args.p = p;
    args.scale = logit_scale(p);
    constexpr int64_t kCacheSize = sizeof(typename Tr::C);
    args.aligned = rows_aligned(p.q, 2) && rows_aligned(p.k_cache, kCacheSize) &&
                   rows_aligned(p.v_cache, kCacheSize);
    args.partials.values = static_cast<float*>(p.scratch);
    args.partials.sums =
        reinterpret_cast<SoftmaxSum*>(static_cast<char*>(p.scratch) + plan.value_bytes);
    args.partials.slots = plan.slots;

    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(plan.grid));
    cfg.block = dim3(Tr::kThreads);
    cfg.smem = shared.bytes;
    cfg.stream = stream;
    const Status status = cu::launch(cfg, verify_attention_kernel<Tr>, args);
    if (!status.ok() || plan.slots == 0) return status;

    cfg.grid = dim3(static_cast<unsigned>(plan.grid), CombineTraits<Tr>::kSlices);
    cfg.block = dim3(CombineTraits<Tr>::kThreads);
    cfg.smem = 0;
    return cu::launch(cfg, verify_attention_combine_kernel<Tr>, args);
}

template <class T, class C, int kHeadDim, int kValueDim>
Status attend(const VerifyAttentionParams& p, const AttendPlan& plan, Stream stream) {
    Status status;
    const auto run = [&](auto tile) {
        status = launch_attend<AttendTraits<T, C, kHeadDim, kValueDim, decltype(tile)::value>>(
            p, plan, stream);
    };
    if constexpr (kValueDim <= kNarrowValueDim) {
        dispatch_int<0, 1, 2>(plan.tile, run);
    } else {
        dispatch_int<0, 3>(plan.tile, run);
    }
    return status;
}

}  // namespace specdec::cuda
