// row_linear on the CPU: y[r, n] = sum_k x[r, k] w[n, k] (+ bias[n]), float32 sums, rounded once.
//
// Work: rows are taken in panels, copied once to where the products want them; threads share the outputs, a
// block of them at a time. Sums of bf16 are of cpu_amx.h where there are tile registers for it, all others
// of cpu_fma.h, those of bf16 by pairs where the CPU multiplies them.
// Bytes moved: every weight once per panel of kPanelRows, x and y once.
// Determinism: the order of a sum is fixed by K and the dtype, then comes the bias: rows, outputs,
// strides and threads change none of it.
#include "dispatch.h"
#include "parallel.h"
#if defined(__AMX_BF16__)
#include "cpu_amx.h"
#else
#include "cpu_fma.h"
#endif

namespace specdec::cpu::SPECDEC_ISA {
namespace {

template <class T>
void run(const RowLinearParams& p) {
    const int64_t rows = p.x.rows, size = p.x.size, outputs = p.weight.size[0];
    const int64_t step = block_outputs<T>(size), blocks = (outputs + step - 1) / step;
    const int64_t block_bytes = step * std::max<int64_t>(size, 1) * sizeof(T);
    // A block is a few kB: below some of them, waking threads costs more than the sums.
    const int64_t grain = std::max<int64_t>(1, (int64_t{128} << 10) / block_bytes);
    for (int64_t first_row = 0; first_row < rows; first_row += kPanelRows) {
        const auto panel = make_panel<T>(p, first_row);
        parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
            finish_outputs<T>(p, panel, begin * step, std::min(end * step, outputs));
        });
    }
}

}  // namespace

void row_linear(const RowLinearParams& p) {
#if defined(__AVX512BF16__)
    run<bf16>(p);
#else
    dispatch_float(p.dtype, [&](auto tag) { run<typename decltype(tag)::type>(p); });
#endif
}

}  // namespace specdec::cpu::SPECDEC_ISA
