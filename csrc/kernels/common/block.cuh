// Reductions and scans over a warp or a block, in one fixed order.
//
// Blocks are whole warps, all threads call, every thread gets the result. Within a warp a butterfly
// of exchanges (a + b == b + a bit for bit, so all lanes hold the same bits), across warps a fold
// from warp 0 upwards: the result depends on the values and the block size only, never on timing.
#pragma once

#include "kernel.h"

namespace specdec {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// A value and where it was found.
struct ArgMax {
    float value;
    int index;
};

struct SumOp {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};

struct MaxOp {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};

struct MinOp {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};

// The larger value; of equal values the lower index. NaN never wins.
struct ArgMaxOp {
    __device__ __forceinline__ ArgMax operator()(ArgMax a, ArgMax b) const {
        const bool take_b = b.value > a.value || (b.value == a.value && b.index < a.index);
        return take_b ? b : a;
    }
};

template <class T>
__device__ __forceinline__ T warp_exchange(T value, int lane_mask) {
    return __shfl_xor_sync(kFullMask, value, lane_mask);
}

__device__ __forceinline__ ArgMax warp_exchange(ArgMax a, int lane_mask) {
    return ArgMax{__shfl_xor_sync(kFullMask, a.value, lane_mask),
                  __shfl_xor_sync(kFullMask, a.index, lane_mask)};
}

template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
    for (int lane_mask = kWarpSize / 2; lane_mask > 0; lane_mask /= 2) {
        value = op(value, warp_exchange(value, lane_mask));
    }
    return value;
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
    return warp_reduce(value, SumOp{});
}

template <class T>
__device__ __forceinline__ T warp_max(T value) {
    return warp_reduce(value, MaxOp{});
}

template <class T>
__device__ __forceinline__ T warp_min(T value) {
    return warp_reduce(value, MinOp{});
}

__device__ __forceinline__ ArgMax warp_argmax(ArgMax a) {
    return warp_reduce(a, ArgMaxOp{});
}

// Sum of the values of lanes 0..lane, added in lane order by doubling distances.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const T before = __shfl_up_sync(kFullMask, value, distance);
        if (lane >= distance) value = before + value;
    }
    return value;
}

// A value that is the same for all threads, in shared memory: kept out of registers, and large
// functions take it by reference. Raw bytes, as shared memory has no constructors.
template <class T>
struct Uniform {
    alignas(16) unsigned char bytes[sizeof(T)];

    __device__ __forceinline__ T& get() { return *reinterpret_cast<T*>(bytes); }
    // By the whole block; every thread passes the same value.
    __device__ __forceinline__ const T& set(const T& value) {
        if (threadIdx.x == 0) get() = value;
        __syncthreads();
        return get();
    }
};

// Shared memory of one block-wide call; may be reused by the next call at once.
template <class T, int kThreads>
struct BlockScratch {
    static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024,
                  "whole warps, at most 1024 threads");
    T per_warp[kThreads / kWarpSize];
};

template <int kThreads, class T, class Op>
__device__ __forceinline__ T block_reduce(T value, Op op, BlockScratch<T, kThreads>& scratch) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    value = warp_reduce(value, op);
    if (kWarps == 1) return value;
    if (lane == 0) scratch.per_warp[warp] = value;
    __syncthreads();
    T total = scratch.per_warp[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total = op(total, scratch.per_warp[w]);
    __syncthreads();  // the next call may write scratch
    return total;
}

template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T value, BlockScratch<T, kThreads>& scratch) {
    return block_reduce<kThreads>(value, SumOp{}, scratch);
}

template <int kThreads, class T>
__device__ __forceinline__ T block_max(T value, BlockScratch<T, kThreads>& scratch) {
    return block_reduce<kThreads>(value, MaxOp{}, scratch);
}

template <int kThreads, class T>
__device__ __forceinline__ T block_min(T value, BlockScratch<T, kThreads>& scratch) {
    return block_reduce<kThreads>(value, MinOp{}, scratch);
}

template <int kThreads>
__device__ __forceinline__ ArgMax block_argmax(ArgMax a, BlockScratch<ArgMax, kThreads>& scratch) {
    return block_reduce<kThreads>(a, ArgMaxOp{}, scratch);
}

template <class T>
struct Scan {
    T inclusive;  // values of threads 0..thread
    T total;      // values of all threads
};

template <int kThreads, class T>
__device__ __forceinline__ Scan<T> block_inclusive_sum(T value,
                                                       BlockScratch<T, kThreads>& scratch) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const T in_warp = warp_inclusive_sum(value);
    if (lane == kWarpSize - 1) scratch.per_warp[warp] = in_warp;
    __syncthreads();
    T total = scratch.per_warp[0];
    T before = T(0);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        if (w == warp) before = total;
        total = total + scratch.per_warp[w];
    }
    __syncthreads();
    return Scan<T>{warp == 0 ? in_warp : before + in_warp, total};
}

}  // namespace specdec
