"""Seeded bugs of inject_kv and fuse_features: (id, file, old text, new text, build, says, tests), see mutations.py."""

INJECT = "csrc/kernels/inject_kv/cuda.cu"
INJECT_CPU = "csrc/kernels/inject_kv/cpu.cpp"
INJECT_RULES = "csrc/kernels/inject_kv/params.h"
STORE = "csrc/kernels/common/kv_store.h"
INJECT_TESTS = "python_tests/test_inject_kv.py"
INJECT_FAULTS = "python_tests/faults/test_faults_inject.py"
INJECT_COUNTED = "python_tests/test_emulated_inject.py"
FUSE = "csrc/kernels/fuse_features/cuda.cu"
FUSE_CPU = "csrc/kernels/fuse_features/cpu.cpp"
PARTS = "csrc/kernels/row_linear/params.h"
LINEAR = "csrc/kernels/row_linear/cuda.cu"
SQUARES = "csrc/kernels/common/squares.h"
FUSE_TESTS = "python_tests/test_fuse_features.py"
RACE_SHARED = "race on shared memory|uninitialised shared memory"
BOUNDS = "out of bounds"

BUGS = [
    # Which rows are written.
    ("inject-row-behind-commit-rows", INJECT_RULES, "row - rows.first < end", "row - rows.first <= end",
     "plain", "", f"{INJECT_TESTS}::commit"),
    ("inject-commit-rows-of-the-next-request", INJECT_RULES, ": int64_t{commit_rows[b]};",
     ": int64_t{commit_rows[b + 1 < batch ? b + 1 : b]};", "plain", "", f"{INJECT_TESTS}::commit"),
    ("inject-rows-of-no-request", INJECT_RULES, "if (b < 0 || b >= batch) return false;",
     "if (b < 0 || b >= batch) return true;", "plain", "", f"{INJECT_TESTS}::commit"),
    ("inject-position-behind-the-tables", INJECT, "position >= p.max_position) return;",
     "position > p.max_position) return;", "hooks", BOUNDS, f"{INJECT_FAULTS}::G01"),
    ("inject-negative-position", INJECT, "slot < 0 || position < 0 ||", "slot < 0 ||", "hooks", BOUNDS,
     f"{INJECT_FAULTS}::G01"),
    ("inject-requests-of-the-first-threads", INJECT, "first <= committed.batch; first += kThreads",
     "first < 1; first += kThreads", "plain", "", f"{INJECT_TESTS}::many_requests"),
    ("inject-decision-read-early", INJECT, "has = committed.has(row, offsets);\n    __syncthreads();",
     "has = committed.has(row, offsets);", "hooks", RACE_SHARED, f"{INJECT_TESTS}::commit"),
    # What is written.
    ("inject-interleaved-as-neox", INJECT_RULES, "return interleaved ? ", "return pairs < 0 ? ", "plain", "",
     f"{INJECT_TESTS}::oracle"),
    ("inject-turned-the-other-way", INJECT_RULES, "a * c - b * s;\n    b = b * c + a * s;",
     "a * c + b * s;\n    b = b * c - a * s;", "plain", "", f"{INJECT_TESTS}::oracle"),
    ("inject-eps-outside-the-root", INJECT, "static_cast<float>(size) + p.eps);",
     "static_cast<float>(size)) + p.eps;", "plain", "", f"{INJECT_TESTS}::nan_and_zeros"),
    ("inject-channels-behind-the-pairs-not-scaled", INJECT, "x[c] = x[c] * factor * weight[c];",
     "x[c] = x[c] * weight[c];", "plain", "", f"{INJECT_TESTS}::oracle"),
    ("inject-weights-of-the-first-layer", INJECT, "weights + l * size, cos", "weights, cos", "plain", "",
     f"{INJECT_TESTS}::oracle"),
    ("inject-weights-of-the-first-group", INJECT, "row_of(all, first_layer + l)",
     "row_of(all, l)", "plain", "", f"{INJECT_TESTS}::layers"),
    ("inject-second-launch-of-first-caches", INJECT, "p.layers + args.first_layer", "p.layers", "plain", "",
     f"{INJECT_TESTS}::layers"),
    ("inject-v-with-scale-of-k", INJECT, "p.v_scale.layer(layer)[k - heads]",
     "p.k_scale.layer(layer)[k - heads]", "plain", "", f"{INJECT_TESTS}::fp8"),
    ("inject-scale-of-a-layer-as-of-a-head", STORE, "data + l * layer_stride, head_stride",
     "data + l * head_stride, layer_stride", "plain", "", f"{INJECT_TESTS}::fp8"),
    ("inject-fp8-rounded-twice", INJECT, "for_pieces(static_cast<const float*>(x), size, args.in_quads, lane,\n"
     "                   [&](int c, const auto& piece) { store_piece(to + c, piece, scales[i]); });",
     "for (int c = lane; c < size; c += kWarpSize) to[c] = stored<C>(from_float<T>(x[c]), scales[i]);",
     "plain", "", f"{INJECT_TESTS}::fp8"),
    # How it is written.
    ("inject-pointers-of-caches-not-looked-at", INJECT, "uint64_t all = reinterpret_cast<uintptr_t>(view.data);",
     "uint64_t all = 0;", "hooks", "misaligned", f"{INJECT_TESTS}::four_channels"),
    ("inject-strides-of-caches-not-looked-at", INJECT, "ok = ok && in_quads(p.layers[l].k, dtype_size(p.cache_dtype)) &&",
     "ok = ok &&", "hooks", "misaligned", f"{INJECT_TESTS}::four_channels"),
    ("inject-head-read-before-it-is-there", INJECT, "        __syncwarp();\n        norm_and_turn", "        norm_and_turn",
     "hooks", RACE_SHARED, f"{INJECT_TESTS}::oracle"),
    ("inject-turned-before-all-have-read", INJECT, "    __syncwarp();  // every lane has read what others now write\n",
     "", "hooks", RACE_SHARED, f"{INJECT_TESTS}::oracle"),
    ("inject-uncommitted-rows-read", INJECT, "if (!is_committed(p.committed, row)) return;", "const bool committed = "
     "is_committed(p.committed, row);\n    if (!committed && p.kv.size[4] > 8) return;", "hooks", "", INJECT_COUNTED),
    # Parts of k, and the norm.
    ("fuse-part-that-ends-here", PARTS, "k >= begin[i + 1]", "k > begin[i + 1]", "plain", "",
     f"{FUSE_TESTS}::concatenation"),
    ("fuse-columns-of-a-part-from-its-start", PARTS, "+ (k - begin[i]), part[i]", "+ k % part[i].size[1], part[0]",
     "plain", "", f"{FUSE_TESTS}::strides"),
    ("fuse-alignment-of-the-first-part-only", LINEAR, "for (int i = 0; i < p.x.count; ++i) {",
     "for (int i = 0; i < 1; ++i) {", "plain", "", f"{FUSE_TESTS}::strides"),
    ("fuse-elements-of-one-part", LINEAR, "*source.template column<T>(k + e).row(first + row)",
     "column.row(first + row)[e]", "plain", "", f"{FUSE_TESTS}::concatenation"),
    ("fuse-sums-rounded-before-the-norm", PARTS, "p.y.as<float>().at(row)[n] = sum;",
     "p.y.as<float>().at(row)[n] = to_float(from_float<T>(sum));", "plain", "", f"{FUSE_TESTS}::rounded"),
    ("fuse-mean-of-the-first-threads", FUSE, "for (int64_t n = threadIdx.x; n < size; n += kThreads) sum +=",
     "for (int64_t n = threadIdx.x; n < size; n += size) sum +=", "plain", "", f"{FUSE_TESTS}::oracle"),
    ("fuse-mean-of-columns-of-k", FUSE, "/ static_cast<float>(size)", "/ static_cast<float>(size + 1)", "plain", "",
     f"{FUSE_TESTS}::oracle"),
    ("fuse-eps-outside-the-root", FUSE, "sqrtf(mean + p.eps)", "(sqrtf(mean) + p.eps)", "plain", "",
     f"{FUSE_TESTS}::eps"),
]  # fmt: skip

# Of the CPU kernels: (id, file, old text, new text, tests).
CPU_BUGS = [
    ("cpu-inject-position-behind-the-tables", INJECT_CPU, "p.positions[row] >= p.max_position",
     "p.positions[row] > p.max_position + 1000", f"{INJECT_FAULTS}::G01"),
    ("cpu-inject-tail-of-a-head-not-widened", INJECT_CPU, "for (; c < count; ++c) to[c] = to_float(from[c]);", "",
     f"{INJECT_TESTS}::oracle"),
    ("cpu-inject-angles-of-the-row-number", INJECT_CPU, "widen_row(p.sin, p.positions[row],", "widen_row(p.sin, row,",
     f"{INJECT_TESTS}::oracle"),
    ("cpu-inject-v-at-the-place-of-k", INJECT_CPU, "v.data + slot_offset(v, p.slots[row])", "v.data + place",
     f"{INJECT_TESTS}::oracle"),
    ("cpu-inject-commit-ignored", INJECT_CPU, "return p.committed.has(row, offsets);", "return offsets > 0;",
     f"{INJECT_TESTS}::commit"),
    ("cpu-inject-half-of-the-sum", SQUARES, "return sum_lanes(low + high);", "return 2.0f * sum_lanes(low);",
     f"{INJECT_TESTS}::oracle"),
    ("cpu-fuse-piece-over-a-border", PARTS, "if (first.left >= n) return first.row(r);",
     "if (first.left >= 0) return first.row(r);", f"{FUSE_TESTS}::concatenation"),
    ("cpu-fuse-rest-of-a-row-not-squared", SQUARES, "if (i < count) {", "if (false) {", f"{FUSE_TESTS}::oracle"),
    ("cpu-fuse-eps-forgotten", FUSE_CPU, "mean + p.eps", "mean", f"{FUSE_TESTS}::finite"),
    ("cpu-fuse-weight-not-applied", FUSE_CPU, "s[n] * factor * weight", "s[n] * factor", f"{FUSE_TESTS}::oracle"),
]  # fmt: skip
