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
#include "parallel.h"
#include "params.h"
#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kPanelRows = 64;
constexpr int kBlockOutputs = 3;
constexpr int kBlockRows = kNativeLanes == 16 ? 8 : 4;  // 24 or 12 sums of the 32 or 16 registers
constexpr int kStep = 2 * kLanes;                       // elements of k in a step: two per lane

// --- 1. Two elements of k per lane and step ------------------------------------------------------

// float32 and fp16: lane l has k = l and l + 16 of every 32.
template <class T>
struct Widened {
    static constexpr int64_t place(int64_t k) { return k; }  // of x in its widened row

    Native first, second;
    SPECDEC_SIMD static Widened load(const T* w, int part) {
        return {load_part(w + part * kNativeLanes), load_part(w + kLanes + part * kNativeLanes)};
    }

  private:
    SPECDEC_SIMD static Native load_part(const float* at) { return load_native(at); }
    SPECDEC_SIMD static Native load_part(const f16* at) {
#if defined(__AVX512F__)
        return reinterpret_cast<Native>(_mm512_maskz_cvtph_ps(
            0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__AVX2__)
        return reinterpret_cast<Native>(
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
        Native r;
        for (int l = 0; l < kNativeLanes; ++l) r[l] = to_float(at[l]);
        return r;
#endif
    }
};

// bf16: lane l has k = 2 l and 2 l + 1 of every 32, the halves of one 32-bit word, which widen by one
// instruction each.
template <>
struct Widened<bf16> {
    static constexpr int64_t place(int64_t k) {
        return k / kStep * kStep + k % 2 * kLanes + k % kStep / 2;
    }

    Native first, second;
    SPECDEC_SIMD static Widened load(const bf16* w, int part) {
        const NativeInt pairs = *reinterpret_cast<const NativeIntAt*>(w + part * 2 * kNativeLanes);
        return {as_floats(pairs << 16), as_floats(pairs & static_cast<int32_t>(0xffff0000u))};
    }
};

template <class T>
void widen_row(const T* x, int64_t size, float* wide) {
    for (int64_t k = 0; k < size; ++k) wide[Widened<T>::place(k)] = to_float(x[k]);
}

// --- 2. A block of sums --------------------------------------------------------------------------

template <int kRows, int kOutputs>
using Lanes = float[kRows * kOutputs][kLanes];

template <class T, int kRows, int kOutputs>
SPECDEC_SIMD void add_step(Native (&sum)[kRows][kOutputs], const float* x, int64_t x_stride,
                           const T* const (&w)[kOutputs], int64_t k, int part) {
    Widened<T> pair[kOutputs];
    _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
        pair[n] = Widened<T>::load(w[n] + k, part);
    }
    x += part * kNativeLanes;
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
        const Native xr = load_native(x + r * x_stride);
        _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
            sum[r][n] = fma(xr, pair[n].first, sum[r][n]);
        }
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
        const Native xr = load_native(x + r * x_stride + kLanes);
        _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
            sum[r][n] = fma(xr, pair[n].second, sum[r][n]);
        }
    }
}

// Asks for what the next block of outputs will read at the same k.
template <class T, int kOutputs>
SPECDEC_SIMD void prefetch(const T* const (&w)[kOutputs], int64_t k, int64_t ahead) {
    constexpr int kLine = 64 / sizeof(T);
    _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
        _Pragma("GCC unroll 2") for (int i = 0; i < kStep; i += kLine) {
            __builtin_prefetch(w[n] + k + ahead + i, 0, 2);
        }
    }
}

template <class T, int kRows, int kOutputs>
void sum_block(const float* x, int64_t x_stride, const T* const (&w)[kOutputs], int64_t size,
               int64_t ahead, Lanes<kRows, kOutputs>& lanes) {
    const int64_t whole = size / kStep * kStep;
    T tail[kOutputs][kStep] = {};  // a row of weights must not be read past its end
    const T* tails[kOutputs];
    for (int n = 0; n < kOutputs; ++n) {
        std::copy(w[n] + whole, w[n] + size, tail[n]);
        tails[n] = tail[n];
    }
    for (int part = 0; part < kParts; ++part) {
        Native sum[kRows][kOutputs] = {};
        if (ahead != 0 && part == 0) {
            for (int64_t k = 0; k < whole; k += kStep) {
                prefetch<T, kOutputs>(w, k, ahead);
                add_step<T, kRows, kOutputs>(sum, x + k, x_stride, w, k, part);
            }
        } else {
            for (int64_t k = 0; k < whole; k += kStep) {
                add_step<T, kRows, kOutputs>(sum, x + k, x_stride, w, k, part);
            }
        }
        if (whole < size) {
            add_step<T, kRows, kOutputs>(sum, x + whole, x_stride, tails, 0, part);
        }
        for (int r = 0; r < kRows; ++r) {
            for (int n = 0; n < kOutputs; ++n) {
                store(lanes[r * kOutputs + n] + part * kNativeLanes, sum[r][n]);
            }
        }
    }
}

// --- 3. A panel of rows --------------------------------------------------------------------------

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
