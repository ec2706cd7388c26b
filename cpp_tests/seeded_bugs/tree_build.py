"""Seeded bugs of the builders of draft trees: (id, file, old text, new text, build, says, tests), see mutations.py."""

TOP = "csrc/kernels/common/top_rows.cuh"
TOP_LAW = "csrc/kernels/common/top_rows.h"
ORDER = "csrc/kernels/common/order.h"
MAP = "csrc/kernels/common/column_map.h"
EXPAND = "csrc/kernels/expand_tree/cuda.cu"
EXPAND_PARAMS = "csrc/kernels/expand_tree/params.h"
BUILD = "csrc/kernels/build_tree/cuda.cu"
BUILD_PARAMS = "csrc/kernels/build_tree/params.h"
EXPAND_TESTS = "python_tests/test_expand_tree.py"
NODES = "csrc/kernels/common/tree_nodes.h"
BLOCK = "csrc/kernels/block_tree/cuda.cu"
BLOCK_PARAMS = "csrc/kernels/block_tree/params.h"
BLOCK_TESTS = "python_tests/test_block_tree.py"
BUILD_TESTS = "python_tests/test_build_tree.py"
FAULTS = "python_tests/faults/test_faults_tree_build.py"
RACE_SHARED = r"race on shared memory|uninitialised shared memory"

CPU_TOP = "csrc/kernels/common/cpu_top_rows.h"
CPU_EXPAND = "csrc/kernels/expand_tree/cpu.cpp"
CPU_BUILD = "csrc/kernels/build_tree/cpu.cpp"
CPU_BLOCK = "csrc/kernels/block_tree/cpu.cpp"

BUGS = [
    # Statistics of a tile.
    ("toprow-bad-entries-unnoticed", TOP, "bad = bad || bad_entry;", "", "plain", "", EXPAND_TESTS),
    ("toprow-bad-entries-of-one-lane", TOP, "if (__any_sync(kFullMask, bad)) return", "if (bad) return", "plain", "",
     EXPAND_TESTS),
    ("toprow-places-in-another-order", TOP, "for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {",
     "for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {", "plain", "", EXPAND_TESTS),
    ("toprow-unaligned-rows-in-vectors", TOP, "const bool aligned = is_aligned<kVec>(source);", "const bool aligned = true;",
     "hooks", "misaligned", EXPAND_TESTS),
    ("toprow-columns-past-the-end", TOP, "load_group<kVec>(source + at, columns - at, aligned, x + i);",
     "load_group<kVec>(source + at, kVec, aligned, x + i);", "hooks", "out of bounds", EXPAND_TESTS),
    # The first columns of a block.
    ("toprow-bound-of-the-largest", TOP, "return __shfl_sync(kFullMask, value, k - 1);",
     "return __shfl_sync(kFullMask, value, 0);", "plain", "", EXPAND_TESTS),
    ("toprow-bound-of-the-k-plus-first-lane-unsorted", TOP, "((lane & distance) == 0) == ((lane & width) == 0);",
     "((lane & distance) == 0);", "plain", "", EXPAND_TESTS),
    ("toprow-list-without-barrier", TOP, "        __syncthreads();\n        length = plan.length;",
     "        length = plan.length;", "hooks", RACE_SHARED, EXPAND_TESTS),
    ("toprow-list-overflows", TOP, "if (place < kTopListed) plan.list", "if (true) plan.list", "hooks", "", EXPAND_TESTS),
    ("toprow-overflow-unnoticed", TOP, "(length <= kTopListed && enough)", "enough", "plain", "", EXPAND_TESTS),
    ("toprow-foreign-columns-not-replaced", TOP, "length >= p.k || plan.foreign == 0;", "true;", "plain", "", EXPAND_TESTS),
    ("toprow-foreign-columns-counted", TOP, "p.map.token(column) < 0) z = minus_infinity();",
     "p.map.token(column) < -1) z = minus_infinity();", "plain", "", EXPAND_TESTS),
    ("toprow-one-too-few", TOP, "plan.counts) >= k) {", "plan.counts) >= k - 1) {", "plain", "", EXPAND_TESTS),
    # Parts.
    ("toprow-one-part", TOP, "part < top_parts(p); ++part", "part < 1; ++part", "plain", "", EXPAND_TESTS),
    ("toprow-merge-unreversed", TOP, "__shfl_sync(kFullMask, b, kWarpSize - 1 - lane);", "b;", "plain", "", EXPAND_TESTS),
    ("toprow-merge-unsorted", TOP, "((lane & distance) == 0) == (least < other)", "(least < other)", "plain", "",
     EXPAND_TESTS),
    ("toprow-tiles-past-32-forgotten", TOP, "        sum = sum + tile.sum * exp2_of((tile.max - max) * top.law.scale);",
     "", "plain", "", EXPAND_TESTS),
    ("toprow-tile-sums-unscaled", TOP, "own.sum * exp2_of((own.max - max) * top.law.scale);", "own.sum;", "plain", "",
     EXPAND_TESTS),
    # Numbers.
    ("toprow-no-law-for-infinity", TOP, " || max == -minus_infinity()) return top;", ") return top;", "plain", "",
     BLOCK_TESTS),
    ("toprow-order-of-negatives", ORDER, "(bits >> 31) != 0 ? bits :", "(bits >> 31) != 0 ? ~bits :", "plain", "",
     EXPAND_TESTS),
    ("toprow-minus-zero-apart", ORDER, "float_bits(value + 0.0f);", "float_bits(value);", "plain", "", EXPAND_TESTS),
    ("map-offsets-taken-for-ids", MAP, "(is_offset ? static_cast<uint64_t>(column) : 0u)", "0u", "plain", "",
     EXPAND_TESTS),
    ("map-past-the-vocabulary", MAP, "id >= 0 && id < vocab_size ? id : -1;", "id;", "plain", "", EXPAND_TESTS),
    ("score-of-nothing-is-nan", TOP_LAW, "return is_alive(score) ? score : -bits_float(0x7f800000u);", "return score;",
     "plain", "", EXPAND_TESTS),
    # expand_tree.
    ("expand-one-warp-wins", EXPAND, "for (int w = 1; w < kWarps; ++w) mine", "for (int w = 1; w < 1; ++w) mine", "plain",
     "", EXPAND_TESTS),
    ("expand-winners-too-early", EXPAND, "    __syncthreads();\n\n    // 2. Winners.", "\n    // 2. Winners.", "hooks",
     RACE_SHARED, EXPAND_TESTS),
    ("expand-parent-not-added", EXPAND, "score_of(parent, top.law", "score_of(0.0f, top.law", "plain", "", EXPAND_TESTS),
    ("expand-slot-by-rank", EXPAND_PARAMS, "place < 0 ? -1 : place / p.top.k);", "place < 0 ? -1 : place % p.top.k);",
     "plain", "", EXPAND_TESTS),
    # build_tree: the choice.
    ("build-bad-scores-usable", BUILD_PARAMS, "score > -bits_float(0x7f800000u) && ", "", "plain", "", FAULTS),
    ("build-missing-tokens-usable", BUILD_PARAMS, " && candidate_token(p, b, c) >= 0;", ";", "plain", "", BUILD_TESTS),
    ("build-one-candidate-more", BUILD, "rank < p.nodes.num_nodes - 1 && rank", "rank < p.nodes.num_nodes && rank", "plain", "",
     BUILD_TESTS),
    ("build-sort-of-64", BUILD, "while (sorted < p.num_candidates) sorted *= 2;", "", "plain", "", BUILD_TESTS),
    ("build-bits-set-early", BUILD, "    sort_keys<kThreads>(plan.keys, sorted);\n", "", "hooks", RACE_SHARED, BUILD_TESTS),
    ("build-place-of-its-word", BUILD, "for (int w = 0; w < candidate / 32; ++w) place", "for (int w = 0; w < 1; ++w) place",
     "plain", "", BUILD_TESTS),
    # Parents.
    ("build-parent-out-of-range", BUILD, "parent >= 0 && parent < p.num_candidates && is_chosen(plan, parent)",
     "is_chosen(plan, parent)", "hooks", "", BUILD_TESTS),
    ("build-parent-not-chosen", BUILD, "parent < p.num_candidates && is_chosen(plan, parent)",
     "parent < p.num_candidates", "plain", "", BUILD_TESTS),
    ("build-parents-read-early", BUILD, "    list_places(p, b, count, plan);\n    __syncthreads();\n",
     "    list_places(p, b, count, plan);\n", "hooks", RACE_SHARED, BUILD_TESTS),
    ("build-cycles-are-trees", BUILD, "return at == kRoot;", "return at != kNobody;", "plain", "", BUILD_TESTS),
    ("build-way-up-cut-short", BUILD, "at >= 0 && steps < count; ++steps", "at >= 0 && steps < 30; ++steps", "plain", "",
     BUILD_TESTS),
    # Numbers.
    ("build-children-do-not-wait", BUILD, "if (__syncthreads_or(inside && plan.parent[place] > place) != 0) {",
     "if (__syncthreads_or(0) != 0) {", "plain", "", BUILD_TESTS),
    ("build-highest-first", BUILD, "lowest = warp_min(lowest);", "lowest = warp_max(lowest == kMaxNodes ? -1 : lowest);\n        if (lowest < 0) lowest = kMaxNodes;",
     "plain", "", BUILD_TESTS),
    ("build-turns-without-a-fence", BUILD, "        __syncwarp();  // numbers have been read\n", "", "hooks", RACE_SHARED,
     BUILD_TESTS),
    ("build-nodes-not-cleared", BUILD, "plan.node_candidate[node] = plan.node_parent[node] = -1;", "", "hooks", RACE_SHARED,
     BUILD_TESTS),
    # Results.
    ("build-parents-by-place", BUILD, "parent == kRoot ? 0 : plan.number[parent];", "parent == kRoot ? 0 : parent + 1;",
     "plain", "", BUILD_TESTS),
    ("build-status-of-the-chosen", BUILD, "nodes < p.nodes.num_nodes ? kBadTree", "count + 1 < p.nodes.num_nodes ? kBadTree", "plain",
     "", BUILD_TESTS),
    ("build-padding-below-the-anchor", NODES, "t.positions[b] + (depth > 0 ? depth : 0);", "t.positions[b] + depth;",
     "plain", "", BUILD_TESTS),
    # block_tree.
    ("block-no-siblings", BLOCK, "path_at(p, plan, path.depth, path.parent, path.rank + 1);", "kNoOrder;", "plain", "",
     BLOCK_TESTS),
    ("block-children-of-the-parent", BLOCK, "path_at(p, plan, path.depth + 1, count, 0);",
     "path_at(p, plan, path.depth + 1, path.parent, 0);", "plain", "", BLOCK_TESTS),
    ("block-paths-read-late", BLOCK, "        }\n        __syncwarp();\n    }\n    for", "        }\n    }\n    for",
     "hooks", RACE_SHARED, BLOCK_TESTS),
    ("block-first-of-the-lane", BLOCK, "mine = order < mine ? order : mine;", "mine = i == lane ? order : mine;", "plain",
     "", BLOCK_TESTS),
    ("block-rows-past-the-last", BLOCK, "if (depth > p.top.rows() || rank >= p.top.k)", "if (rank >= p.top.k)", "hooks",
     "", BLOCK_TESTS),
    ("block-ranks-past-the-last", BLOCK, "if (depth > p.top.rows() || rank >= p.top.k)", "if (depth > p.top.rows())",
     "hooks", "", BLOCK_TESTS),
    ("block-padding-has-parents", BLOCK, "for (int i = count + lane; i < most; i += kWarpSize) plan.parent[i] = -1;", "",
     "hooks", RACE_SHARED, BLOCK_TESTS),
    ("block-law-of-the-last-warp", BLOCK, "__syncthreads_or(list_positions(p, b, plan)) != 0;",
     "list_positions(p, b, plan); __syncthreads();", "plain", "", BLOCK_TESTS),
    ("block-ties-by-parent-first", BLOCK_PARAMS, "static_cast<uint32_t>(depth) << 13", "static_cast<uint32_t>(63 - depth) << 13",
     "plain", "", BLOCK_TESTS),
    ("block-dead-paths-taken", BLOCK_PARAMS, "is_alive(score) ? BlockPath", "true ? BlockPath", "plain", "", BLOCK_TESTS),
]  # fmt: skip

# (id, file, old text, new text, tests, objects): see cpu.py.
CPU_BUGS = [
    ("cpu-toprow-tail-lanes", CPU_TOP, "d = row_lanes(x, at, n);", "d = load(x + at);", EXPAND_TESTS, "expand_tree"),
    ("cpu-toprow-places-in-another-order", CPU_TOP, "for (int half = kTopVectors / 2; half > 0; half /= 2) {\n        for (int v = 0; v < half; ++v) {\n            float* here = lanes + v * kLanes;\n            store(here, load(here) + load(here + half * kLanes));",
     "for (int half = kTopVectors / 2; half > 0; half /= 2) {\n        for (int v = 0; v < half; ++v) {\n            float* here = lanes + 2 * v * kLanes;\n            store(lanes + v * kLanes, load(here) + load(here + kLanes));",
     "python_tests/test_expand_tree.py", "expand_tree"),
    ("cpu-toprow-bad-tiles", CPU_TOP, "peak.usable ? peak.max : -kMinusInfinity", "peak.max", EXPAND_TESTS, "expand_tree"),
    ("cpu-toprow-foreign-kept", CPU_TOP, "if (!outside) return;", "return;", EXPAND_TESTS, "expand_tree"),
    ("cpu-expand-dead-token", CPU_EXPAND, "is_alive(score) ? list.token[i] : -1;", "i < list.count ? list.token[i] : -1;",
     EXPAND_TESTS, "expand_tree"),
    ("cpu-nodes-own-bit", NODES, "above | node_bit(node, word)", "above", BUILD_TESTS, "build_tree"),
    ("cpu-block-greedy-depth", CPU_BLOCK, "        add(path.depth, path.parent, path.rank + 1);\n", "", BLOCK_TESTS, "block_tree"),
    ("cpu-block-nan-unflagged", CPU_BLOCK, "lists[g].has_law ? 0 : kDraftNan;", "0;", BLOCK_TESTS, "block_tree"),
    ("cpu-build-one-tie-too-few", CPU_BUILD, "(!tie || ties > 0);", "(!tie || ties > 1);", BUILD_TESTS, "build_tree"),
    ("cpu-build-limit-of-all", CPU_BUILD, "while (low < limit && up_to > wanted) {", "while (low < limit && up_to > 2 * wanted) {",
     BUILD_TESTS, "build_tree"),
    ("cpu-build-strangers-are-roots", CPU_BUILD, "inside ? c.place_of[parent] : kNobody;", "inside ? c.place_of[parent] : kRoot;",
     BUILD_TESTS, "build_tree"),
    ("cpu-build-children-do-not-wait", CPU_BUILD, "        in_order = in_order && c.parent[i] <= i;\n", "", BUILD_TESTS,
     "build_tree"),
    ("cpu-build-turns-go-on", CPU_BUILD, "take_if_ready(i) ? 0 : i + 1", "take_if_ready(i) ? i + 1 : i + 1", BUILD_TESTS,
     "build_tree"),
]  # fmt: skip
