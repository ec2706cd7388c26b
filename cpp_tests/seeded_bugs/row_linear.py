"""Seeded bugs of row_linear: (id, file, old text, new text, build, says, tests, objects), see
mutations.py."""

CUDA = "csrc/kernels/row_linear/cuda.cu"
CPU = "csrc/kernels/row_linear/cpu.cpp"
DOTS = "csrc/kernels/common/dot_rows.h"
ORACLE = "python_tests/test_row_linear.py::oracle or call or strides or finite or rounded"
COUNTED = "python_tests/test_emulated_linear.py"
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
    ("linear-end-of-k-not-zero", CUDA, "exists && k + e < source.size[1]", "exists", "plain", "", ORACLE),
    ("linear-alignment-of-x-ignored", CUDA, "rows_aligned(p.x, dtype_size(p.dtype))", "true", "plain", "",
     ORACLE),
    ("linear-bias-of-first-output", CUDA, "to_float(bias[n])", "to_float(bias[lane])", "plain", "", ORACLE),
    ("linear-row-tile-of-first-rows", CUDA, "static_cast<int64_t>(blockIdx.y) * Tr::kRows",
     "static_cast<int64_t>(blockIdx.y) * 0", "plain", "", ORACLE),
    ("cpu-linear-tail-dropped", DOTS, "if (whole < size) {", "if (false) {", "cpu", "", ORACLE),
    ("cpu-linear-last-rows-as-first", CPU, "panel.x + row * panel.stride", "panel.x", "cpu", "", ORACLE),
    ("cpu-linear-bias-of-first-output", CPU, "bias[output + n]", "bias[n]", "cpu", "", ORACLE),
    ("cpu-linear-bf16-odd-not-masked", DOTS, "as_floats(pairs & static_cast<int32_t>(0xffff0000u))",
     "as_floats(pairs)", "cpu", "", ORACLE),
    ("cpu-linear-one-row-has-another-order", DOTS, "sum[r][n] = fma(xr, pair[n].first, sum[r][n]);",
     "sum[r][n] = kRows == 1 ? xr * pair[n].first + sum[r][n] : fma(xr, pair[n].first, sum[r][n]);",
     "cpu", "", ORACLE),
]  # fmt: skip
