#include "parallel.h"

namespace specdec {
namespace {
ParallelFor g_parallel_for = nullptr;
int (*g_num_threads)() = nullptr;
}  // namespace

void set_parallel_for(ParallelFor parallel_for, int (*num_threads)()) {
    g_parallel_for = parallel_for;
    g_num_threads = num_threads;
}

void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context) {
    if (g_parallel_for == nullptr || end - begin <= grain) {
        fn(begin, end, context);
    } else {
        g_parallel_for(begin, end, grain, fn, context);
    }
}

int num_threads() {
    return g_num_threads == nullptr ? 1 : g_num_threads();
}

}  // namespace specdec
