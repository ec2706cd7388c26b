"""Seeded bugs of markov_draft's table: (id, file, old text, new text, build, says, tests), see mutations.py."""

SCAN = "csrc/kernels/markov_draft/cuda.cu"
BOUNDS = "csrc/kernels/markov_draft/bounds.cuh"
CPU = "csrc/kernels/markov_draft/cpu.cpp"
CPU_BOUNDS = "csrc/kernels/markov_draft/cpu_bounds.h"
TESTS = "python_tests/test_markov_pruning.py"
SAME = f"{TESTS}::same_tokens"
ALIGNED = f"{TESTS}::loses_most"
COUNTED = "python_tests/test_emulated_markov.py::table"
RACE_SHARED = "race on shared memory|uninitialised shared memory"

BUGS = [
    # What rounding lost.
    ("prune-row-error-dropped", BOUNDS, "fmaf(row[kMarkovTile], v.norm,", "fmaf(0.0f, v.norm,",
     "plain", "", ALIGNED),
    ("prune-vector-error-dropped", BOUNDS, "row[2 * kMarkovTile] * v.lost)", "0.0f)", "plain", "",
     ALIGNED),
    ("prune-half-the-row-error", BOUNDS, "fmaf(row[kMarkovTile], v.norm,",
     "fmaf(0.25f * row[kMarkovTile], v.norm,", "plain", "", ALIGNED),
    ("prune-transform-not-orthogonal", BOUNDS, "low[half] = a - b;", "low[half] = a;", "plain", "",
     SAME),
    ("prune-codes-in-another-order", BOUNDS, "<< (8 * i);", "<< (24 - 8 * i);", "plain", "", SAME),
    # Which tiles are left.
    ("prune-limit-is-an-upper-bound", BOUNDS, "warp_max(bounds.low == bounds.low ? bounds.low : -infinity)",
     "warp_max(bounds.high)", "plain", "", SAME),
    ("prune-nan-is-left-out", BOUNDS, "if (!(bounds.high < infinity)) bounds.high = infinity;", "",
     "plain", "", SAME),
    ("prune-equal-is-left-out", BOUNDS, "high >= limit && high", "high > limit && high", "plain", "",
     SAME),
    ("prune-columns-outside-of-the-law", BOUNDS, "column < p.columns && markov_token(p, column) >= 0",
     "column < p.columns", "plain", "", SAME),
    ("prune-beside-a-request-that-samples", SCAN, "args.prunes && !some_request_samples(p)",
     "args.prunes", "plain", "", SAME),
    ("prune-reads-what-was-not-computed", SCAN,
     "i * kWarpSize < left && (needed >> (i * kWarpSize + lane) / kMarkovTile & 1u) != 0",
     "i * kWarpSize < left", "hooks", RACE_SHARED, SAME),
    ("prune-nothing", BOUNDS, "__ballot_sync(kFullMask, high >= limit && high > -infinity)", "~0u",
     "hooks", "", COUNTED),
    # Barriers and memory.
    ("prune-codes-of-ended-requests", BOUNDS, "words[warp * words_of(p) + w] = 0;", "continue;",
     "hooks",
     RACE_SHARED, f"{TESTS}::ended"),
    ("prune-bounds-without-barrier", BOUNDS, "        __syncthreads();\n\n        // 2. Bounds",
     "        // 2. Bounds", "hooks", RACE_SHARED, SAME),
    ("prune-lows-without-barrier", BOUNDS,
     "        __syncthreads();\n        if (threadIdx.x < requests && alive",
     "        if (threadIdx.x < requests && alive", "hooks", RACE_SHARED, f"{TESTS}::alone"),
    ("prune-butterflies-without-barrier", BOUNDS, "            __syncwarp();\n        }\n        at += size;",
     "        }\n        at += size;", "hooks", RACE_SHARED, SAME),
    ("prune-codes-at-odd-addresses", SCAN,
     "if (reinterpret_cast<uintptr_t>(p.table.codes) % 16 != 0) p.table.codes = nullptr;", "", "hooks",
     "misaligned", f"{TESTS}::elsewhere"),
    # CPU.
    ("cpu-prune-row-error-dropped", CPU_BOUNDS, "fma(load(rows + kLanes), set1(v.norm),",
     "fma(load(rows + kLanes), set1(0.0f),", "cpu", "", ALIGNED),
    ("cpu-prune-vector-error-dropped", CPU_BOUNDS, "load(rows + 2 * kLanes) * set1(v.lost))",
     "load(rows + 2 * kLanes) * set1(0.0f))", "cpu", "", ALIGNED),
    ("cpu-prune-nan-is-left-out", CPU_BOUNDS,
     "lane_bits(high < set1(INFINITY)) == 0xffffu ? max_lanes(high) : INFINITY", "max_lanes(high)", "cpu", "", SAME),
    ("cpu-prune-equal-is-left-out", CPU_BOUNDS, "high >= limit_[b] && high", "high > limit_[b] && high",
     "cpu", "", SAME),
    ("cpu-prune-columns-outside-of-the-law", CPU_BOUNDS, "if (markov_token(p_, begin + i) >= 0) some[i]",
     "some[i]", "cpu", "", SAME),
    ("cpu-prune-beside-a-request-that-samples", CPU, "greedy = !alive(b) || markov_law(p_, b).greedy;",
     "greedy = true;", "cpu", "", SAME),
    ("cpu-prune-transform-not-orthogonal", CPU_BOUNDS, "x[j + half] = a - b;", "x[j + half] = a;", "cpu",
     "", SAME),
]  # fmt: skip
