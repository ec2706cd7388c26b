// Threads for CPU kernels. Kernels know nothing of torch, so the ops layer installs torch's own
// pool here; without it everything runs on the calling thread. No kernel's result may depend on
// how a range is cut.
#pragma once

#include <cstdint>

namespace specdec {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context);

void set_parallel_for(ParallelFor parallel_for, int (*num_threads)());
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context);
int num_threads();

// Calls fn(begin, end) on disjoint ranges that cover [begin, end), each at least `grain` long.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& fn) {
    if (begin >= end) return;
    run_parallel(
        begin, end, grain,
        [](int64_t b, int64_t e, void* context) { (*static_cast<const F*>(context))(b, e); },
        const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace specdec
