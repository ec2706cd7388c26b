"""Seeded bugs of verify_tree: (id, file, old text, new text, build, says, tests), see mutations.py."""

KERNEL = "csrc/kernels/verify_tree/cuda.cu"
REQUEST = "csrc/kernels/verify_tree/request.cuh"
REST = "csrc/kernels/verify_tree/rest.cuh"
NODE = "csrc/kernels/verify_tree/node.cuh"
WALK = "csrc/kernels/verify_tree/walk.cuh"
REPORT = "csrc/kernels/verify_tree/report.cuh"
TESTS = "python_tests/test_verify_tree.py"
REJECTIONS = f"{TESTS}::many_rejections"
MANY = "python_tests/test_mixed_batches.py"  # for what few trees show
RACE_SHARED = r"race on shared memory|uninitialised shared memory"
RACE_GLOBAL = "race on global memory"

BUGS = [
    # What a node offers.
    ("vtree-bad-id-lost", NODE, "if (id != -1) found.status |= kBadId;", "", "plain", "", TESTS),
    ("vtree-siblings-twice", NODE, "if (__any_sync(kFullMask, again)) continue;", "", "plain", "",
     TESTS),
    ("vtree-siblings-looked-up-early", NODE, "__syncwarp();  // for the search for the next id", "",
     "hooks", RACE_GLOBAL, TESTS),
    ("vtree-deeper-than-asked", NODE, "own_status == 0 && depth < w.p.max_path", "own_status == 0",
     "plain", "", TESTS),
    ("vtree-status-of-the-last-node", NODE, "status |= own_status | found.status;",
     "status = own_status | found.status;", "plain", "", TESTS),
    ("vtree-draft-nan-lost", NODE, "status |= kDraftNan;", "", "plain", "", MANY),
    ("vtree-first-child-missed", REQUEST, "c = u + 1 + threadIdx.x", "c = u + 2 + threadIdx.x", "plain",
     "", TESTS),
    ("vtree-bad-parents-unnoticed", KERNEL, "parent < 0 || parent >= u);", "parent >= u);", "plain", "",
     TESTS),
    ("vtree-rows-of-the-request-before", REQUEST, "low > p.batch ? -1 : low - 1;",
     "low > p.batch ? -1 : max(low - 2, int64_t{0});", "plain", "", TESTS),
    # Tests of children.
    ("vtree-coin-of-another-node", NODE, "w.number(at.node + 1, Purpose::kAccept)",
     "w.number(at.node, Purpose::kAccept)", "plain", "", TESTS),
    ("vtree-children-not-summed", NODE, "below = below + __shfl_sync", "below = __shfl_sync", "plain",
     "", TESTS),
    ("vtree-rest-without-q", NODE, "c.p - static_cast<float>(at.b) * c.raw_q", "c.p", "plain", "",
     TESTS),
    ("vtree-q-keeps-the-rejected", NODE, "c.q = static_cast<float>(at.factor) * c.raw_q;",
     "c.q = c.raw_q;", "plain", "", REJECTIONS),
    # Rejections.
    ("vtree-one-rejection-removed", WALK, "at.removed += at.raw_q;", "at.removed = at.raw_q;", "plain",
     "", REJECTIONS),
    ("vtree-rest-not-normalised", WALK, "at.a /= mass;", "", "plain", "", MANY),
    ("vtree-alpha-without-rest", WALK, "mass + (1.0f - at.alpha)", "1.0f + (1.0f - at.alpha)", "plain",
     "", MANY),
    ("vtree-b-not-scaled", WALK, "at.b * alpha + (", "at.b + (", "plain", "", REJECTIONS),
    ("vtree-parent-falls-early", WALK, "at.next + 1 == at.count && w.shared.depth > 0",
     "w.shared.depth > 0", "plain", "", REJECTIONS),
    ("vtree-uniform-of-another-node", WALK, "w.number(at.node + 1, Purpose::kResidual)",
     "w.number(at.node, Purpose::kResidual)", "plain", "", TESTS),
    ("vtree-rest-summed-early", WALK,
     "if (decides) decide(w, is_summed);\n        __syncthreads();", "if (decides) decide(w, is_summed);",
     "hooks", RACE_SHARED, TESTS),
    ("vtree-strips-read-early", REST,
     "strips[first + s] = sums[s];\n    }\n    __syncthreads();",
     "strips[first + s] = sums[s];\n    }", "hooks", RACE_SHARED, TESTS),
    ("vtree-all-lanes-store-a-mass", REST, "if (lane == 0) masses[tile] = mass;", "masses[tile] = mass;",
     "hooks", RACE_GLOBAL, TESTS),
    ("vtree-rejected-ids-drawn", REST, "mass[i] = id_of(i) == id ? 0.0f : mass[i];",
     "mass[i] = id_of(i) == id ? mass[i] : mass[i];", "plain", "", TESTS),
    ("vtree-requests-share-masses", KERNEL,
     "static_cast<int64_t>(blockIdx.x) * shared.plan.target_layout.num_tiles", "0", "hooks",
     RACE_GLOBAL, TESTS),
    # Rows of more than one request.
    ("vtree-shared-rows-walked", KERNEL, "shared.r.count == 0 || !is_alone", "shared.r.count == 0",
     "plain", "", f"{TESTS}::wrong_cu_rows"),
    ("vtree-shared-rows-seen-from-behind-only", "csrc/kernels/common/rows.h", "i <= b ? entry > rows.first :",
     "i <= b ? false :", "plain", "", f"{TESTS}::wrong_cu_rows"),
    ("cpu-vtree-shared-rows-walked", "csrc/kernels/verify_tree/cpu.cpp", "rows.count == 0 || !alone[b]",
     "rows.count == 0", "cpu", "", f"{TESTS}::wrong_cu_rows"),
    # Outputs.
    ("vtree-top-ids-unfiltered", REPORT, "kept.rank = rank_of(scratch.cut->z, scratch.cut->id);", ";",
     "plain", "", TESTS),
    ("vtree-path-of-the-walk", REPORT, "i < written ? way[i].node : -1;", "i <= written ? way[i].node : -1;",
     "plain", "", TESTS),
]  # fmt: skip
