"""Seeded bugs of verify_attention: (id, file, old text, new text, build, says), see mutations.py."""

# Their tests run bf16 at head_dim 64 and float32, so only these objects need the bug.
TESTS = "python_tests/test_emulated_attention.py"
OBJECTS = r"verify_attention/(instances/attend_bf16_64|cuda)\.cu"

_FOLDER = "csrc/kernels/verify_attention/"
SCHEDULE, FOLD, LAYOUT, STEPS, KERNEL, COMBINE, SIMT = (
    f"{_FOLDER}{name}.cuh"
    for name in ("schedule", "fold", "layout", "steps", "kernel", "combine", "simt")
)
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
     "add_sink(p, static_cast<int>(index % p.q.size[1]), sum);", "add_sink(p, 0, sum);", "plain", ""),
    ("attention-combine-without-sink", COMBINE,
     "add_sink(p, static_cast<int>(index % p.q.size[1]), sum);", "1.0f;", "plain", ""),
    # Softmax and sums.
    ("attention-values-not-rescaled", STEPS, "sums.o[r][n][i] *= scale[r][i / 2];", "", "plain", ""),
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
    ("attention-nan-is-dropped", STEPS, "o[i % 2 * 2] += to_float(low);", "o[i % 2 * 2] += 0.0f;", "plain",
     "", "python_tests/test_verify_attention.py::later_rows", OBJECTS),
]  # fmt: skip
