// Sorting keys in shared memory, by a bitonic network.
#pragma once

#include "block.cuh"

namespace specdec::cuda {

constexpr int kWarpKeys = 2 * kWarpSize;  // a warp compares 32 pairs at a time

// Ascending, `size` keys (a power of two), by the whole block; barriers before and after are its own.
template <int kThreads>
__device__ __forceinline__ void sort_keys(uint64_t* keys, int size) {
    __syncthreads();
    for (int width = 2; width <= size; width *= 2) {
        for (int distance = width / 2; distance > 0; distance /= 2) {
            for (int pair = static_cast<int>(threadIdx.x); pair < size / 2; pair += kThreads) {
                const int low = pair / distance * 2 * distance + pair % distance;
                const uint64_t a = keys[low], b = keys[low + distance];
                const bool ascending = (low & width) == 0;
                if ((b < a) == ascending) {
                    keys[low] = b;
                    keys[low + distance] = a;
                }
            }
            // The pairs of a warp within 64 keys are its own until the distance grows again.
            const int next = distance > 1 ? distance / 2 : width;
            if (distance < kWarpKeys && next < kWarpKeys) {
                __syncwarp();
            } else {
                __syncthreads();
            }
        }
    }
    __syncthreads();
}

}  // namespace specdec::cuda
