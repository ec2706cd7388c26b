"""Seeded bugs of schedule_prefix: (id, file, old text, new text, build, says, tests), see mutations.py."""

SCHEDULE = "csrc/kernels/schedule_prefix/cuda.cu"
SCHEDULE_CPU = "csrc/kernels/schedule_prefix/cpu.cpp"
RULES = "csrc/kernels/schedule_prefix/params.h"
SCHEDULE_TESTS = "python_tests/test_schedule_prefix.py"
RACE_SHARED = "race on shared memory|uninitialised shared memory"

BUGS = [
    # Which candidates, in which order.
    (
        "schedule-nan-is-one",
        RULES,
        "c > 0.0f ? (c < 1.0f ? c : 1.0f) : 0.0f",
        "c < 0.0f ? 0.0f : (c < 1.0f ? c : 1.0f)",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-ties-by-request",
        RULES,
        "static_cast<uint64_t>(place) << 16 |\n           static_cast<uint64_t>(request)",
        "static_cast<uint64_t>(place) |\n           static_cast<uint64_t>(request) << 16",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-table-past-its-end",
        RULES,
        "rows < last ? rows : last",
        "rows",
        "hooks",
        "out of bounds",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-zero-is-admitted",
        SCHEDULE,
        "} else if (survival > 0.0f) {\n                keys",
        "} else {\n                keys",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-floor-not-in-tau",
        SCHEDULE,
        "tau += survival_units(survival);\n            } else",
        "} else",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    # Where admission ends.
    (
        "schedule-looks-ahead",
        SCHEDULE,
        "if (k >= end) break;",
        "if (k >= start.candidates) break;",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-equal-pays",
        SCHEDULE,
        "if (!(throughput(p, tau, start.rows + k + 1) > before)) end = k;",
        "if (throughput(p, tau, start.rows + k + 1) < before) end = k;",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "schedule-sort-without-barrier",
        SCHEDULE,
        "                __syncthreads();\n            }\n",
        "                __syncwarp();\n            }\n",
        "hooks",
        RACE_SHARED,
        SCHEDULE_TESTS,
    ),
    (
        "schedule-rows-of-the-inactive",
        SCHEDULE,
        "const int rows = here ? 1 + drafts : 0;",
        "const int rows = 1 + drafts;",
        "plain",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "cpu-schedule-equal-pays",
        SCHEDULE_CPU,
        "if (!(now > best)) return;",
        "if (now < best) return;",
        "cpu",
        "",
        SCHEDULE_TESTS,
    ),
    (
        "cpu-schedule-budget-of-all",
        SCHEDULE_CPU,
        "std::min<int64_t>(budget, keys.size())",
        "static_cast<int64_t>(keys.size())",
        "cpu",
        "",
        SCHEDULE_TESTS,
    ),
]
