"""Seeded bugs of row_linear: (id, file, old text, new text, build, says, tests, objects), see
mutations.py."""

CUDA = "csrc/kernels/row_linear/cuda.cu"
FMA = "csrc/kernels/row_linear/cpu_fma.h"
AMX = "csrc/kernels/row_linear/cpu_amx.h"
DOTS = "csrc/kernels/common/dot_rows.h"
ORACLE = "python_tests/test_row_linear.py::oracle or call or strides or finite or rounded"
COUNTED = "python_tests/test_emulated_linear.py"
ISAS = "python_tests/test_row_linear.py::isas"
IN_FLIGHT = r"cp\.async in flight|uninitialised shared memory|race on shared memory"

BUGS = [
    ("linear-chunk-read-in-flight", CUDA, "ptx::cp_async_wait<Tr::kStages - 2>();",
     "ptx::cp_async_wait<Tr::kStages - 1>();", "hooks", IN_FLIGHT, COUNTED),
    ("linear-sums-without-barrier", CUDA, "    __syncthreads();\n    const T* bias",
     "    const T* bias", "hooks", IN_FLIGHT, COUNTED),
    ("linear-swizzle-forgotten", CUDA, "(piece ^ (row & 7))", "piece", "hooks", "wavefronts", COUNTED),
    ("linear-exchange-conflicts", CUDA, "kExchangeStride = kOutputs + 4;",
     "kExchangeStride = kOutputs;", "hooks", "wavefronts", COUNTED),
    ("linear-a-warp-forgotten", CUDA, "for (int w = 0; w < kWarps; ++w) {",
     "for (int w = 0; w < kWarps - 1; ++w) {", "plain", "", ORACLE),
    ("linear-end-of-k-not-zero", CUDA, "valid && k + e < size", "valid", "plain", "", ORACLE),
    ("linear-alignment-of-x-ignored", CUDA, "rows_aligned(p.x.part[i], dtype_size(p.dtype))", "true", "plain", "",
     ORACLE),
    ("linear-bias-of-first-output", CUDA, "to_float(bias[n])", "to_float(bias[lane])", "plain", "", ORACLE),
    ("linear-row-tile-of-first-rows", CUDA, "static_cast<int64_t>(blockIdx.y) * Tr::kRows",
     "static_cast<int64_t>(blockIdx.y) * 0", "plain", "", ORACLE),
    ("cpu-linear-tail-dropped", DOTS, "if (whole < size) {", "if (false) {", "cpu", "", ORACLE),
    ("cpu-linear-last-rows-as-first", FMA, "panel.x + row * panel.stride", "panel.x", "cpu", "", ORACLE),
    ("cpu-linear-bias-of-first-output", FMA, "bias[output + n]", "bias[n]", "cpu", "", ORACLE),
    ("cpu-linear-bf16-odd-not-masked", DOTS, ": pairs & static_cast<int32_t>(0xffff0000u)", ": pairs",
     "cpu", "", ISAS),
    ("cpu-linear-one-row-has-another-order", DOTS, "sum[r][n] = fma(xr, wide[n], sum[r][n]);",
     "sum[r][n] = kRows == 1 ? xr * wide[n] + sum[r][n] : fma(xr, wide[n], sum[r][n]);", "cpu", "", ORACLE),
    ("cpu-linear-rows-of-the-call-before", FMA, "if (left < kStep) std::fill(wide, wide + kStep, RowOf<T>{});", "",
     "cpu", "", ORACLE),
]  # fmt: skip

# Of code that runs only where vectors multiply pairs of bf16.
DOT_BUGS = [
    ("dot-linear-weights-of-output-0", "csrc/kernels/common/dot_rows.h", "xr, wide[n]));", "xr, wide[0]));",
     ORACLE),
    ("dot-linear-rows-of-row-0", "csrc/kernels/common/dot_rows.h", "pairs(x + r * x_row)", "pairs(x)", ORACLE),
]  # fmt: skip

# Of code that runs only where the CPU has AMX: (id, file, old text, new text, tests).
AMX_BUGS = [
    ("amx-linear-rest-of-k-dropped", AMX, "if (size % 32 != 0) {", "if (false) {", ORACLE),
    ("amx-linear-rest-of-strip-0", AMX, "{strips[0].rest, strips[1].rest}", "{strips[0].rest, strips[0].rest}",
     ORACLE),
    ("amx-linear-last-strip-not-copied", AMX, "if (count < kTileRows) {", "if (false) {",
     "python_tests/test_row_linear.py::nothing_behind"),
    ("amx-linear-row-blocks-swapped", AMX, "sums[2 * r + o], panel.first_row + row,",
     "sums[2 * (rows - 1 - r) + o], panel.first_row + row,", ORACLE),
    ("amx-linear-panel-of-first-rows", AMX, "sums[2 * r + o], panel.first_row + row,", "sums[2 * r + o], row,",
     ORACLE),
    ("amx-linear-strides-ignored", AMX, "strip.bytes = 2 * weight.stride[0];", "strip.bytes = 2 * size;",
     ORACLE),
    ("amx-linear-bias-of-first-output", AMX, "bias + output)", "bias)", ORACLE),
    ("amx-linear-bias-after-rounding", AMX, "sum = _mm512_add_ps(sum,",
     "sum = _mm512_add_ps(reinterpret_cast<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32("
     "round_to_bf16(sum)), 16)),", ORACLE),
    ("amx-linear-few-rows-by-other-sums", AMX, "    tile_fence();\n    _tile_zero(0);",
     "    if (Rows == 1) size -= 32;\n    tile_fence();\n    _tile_zero(0);", ORACLE),
]  # fmt: skip
