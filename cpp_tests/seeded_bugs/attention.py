"""Seeded bugs of verify_attention: (id, file, old text, new text, build, says), see mutations.py."""

# Their tests run bf16 at head_dim 64 and float32, so only these objects need the bug.
TESTS = "python_tests/test_emulated_attention.py"
OBJECTS = r"verify_attention/(instances/attend_bf16_64|cuda)\.cu"

_FP8_TESTS = "python_tests/test_attention_fp8.py"
_FP8 = r"verify_attention/(instances/attend_(bf16|f16)_f8_(64|128)|cuda)\.cu"
_FP8_80 = r"verify_attention/(instances/attend_(bf16|f16)_f8_80|cuda)\.cu"
_OTHER_DIMS = r"verify_attention/(instances/attend_bf16_(80|96)|cuda)\.cu"

_FOLDER = "csrc/kernels/verify_attention/"
SCHEDULE, FOLD, LAYOUT, STEPS, VALUES, KERNEL, COMBINE, SIMT, FP8 = (
    f"{_FOLDER}{name}.cuh"
    for name in (
        "schedule", "fold", "layout", "steps", "values", "kernel", "combine", "simt", "fp8",
    )
)  # fmt: skip
RACE = r"race on shared memory|uninitialised shared memory"
IN_FLIGHT = "cp.async in flight"

BUGS = [
    # Pipeline: barriers, wait counts, stages.
    ("attention-keys-without-barrier", KERNEL,
     "at.sync_part();\n            stream.copy_values(", "stream.copy_values(", "hooks", RACE),
    ("attention-values-without-barrier", KERNEL,
     "later.sync_part();\n            stream.next_tile(", "stream.next_tile(", "hooks", RACE),
    ("attention-wait-one-group-short", KERNEL,
     "kPending = 2 * kStages - 2;", "kPending = 2 * kStages - 1;", "hooks", IN_FLIGHT),
    ("attention-query-without-barrier", KERNEL,
     "cp_async_wait<kPending + 1>();\n        __syncthreads();", "cp_async_wait<kPending + 1>();",
     "hooks", RACE),
    ("attention-refills-stage-in-use", KERNEL, "(stage + kStages - 1) % kStages, at)", "stage, at)",
     "hooks", IN_FLIGHT),
    ("attention-task-without-barrier", KERNEL, "        __syncthreads();\n        Owned<Tr> owned;",
     "        Owned<Tr> owned;", "hooks", RACE),
    ("attention-task-overwritten", KERNEL,
     "if (task.stop == task.range_end) return;\n        __syncthreads();",
     "if (task.stop == task.range_end) return;", "hooks", RACE),
    # Masks.
    ("attention-sees-the-next-token", SCHEDULE, "min(r.prefix + j + 1, r.kv_len)",
     "min(r.prefix + j + 2, r.kv_len)", "plain", ""),
    ("attention-packed-row-as-row", LAYOUT, "return packed / group_size(p);",
     "return packed;", "plain", ""),
    ("attention-unseen-places-read", STEPS, "token >= task.begin && token < task.limit;",
     "token >= task.begin && token < task.item.num_segments * kSegmentTokens;", "hooks", ""),
    ("attention-bad-page-read", STEPS, "exists = page >= 0 && page < p.k_cache.size[0];",
     "exists = page >= 0;", "hooks", "out of bounds"),
    ("attention-tree-and-window-not-applied", STEPS,
     "    if (has_holes(args.p)) hide_holes<Tr>(s, args.p, task.item, first_token, at);\n", "", "plain",
     ""),
    ("attention-holes-of-another-row", STEPS, "i / 8 * 16 + i / 2 % 2 * 8 + at.lane / 4;",
     "i / 8 * 16 + at.lane / 4;", "plain", ""),
    ("attention-places-before-the-window-read", STEPS, "token >= task.begin && token < task.limit;",
     "token < task.limit;", "hooks", ""),
    ("attention-window-edge-not-masked", LAYOUT,
     "task.all_begin = max(task.all_begin, static_cast<int>(window.begin));", "", "plain", ""),
    # Soft cap and sinks.
    ("attention-cap-not-applied", STEPS, "args.scale.cap * tanhf(s[r][i / 4][i % 4]);",
     "args.scale.cap * s[r][i / 4][i % 4];", "plain", ""),
    ("attention-sink-of-another-head", KERNEL,
     "add_sink(p, static_cast<int>(index % p.q.size[1]), sum) *", "add_sink(p, 0, sum) *", "plain", ""),
    ("attention-combine-without-sink", COMBINE,
     "add_sink(p, static_cast<int>(index % p.q.size[1]), sum) *", "1.0f *", "plain", ""),
    # Softmax and sums.
    ("attention-values-not-rescaled", STEPS, "*= scale[r][i / 2];", "*= 1.0f;", "plain", ""),
    ("attention-mass-not-rescaled", STEPS, "fmaf(sums.l[r][h], scale[r][h], own);",
     "sums.l[r][h] + own;", "plain", ""),
    ("attention-maximum-of-half-a-row", STEPS,
     "            m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));\n", "", "plain", ""),
    ("attention-mass-of-half-a-row", KERNEL,
     "            l += __shfl_xor_sync(kFullMask, l, 2);\n", "", "plain", ""),
    ("attention-empty-row-is-nan", FOLD, "return m == minus_infinity() ? 0.0f : m;", "return m;",
     "plain", ""),
    # Merge, fold, second launch.
    ("attention-exchange-without-barrier", KERNEL,
     "Tr::kSliceColumns + column) = quad;\n        }\n        __syncthreads();",
     "Tr::kSliceColumns + column) = quad;\n        }", "hooks", RACE),
    ("attention-slice-over-sums", KERNEL, "partial[row] = segment;\n    }\n    __syncthreads();",
     "partial[row] = segment;\n    }", "hooks", RACE),
    ("attention-fold-without-scale", FOLD, "fmaf(segment, weights.new_part, sum * weights.old_part);",
     "fmaf(segment, weights.new_part, sum);", "plain", ""),
    ("attention-partial-in-wrong-slot", KERNEL, "index - range_begin);",
     "index - item.first - 1);", "hooks", ""),
    ("attention-combine-skips-a-segment", COMBINE, "for (int64_t i = cut;",
     "for (int64_t i = cut + 1;", "plain", ""),
    # What only shows in memory traffic, and rows of no request.
    ("attention-tile-not-swizzled", LAYOUT, "(row * kChunks + (chunk ^ (row / (8 / kSwap) & (kSwap - 1)))) * kElements;",
     "(row * kChunks + chunk) * kElements;", "hooks", "wavefronts"),
    ("attention-padding-row-forgotten", SCHEDULE,
     "covered_until(batch) + static_cast<int>(blockIdx.x);",
     "covered_until(batch) + 1 + static_cast<int>(blockIdx.x);", "plain", ""),
]  # fmt: skip

# With the tests that notice.
VALUE_BUGS = [
    ("attention-nan-of-later-rows", KERNEL,
     "add_not_finite<Tr>(sums, values, args, task, valid, first_token, later);", "false;", "plain", "",
     "python_tests/test_verify_attention.py::later_rows", OBJECTS),
    ("attention-nan-is-dropped", VALUES, "o[i % 2 * 2] += to_float(low);", "o[i % 2 * 2] += 0.0f;", "plain",
     "", "python_tests/test_verify_attention.py::later_rows", OBJECTS),
    ("attention-unaligned-slice-written", KERNEL,
     "slice * Tr::kSliceColumns + column() < Tr::kValueDim;", "true;", "plain", "",
     "python_tests/test_verify_attention.py::other_head_dims", _OTHER_DIMS),
    ("attention-copies-past-a-row", STEPS, "if (chunk + kLanes > kChunks && c >= kChunks) continue;", "",
     "hooks", "", "python_tests/test_verify_attention.py::other_head_dims", _OTHER_DIMS),
    ("attention-combine-mixes-rows", COMBINE,
     "    if (thread >= Combine::kRowsPerBlock * Combine::kLanesPerRow) return;\n", "", "hooks", "",
     "python_tests/test_verify_attention.py::other_head_dims", _OTHER_DIMS),
    ("attention-simt-column-past-the-row", SIMT, "lane + 32 * i < kDim;", "true;", "plain", "",
     "python_tests/test_verify_attention.py::other_head_dims", r"verify_attention/cuda\.cu"),
    ("attention-simt-second-columns-lost", SIMT, "const int column = c * Tr::kThreads + thread;\n            if",
     "const int column = thread;\n            if", "plain", "",
     "python_tests/test_verify_attention.py::other_head_dims", r"verify_attention/cuda\.cu"),
    # fp8 caches.
    ("attention-fp8-k-scale-of-head-0", KERNEL, "args.p.k_scale[item.head]", "args.p.k_scale[0]", "plain",
     "", f"{_FP8_TESTS}::matches", _FP8),
    ("attention-fp8-v-scale-is-that-of-k", KERNEL, "sum) * p.v_scale[item.head];",
     "sum) * p.k_scale[item.head];", "plain", "", f"{_FP8_TESTS}::own_scale", _FP8),
    ("attention-fp8-combine-without-scale", COMBINE, "sum) * p.v_scale[item.head];", "sum);", "plain", "",
     f"{_FP8_TESTS}::matches", _FP8),
    ("attention-fp8-simt-scale-of-query-head", SIMT, "p.k_scale[kv_head];", "p.k_scale[head % 2];", "plain",
     "", f"{_FP8_TESTS}::matches", r"verify_attention/cuda\.cu"),
    ("attention-fp8-channels-in-order", FP8, "(x.x & 0xffffu) | x.y << 16,",
     "x.x,", "plain", "", f"{_FP8_TESTS}::matches", _FP8),
    ("attention-fp8-odd-is-even", VALUES, "{widen_odd<T>(upper), widen_odd<T>(lower)}",
     "{widen_even<T>(upper), widen_even<T>(lower)}", "plain", "", f"{_FP8_TESTS}::code_of_v", _FP8),
    ("attention-fp8-nan-is-480", FP8, "(magnitude + nan * Tr::kFill)", "magnitude", "plain", "",
     f"{_FP8_TESTS}::code_of_k", _FP8),
    ("attention-fp8-sign-lost", FP8, "(word & 0x80008000u) |", "", "plain", "",
     f"{_FP8_TESTS}::code_of_v", _FP8),
    ("attention-fp8-nan-of-later-rows", FP8, "return word & ~((nan_bytes(word) >> 7) * 0xffu);",
     "return word;", "plain", "", f"{_FP8_TESTS}::later_rows", _FP8_80),
    ("attention-fp8-nan-in-another-column", VALUES, "[i % 2 * 2 + c / 2] = bits_float(0x7fc00000u);",
     "[i % 2 * 2 + c % 2] = bits_float(0x7fc00000u);", "plain", "", f"{_FP8_TESTS}::later_rows", _FP8_80),
    ("attention-fp8-query-chunks-conflict", STEPS, "!= (static_cast<int>(threadIdx.x) / 8 % 2 != 0);",
     ";", "hooks", "wavefronts", "python_tests/test_emulated_attention.py::streams_each",
     r"verify_attention/(instances/attend_bf16_f8_\w+|cuda)\.cu"),
]  # fmt: skip
