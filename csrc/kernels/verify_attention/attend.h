// Host side of the tensor-core kernel: the launch plan, and the entry of one instance. The instances of
// every (types, head_dim) have their own file in instances/, so that they compile in parallel.
#pragma once

#include "params.h"
#include "tuning.h"

namespace specdec::cuda {

// Follows from capacities only, never from lengths: it is the same at every replay of a graph.
struct AttendPlan {
    int tile;             // index into kAttentionTiles
    int grid;             // blocks of the first launch
    int slots;            // partials per block; 0 when no item can be cut, and then there is no
                          // second launch either
    int64_t value_bytes;  // of the partials' values, the first part of scratch
    int64_t sum_bytes;
};

AttendPlan plan_attend(const VerifyAttentionParams& p);

// q and out of type T, caches of type C.
template <class T, class C, int kHeadDim, int kValueDim>
Status attend(const VerifyAttentionParams& p, const AttendPlan& plan, Stream stream);

}  // namespace specdec::cuda
