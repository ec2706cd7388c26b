// Products of a row of W2 with a vector, by four threads: 16 lanes as in dot_rows.h, a quarter of them each.
#pragma once

#include <type_traits>

#include "block.cuh"
#include "params.h"

namespace specdec::cuda {

constexpr int kStepSize = 32;  // of the rank: 16 lanes, two elements each

// Elements of one step of a row that thread `quarter` of four has, for lanes 4 quarter .. 4 quarter + 3: of bf16
// eight neighbours, a pair per lane; else four neighbours, and the four 16 places on.
template <class T>
struct alignas(16) StepWeights {
    static constexpr bool kPairs = std::is_same_v<T, bf16>;
    T x[8];

    __device__ __forceinline__ float first(int i) const { return to_float(x[kPairs ? 2 * i : i]); }
    __device__ __forceinline__ float second(int i) const {
        return to_float(x[kPairs ? 2 * i + 1 : 4 + i]);
    }
};
template <class T>
struct alignas(4 * sizeof(T)) Pack {
    T x[4];
};

template <class T>
__device__ __forceinline__ StepWeights<T> load_step(const T* row, int64_t step, int64_t rank,
                                                    int quarter, bool aligned) {
    using Weights = StepWeights<T>;
    const int64_t k = step * kStepSize;
    if (aligned) {
        if constexpr (Weights::kPairs) {
            return *reinterpret_cast<const Weights*>(row + k + 8 * quarter);
        } else {
            const T* at = row + k + 4 * quarter;
            Weights w;
            *reinterpret_cast<Pack<T>*>(w.x) = *reinterpret_cast<const Pack<T>*>(at);
            *reinterpret_cast<Pack<T>*>(w.x + 4) = *reinterpret_cast<const Pack<T>*>(at + 16);
            return w;
        }
    }
    Weights w;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int64_t at =
            k + (Weights::kPairs ? 8 * quarter + i : 4 * quarter + i % 4 + i / 4 * 16);
        w.x[i] = at < rank ? row[at] : from_float<T>(0.0f);
    }
    return w;
}

template <class T>
__device__ __forceinline__ void add_step(const StepWeights<T>& w, const float* y, int64_t step,
                                         int quarter, float (&sum)[4]) {
    const float* at = y + step * kStepSize + 4 * quarter;
    const float4 low = *reinterpret_cast<const float4*>(at);
    const float4 high = *reinterpret_cast<const float4*>(at + 16);
    sum[0] = fmaf(low.x, w.first(0), sum[0]);
    sum[1] = fmaf(low.y, w.first(1), sum[1]);
    sum[2] = fmaf(low.z, w.first(2), sum[2]);
    sum[3] = fmaf(low.w, w.first(3), sum[3]);
    sum[0] = fmaf(high.x, w.second(0), sum[0]);
    sum[1] = fmaf(high.y, w.second(1), sum[1]);
    sum[2] = fmaf(high.z, w.second(2), sum[2]);
    sum[3] = fmaf(high.w, w.second(3), sum[3]);
}

// The tree of sum_lanes: (l, l + 8), (l, l + 4), (l, l + 2), (0, 1). Lanes 4 q .. 4 q + 3 are thread q's.
__device__ __forceinline__ float fold_sums(float (&sum)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += warp_exchange(sum[i], 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += warp_exchange(sum[i], 1);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

}  // namespace specdec::cuda
