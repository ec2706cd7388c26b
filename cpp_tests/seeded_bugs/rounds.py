"""Seeded bugs of compact_kv and next_round: (id, file, old text, new text, build, says, tests), see
mutations.py."""

COMPACT = "csrc/kernels/compact_kv/cuda.cu"
MOVES = "csrc/kernels/compact_kv/params.h"
PAGED = "csrc/kernels/common/paged.h"
ROUND = "csrc/kernels/next_round/cuda.cu"
RULES = "csrc/kernels/next_round/params.h"
COMPACT_TESTS = "python_tests/test_compact_kv.py"
ROUND_TESTS = "python_tests/test_next_round.py"
FAULTS = "python_tests/faults/test_faults_round.py"
TREE_ROUNDS = "python_tests/test_tree_rounds.py"
RACE = "race on global memory"
RACE_SHARED = "race on shared memory|uninitialised shared memory"
BOUNDS = "out of bounds"

BUGS = [
    # Which places move.
    ("compact-row-of-a-neighbour", MOVES, "row < 0 || row >= rows.count || row == i",
     "row < 0 || row == i", "hooks", f"{RACE}|{BOUNDS}", COMPACT_TESTS),
    ("compact-slot-of-nothing-written", MOVES, "source < 0 || target < 0 ? none", "source < 0 ? none",
     "hooks", f"{BOUNDS}|misaligned", COMPACT_TESTS),
    ("compact-target-of-request-0", MOVES, "a.slots[rows.first + i]", "a.slots[i]", "plain", "",
     TREE_ROUNDS),
    ("compact-target-of-a-neighbour", MOVES,
     "    if (last > rows.count - 1) last = rows.count - 1;\n", "", "plain", "", COMPACT_TESTS),
    ("compact-path-past-its-width", MOVES,
     "    if (last > a.path.size[1] - 1) last = a.path.size[1] - 1;\n", "", "hooks", BOUNDS,
     COMPACT_TESTS),
    ("compact-last-node-forgotten", MOVES, "last < 0 ? 0 : last + 1;", "last < 0 ? 0 : last;", "plain",
     "", TREE_ROUNDS),
    ("compact-gaps-between-heads-ignored", MOVES,
     "bytes.size[2] == 1 || bytes.stride[2] == bytes.size[3]", "bytes.size[2] > 0", "plain", "",
     COMPACT_TESTS),
    ("compact-slot-behind-the-cache", PAGED, "slot >= cache.size[0] * page_size",
     "slot > cache.size[0] * page_size", "hooks", BOUNDS, FAULTS),
    # How they move.
    ("compact-scatter-before-gather", COMPACT, "__syncthreads();  // all sources are read", "//",
     "hooks", RACE, COMPACT_TESTS),
    ("compact-request-read-early", COMPACT, "    __syncthreads();\n    const int unit",
     "    const int unit", "hooks", RACE_SHARED, COMPACT_TESTS),
    ("compact-every-step-is-the-first", COMPACT, "rows, begin + i, cache)", "rows, i, cache)", "plain",
     "", COMPACT_TESTS),
    ("compact-units-skipped", COMPACT, "first += units_at_once", "first += units_at_once + 1", "plain",
     "", COMPACT_TESTS),
    ("compact-heads-without-stride", COMPACT, "head * cache.stride[2] +", "head * cache.size[3] +",
     "plain", "", COMPACT_TESTS),
    ("compact-pointer-alignment", COMPACT, "reinterpret_cast<uintptr_t>(cache.data) |\n", "", "hooks",
     "misaligned", COMPACT_TESTS),
    ("compact-row-end-cut-off", COMPACT, " | cache.size[3]);", ");", "plain", "", COMPACT_TESTS),
    ("compact-second-launch-of-first-caches", COMPACT, "p.caches + first", "p.caches", "plain", "",
     COMPACT_TESTS),
    # What is emitted.
    ("round-stop-token-dropped", ROUND, "end = j + 1;", "end = j;", "plain", "", ROUND_TESTS),
    ("round-lanes-disagree", ROUND, "return warp_min(end);", "return end;", "plain", "", ROUND_TESTS),
    ("round-negative-id-emitted", ROUND, "if (token < 0) {", "if (false) {", "plain", "", ROUND_TESTS),
    ("round-first-token-is-the-anchor", ROUND, "token_at(p, b, emitted - 1)", "token_at(p, b, 0)",
     "plain", "", TREE_ROUNDS),
    ("round-stop-goes-on", ROUND, "(is_stop(p, anchor) || emitted", "(emitted", "plain", "", ROUND_TESTS),
    ("round-warp-without-request", ROUND, "    if (b >= p.batch) return;\n", "", "hooks", BOUNDS,
     ROUND_TESTS),
    ("round-every-lane-writes", ROUND, "    if (lane == 0) {\n", "    {\n", "hooks", RACE, ROUND_TESTS),
    ("round-rows-skipped", ROUND, "j < p.block_len; j += kWarpSize", "j < p.block_len; j += 64", "plain",
     "", ROUND_TESTS),
    ("round-anchor-not-counted", RULES, "- p.seq_lens[b] - 1;", "- p.seq_lens[b];", "plain", "",
     ROUND_TESTS),
    ("round-tokens-past-the-row", RULES,
     "    if (most > p.tokens.size[1]) most = p.tokens.size[1];\n", "", "hooks", BOUNDS, ROUND_TESTS),
    ("round-negative-count", RULES, "    if (most < 1) most = 1;\n", "", "plain", "", ROUND_TESTS),
    ("round-page-past-the-table", RULES, "place < 0 || column >= p.block_table.size[1]", "place < 0",
     "plain", "", ROUND_TESTS),
    ("round-negative-page", RULES, "return page < 0 ? -1 : page", "return page", "plain", "",
     ROUND_TESTS),
    ("round-slot-at-max-len", RULES, "row.position >= limit_of(p, b)", "row.position > limit_of(p, b)",
     "plain", "", ROUND_TESTS),
    ("round-page-in-32-bit", RULES, "const int64_t page = *p.block_table.at(b, column);",
     "const int32_t page = *p.block_table.at(b, column) * static_cast<int32_t>(p.page_size) / p.page_size;",
     "plain", "", FAULTS),
    ("round-length-wraps", RULES, "constexpr int64_t kLongest = 0x7fffffff;",
     "constexpr int64_t kLongest = int64_t{1} << 62;", "plain", "", ROUND_TESTS),
]  # fmt: skip
