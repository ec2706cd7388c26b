// row_linear on the CPU: y[r, n] = sum_k x[r, k] w[n, k] (+ bias[n]), float32 sums, rounded once.
//
// Work: rows are taken in panels of kPanelRows, widened to float32 once; threads share the outputs.
// A block of kBlockRows x kBlockOutputs sums stays in registers while k runs, so that a weight is
// read from memory for the first block of rows and from cache for the others of its panel.
// Bytes moved: every weight once per panel, x and y once.
// Determinism: a sum has 16 lanes. Lane l adds its k in ascending order by fused multiply-adds, the
// lanes are added in the fixed tree of sum_lanes, then the bias. Which k a lane has is fixed by the
// dtype (Widened); rows, outputs, strides, threads and instruction sets change none of it.
#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "dot_rows.h"
#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kPanelRows = 64;
constexpr int kBlockOutputs = 3;
constexpr int kBlockRows = kNativeLanes == 16 ? 8 : 4;  // 24 or 12 sums of the 32 or 16 registers

// --- A panel of rows --------------------------------------------------------------------------

struct Panel {
    const float* x;  // [rows padded to blocks, stride], widened, zeros behind the rows and behind K
    int64_t stride, first_row, rows;
};

template <class T, int kRows, int kOutputs>
void finish_block(const RowLinearParams& p, const Panel& panel, int64_t row, int64_t output,
                  bool prefetch_next) {
    const View<const T, 2> weight = p.weight.as<const T>();
    const T* w[kOutputs];
    for (int n = 0; n < kOutputs; ++n) w[n] = weight.at(output + n);
    Lanes<kRows, kOutputs> lanes;
    sum_block<T, kRows, kOutputs>(panel.x + row * panel.stride, panel.stride, w, weight.size[1],
                                  prefetch_next ? kOutputs * weight.stride[0] : 0, lanes);
    float sums[kRows * kOutputs];
    sum_each(lanes, sums);
    const T* bias = static_cast<const T*>(p.bias);
    const int rows = static_cast<int>(std::min<int64_t>(kRows, panel.rows - row));
    for (int r = 0; r < rows; ++r) {
        T* y = p.y.as<T>().at(panel.first_row + row + r, output);
        for (int n = 0; n < kOutputs; ++n) {
            float sum = sums[r * kOutputs + n];
            if (bias != nullptr) sum += to_float(bias[output + n]);
            y[n] = from_float<T>(sum);
        }
    }
}

// All rows of the panel for some outputs; the last rows in the smallest block that holds them.
template <class T, int kOutputs>
void finish_outputs(const RowLinearParams& p, const Panel& panel, int64_t output, bool more) {
    for (int64_t row = 0; row < panel.rows; row += kBlockRows) {
        const int64_t left = panel.rows - row;
        const bool prefetch_next = more && row == 0;
        if (left > 4) {
            finish_block<T, kBlockRows, kOutputs>(p, panel, row, output, prefetch_next);
        } else if (left > 2) {
            finish_block<T, 4, kOutputs>(p, panel, row, output, prefetch_next);
        } else if (left == 2) {
            finish_block<T, 2, kOutputs>(p, panel, row, output, prefetch_next);
        } else {
            finish_block<T, 1, kOutputs>(p, panel, row, output, prefetch_next);
        }
    }
}

template <class T>
void run(const RowLinearParams& p) {
    const int64_t rows = p.x.size[0], size = p.x.size[1], outputs = p.weight.size[0];
    Panel panel{};
    panel.stride = (size + kStep - 1) / kStep * kStep;
    const int64_t block_bytes = kBlockOutputs * std::max<int64_t>(size, 1) * sizeof(T);
    // A block is a few kB: below some of them, waking threads costs more than the sums.
    const int64_t grain = std::max<int64_t>(1, (int64_t{128} << 10) / block_bytes);
    for (; panel.first_row < rows; panel.first_row += kPanelRows) {
        panel.rows = std::min(kPanelRows, rows - panel.first_row);
        const int64_t padded = (panel.rows + kBlockRows - 1) / kBlockRows * kBlockRows;
        std::vector<float> wide(padded * panel.stride);
        for (int64_t r = 0; r < panel.rows; ++r) {
            widen_row(p.x.as<const T>().at(panel.first_row + r), size,
                      wide.data() + r * panel.stride);
        }
        panel.x = wide.data();
        const int64_t blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
        parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
            for (int64_t block = begin; block < end; ++block) {
                int64_t output = block * kBlockOutputs;
                if (output + kBlockOutputs <= outputs) {
                    const bool more = output + 2 * kBlockOutputs <= outputs;
                    finish_outputs<T, kBlockOutputs>(p, panel, output, more && block + 1 < end);
                    continue;
                }
                for (; output < outputs; ++output) {
                    finish_outputs<T, 1>(p, panel, output, false);
                }
            }
        });
    }
}

}  // namespace

void row_linear(const RowLinearParams& p) {
    dispatch_float(p.dtype, [&](auto tag) { run<typename decltype(tag)::type>(p); });
}

}  // namespace specdec::cpu::SPECDEC_ISA
