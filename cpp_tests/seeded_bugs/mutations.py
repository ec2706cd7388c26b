"""The seeded bugs: a text of a kernel, what it becomes, and which build's tests must notice.

build   plain: a wrong result; hooks: a detector, or a wrong result; asan: the sanitizers; cpu: a wrong
        result of the CPU kernels
says    a regular expression that the failing run must print: the diagnosis, not just a failure
objects  a regular expression of the sources to plant the bug in, where the tests need not all of them
isas    the instruction sets without which the text does not run: left out elsewhere
"""

import dataclasses

import attention
import cpu
import dflash
import dspark
import keys
import pruning
import rounds
import row_linear
import tree_build
import tree_ops
import verify_tree

RACE_SHARED = r"race on shared memory|uninitialised shared memory"
RACE_GLOBAL = "race on global memory"
BOUNDS = "out of bounds"

APPEND_KV = "csrc/kernels/append_kv/cuda.cu"
KV_STORE = "csrc/kernels/common/kv_store.h"
SAMPLE = "csrc/kernels/sample/cuda.cu"
CHAIN = "csrc/kernels/verify_chain/cuda.cu"
BLOCK = "csrc/kernels/common/block.cuh"
ROWS = "csrc/kernels/common/vocab_rows.cuh"
EDITS = "csrc/kernels/common/row_edits.cuh"
TILES = "csrc/kernels/common/tile_stats.cuh"
STATS = "csrc/kernels/common/row_stats.cuh"
SELECT = "csrc/kernels/common/row_select.cuh"
FILTER = "csrc/kernels/common/row_filter.cuh"
TOP = "csrc/kernels/common/row_top.cuh"
MAP = "csrc/kernels/common/draft_map.cuh"
CHAIN_REQUEST = "csrc/kernels/verify_chain/request.cuh"
CHAIN_JUDGE = "csrc/kernels/verify_chain/judge.cuh"
CHAIN_TOKEN = "csrc/kernels/verify_chain/token.cuh"
CHAIN_BLOCK = "csrc/kernels/verify_chain/block_walk.cuh"
VERIFY_CALL = "csrc/kernels/common/verify_call.cuh"
CONTROLS = "python_tests/test_controls.py"
DRAW = "csrc/kernels/common/vocab_draw.cuh"
FUZZED = "python_tests/test_fuzzed_inputs.py"
FAULTS = "python_tests/faults/test_faults_chain.py"
TESTS = {
    APPEND_KV: "python_tests/test_append_kv.py",
    SAMPLE: "python_tests/test_sample.py",
    CHAIN: "python_tests/test_verify_chain.py",
    BLOCK: "cpp_tests/cuda_on_cpu/tests/test_correct.py",
    ROWS: "python_tests/test_sample.py",
    TILES: "python_tests/test_sample.py",
    STATS: "python_tests/test_sample.py",
    EDITS: f"{CONTROLS}::each_control",
    SELECT: f"{CONTROLS}::edge",
    FILTER: f"{CONTROLS}::edge",
    TOP: f"{CONTROLS}::top_logprobs",
    MAP: f"{CONTROLS}::d2t",
    CHAIN_REQUEST: "python_tests/test_verify_chain.py",
    VERIFY_CALL: "python_tests/test_verify_chain.py",
    CHAIN_JUDGE: "python_tests/test_verify_chain.py",
    CHAIN_TOKEN: "python_tests/test_verify_chain.py",
    CHAIN_BLOCK: f"{CONTROLS}::chain and block",
    DRAW: "python_tests/test_sample.py",
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    id: str
    file: str
    old: str
    new: str
    build: str = "plain"
    says: str = ""
    tests: str = ""
    objects: str = ""
    isas: tuple = ()


def bug(id, file, old, new, build="plain", says="", tests=""):
    return Mutation(id, file, old, new, build, says, tests or TESTS[file])


_APPEND_KV = [
    bug("append-slot-of-another-row", APPEND_KV, "slots[row]", "slots[0]", "hooks", RACE_GLOBAL),
    bug("append-k-twice", APPEND_KV, "blockIdx.y == 0 ? k : v", "blockIdx.y == 0 ? k : k"),
    bug("append-bad-slot-written", APPEND_KV, "if (place < 0) return;", "", "hooks", BOUNDS),
    bug("append-one-chunk-too-many", APPEND_KV, "i < row_chunks;", "i <= row_chunks;", "hooks"),
    bug("append-head-stride", APPEND_KV, "head * side.cache.stride[2]", "head * chunks"),
    bug("append-chunks-skipped", APPEND_KV, "i += blockDim.x", "i += 2 * blockDim.x"),
    bug("append-scale-of-head-0", APPEND_KV, "side.scale[head]", "side.scale[0]"),
    bug("append-scale-multiplies", KV_STORE, "to_float(x) / scale", "to_float(x) * scale",
        tests="python_tests/test_append_kv.py"),
    bug("append-pointer-alignment", APPEND_KV, "(view.data) % 16 == 0", "(view.data) % 2 == 0",
        "hooks", "misaligned"),
    bug("append-stride-alignment", APPEND_KV, "bytes % 16 == 0);", "bytes % 2 == 0);"),
    bug("append-row-end-cut-off", APPEND_KV,
        "return ok && view.size[N - 1] * element_size % 16 == 0;", "return ok;"),
    bug("append-v-not-launched", APPEND_KV, "cfg.grid = dim3(static_cast<unsigned>(k.rows.size[0]), 2);",
        "cfg.grid = dim3(static_cast<unsigned>(k.rows.size[0]), 1);"),
]  # fmt: skip

_BLOCK = [
    bug("block-read-before-written", BLOCK,
        "scratch.per_warp[warp] = value;\n    __syncthreads();", "scratch.per_warp[warp] = value;",
        "hooks", RACE_SHARED),
    bug("block-scratch-reused-early", BLOCK,
        "    __syncthreads();  // the next call may write scratch\n", "", "hooks", RACE_SHARED),
    bug("block-all-lanes-write", BLOCK, "if (lane == 0) scratch.per_warp[warp] = value;",
        "scratch.per_warp[warp] = value;", "hooks", RACE_SHARED),
    bug("block-one-warp-too-many", BLOCK,
        "for (int w = 1; w < kWarps; ++w) total = op(total, scratch.per_warp[w]);",
        "for (int w = 1; w <= kWarps; ++w) total = op(total, scratch.per_warp[w]);", "hooks", BOUNDS),
    bug("block-argmax-highest-tie", BLOCK, "b.index < a.index", "b.index > a.index"),
    bug("block-butterfly-too-short", BLOCK, "int lane_mask = kWarpSize / 2;",
        "int lane_mask = kWarpSize / 4;"),
    bug("block-scan-off-by-one", BLOCK, "if (lane >= distance) value", "if (lane > distance) value"),
    bug("block-scan-wrong-warp", BLOCK, "if (w == warp) before = total;",
        "if (w == warp - 1) before = total;"),
    bug("block-scan-wrong-lane", BLOCK, "if (lane == kWarpSize - 1) scratch", "if (lane == 0) scratch"),
    bug("block-shuffle-half-mask", BLOCK, "return __shfl_xor_sync(kFullMask, value, lane_mask);",
        "return __shfl_xor_sync(0x0000ffffu, value, lane_mask);", "plain", "leaves it out"),
]  # fmt: skip

_ROWS = [
    bug("rows-last-tile-read-whole", ROWS, "if (aligned && first + kVocabTile <= vocab_size) {",
        "if (aligned) {", "hooks", BOUNDS),
    bug("rows-last-group-read-whole", ROWS, "if (aligned && valid >= kCount) {",
        "if (aligned && valid > 0) {", "hooks", BOUNDS),
    bug("rows-one-entry-too-many", ROWS, "i < valid ? widen(source[i])", "i <= valid ? widen(source[i])",
        "hooks", BOUNDS),
    bug("rows-alignment-ignored", ROWS, "(row) % (kCount * sizeof(T)) == 0", "(row) % sizeof(T) == 0",
        "hooks", "misaligned"),
    bug("rows-max-without-barrier", TILES, "const bool bad_tile = __syncthreads_or(bad) != 0;",
        "const bool bad_tile = __any_sync(kFullMask, bad) != 0;", "hooks", RACE_SHARED),
    bug("rows-max-misses-a-warp", TILES, "for (int w = 1; w < kTileWarps; ++w) max",
        "for (int w = 1; w < kTileWarps - 1; ++w) max"),
    bug("rows-argmax-highest-tie", TILES, "for (int i = kEntriesPerThread - 1; i >= 0; --i) {",
        "for (int i = 0; i < kEntriesPerThread; ++i) {"),
    bug("rows-sums-without-barrier", TILES, "    __syncthreads();\n\n    // One warp puts",
        "    // One warp puts", "hooks", RACE_SHARED),
    bug("rows-exponent-not-shifted", TILES, "ptx::ex2((x[i] - from) * by)", "ptx::ex2(x[i] * by)"),
    bug("rows-raw-sum-forgotten", TILES, "const bool raw_too = kRaw && !kEdits", "const bool raw_too = false && !kEdits"),
    bug("rows-argmax-without-tile", STATS, "t * kTileEntries + static_cast<int>", "static_cast<int>"),
    bug("rows-nan-not-reported", TILES, "if (bad_tile) stats.peak |= kBadRaw;", ""),
    bug("rows-nan-seen-by-one-lane", STATS, "__reduce_or_sync(kFullMask, flags) & ~kPeakPlace", "flags & ~kPeakPlace"),
    bug("rows-strip-tree-too-short", ROWS, "for (int lanes = 1; lanes < kStrip / kVec; lanes *= 2) {",
        "for (int lanes = 2; lanes < kStrip / kVec; lanes *= 2) {"),
    bug("rows-every-lane-stores-strip", ROWS, "if (start % kStrip == 0) strips[start / kStrip] = sum;",
        "strips[start / kStrip] = sum;", "hooks", RACE_SHARED),
    bug("rows-statistics-by-all-lanes", TILES, "if (lane == 0) out.tiles[tile] = stats;", "out.tiles[tile] = stats;",
        "hooks", RACE_GLOBAL),
    bug("rows-row-sum-one-tile-per-lane", STATS,
        "for (int t = lane; t < num_tiles; t += kWarpSize) {\n        sum = sum + tile_mass(",
        "for (int t = lane; t < min(num_tiles, 1); t += kWarpSize) {\n        sum = sum + tile_mass(",
        tests=TESTS[CHAIN]),
    bug("rows-bf16-halves-swapped", ROWS,
        "    x[0] = bits_float(word << 16);\n    x[1] = bits_float(word & 0xffff0000u);",
        "    x[1] = bits_float(word << 16);\n    x[0] = bits_float(word & 0xffff0000u);"),
    bug("rows-padding-has-mass", ROWS, "i < valid ? widen(source[i]) : minus_infinity()",
        "i < valid ? widen(source[i]) : 0.0f"),
    bug("rows-32-bit-offset", ROWS, "int64_t offset = i * logits.stride[0];",
        "int64_t offset = static_cast<int32_t>(i * logits.stride[0]);", "hooks",
        tests=f"{FAULTS}::E01"),
    bug("rows-max-starts-at-zero", TILES, "float most = minus_infinity();", "float most = 0.0f;"),
    bug("rows-tile-mass-not-rescaled", STATS, "ptx::ex2((tile.max - row_max) * scale)", "1.0f"),
    bug("rows-law-not-normalised", STATS, "fmaf(z - max, scale, -log2_sum)", "fmaf(z - max, scale, -0.0f)", tests=TESTS[CHAIN]),
]  # fmt: skip

_DRAW = [
    bug("draw-lane-0-below", DRAW, "if (lane == 0) below = before;", ""),
    bug("draw-carries-nothing-on", DRAW, "before = __shfl_sync(kFullMask, after, kWarpSize - 1);",
        "before = 0.0f;"),
    bug("draw-fraction-not-carried", DRAW, "pick_bucket(kWarpSize, strip.fraction,",
        "pick_bucket(kWarpSize, u,"),
    bug("draw-entry-without-mass", DRAW, "if (!found && entry[i] > 0.0f) {", "if (!found) {"),
    bug("draw-strips-without-barrier", DRAW,
        "    __syncthreads();\n    return draw_from_strips(",
        "    return draw_from_strips(", "hooks", RACE_SHARED),
    bug("draw-wrong-quad", DRAW, "chosen = __shfl_sync(kFullMask, chosen, quad.index);", ""),
    bug("draw-residual-keeps-draft", DRAW, "id_of(i) == id ? 0.0f : mass[i]", "mass[i]",
        tests=TESTS[CHAIN]),
    bug("draw-residual-without-q", DRAW, "fmaxf(mass[i] - b * q(y[i], id_of(i)), 0.0f)", "mass[i]",
        tests=TESTS[CHAIN]),
    bug("draw-residual-negative", DRAW, "fmaxf(mass[i] - b * q(y[i], id_of(i)), 0.0f)",
        "mass[i] - b * q(y[i], id_of(i))",
        tests=TESTS[CHAIN]),
    bug("draw-strips-overwritten-early", DRAW,
        "    __syncthreads();  // the next tile may overwrite the strips\n", "", "hooks", RACE_SHARED,
        tests=TESTS[CHAIN]),
    bug("draw-total-of-last-tiles", DRAW, "total + warp_inclusive_sum(mass)",
        "warp_inclusive_sum(mass)"),
    bug("draw-fraction-of-the-whole", DRAW, "fmaxf(target - below, 0.0f)", "fmaxf(target, 0.0f)"),
    bug("draw-entries-not-summed", DRAW, "after = after + entry[i];", "after = entry[i];"),
]  # fmt: skip

_SAMPLE = [
    bug("sample-seed-of-row-0", SAMPLE, "p.seeds[row]", "p.seeds[0]"),
    bug("sample-other-purpose", SAMPLE, "Purpose::kSample", "Purpose::kBonus"),
    bug("sample-rows-share-scratch", SAMPLE, "layout_of(p).at(p.scratch, row));", "layout_of(p).at(p.scratch, 0));", "hooks",
        RACE_GLOBAL),
    bug("sample-tiles-share-scratch", TILES, "out.tiles[tile] = stats;", "out.tiles[0] = stats;", "hooks", RACE_GLOBAL),
    bug("sample-greedy-draws", SAMPLE, "} else if (!plan.greedy) {", "} else {"),
    bug("sample-all-lanes-write", SAMPLE, "    if (threadIdx.x == 0) {\n        p.tokens",
        "    {\n        p.tokens", "hooks", RACE_GLOBAL),
    bug("sample-logprob-of-id-0", SAMPLE, "entry_of(logits.row, token)", "entry_of(logits.row, 0)"),
    bug("sample-lse-without-max", SAMPLE, "lse = raw.max + raw.log_sum;", "lse = raw.log_sum;"),
    bug("sample-status-lost", SAMPLE, "p.status[row] = peak.status();", "p.status[row] = 0;"),
    bug("sample-statistics-at-temperature-1", SAMPLE,
        "is_greedy(temperature) ? kLog2E : exponent_scale(temperature)", "kLog2E"),
]  # fmt: skip

_CHAIN = [
    bug("chain-ticket-not-reset", CHAIN,
        "if (is_first && threadIdx.x == 0)", "if (false)"),
    bug("chain-ticket-without-release", CHAIN_TOKEN, "ptx::atom_add_acq_rel(ticket, 1u)",
        "atomicAdd(ticket, 1u)", "hooks", RACE_GLOBAL),
    bug("chain-last-block-without-barrier", CHAIN_TOKEN,
        "== num_blocks - 1;\n    __syncthreads();", "== num_blocks - 1;", "hooks", RACE_SHARED),
    bug("chain-nobody-is-last", CHAIN_TOKEN, "(ticket, 1u) == num_blocks - 1", "(ticket, 1u) == num_blocks"),
    bug("chain-everybody-is-last", CHAIN_TOKEN, "(ticket, 1u) == num_blocks - 1", "(ticket, 1u) < num_blocks",
        "hooks", RACE_GLOBAL),
    bug("chain-decisions-overwritten", CHAIN_JUDGE,
        "        if (first > 0) __syncthreads();  // the previous decisions have been read\n", "",
        "hooks", RACE_SHARED),
    bug("chain-decisions-read-early", CHAIN_JUDGE,
        "decisions[warp] = mine;\n        __syncthreads();", "decisions[warp] = mine;", "hooks",
        RACE_SHARED),
    bug("chain-all-lanes-decide", CHAIN_JUDGE, "if (threadIdx.x % kWarpSize == 0) decisions[warp] = mine;",
        "decisions[warp] = mine;", "hooks", RACE_SHARED),
    bug("chain-coin-of-another-row", CHAIN_JUDGE, "coin_of(p, r, j + 1)", "coin_of(p, r, j)"),
    bug("chain-uniform-of-another-row", CHAIN, "end.row + 1, Purpose::kResidual", "end.row, Purpose::kResidual"),
    bug("chain-bonus-is-residual", CHAIN, "rejected ? Purpose::kResidual : Purpose::kBonus",
        "Purpose::kResidual"),
    bug("chain-coin-without-q", CHAIN_JUDGE, "coin * d.q_draft < d.p_draft", "coin < d.p_draft"),
    bug("chain-residual-from-p", CHAIN, "if (!(total >= kMinResidualMass)) {", "if (!(total >= 2.0f)) {"),
    bug("chain-empty-residual-drawn", CHAIN, "if (!(total >= kMinResidualMass)) {", "if (false) {",
        tests=FAULTS),
    bug("chain-every-share-all-tiles", CHAIN_TOKEN, "tile < job.num_tiles; tile += num_shares",
        "tile < job.num_tiles; tile += 1", "hooks", RACE_GLOBAL),
    bug("chain-requests-share-masses", CHAIN, "(p, plan.masses) + b * plan.mass_rows * num_tiles",
        "(p, plan.masses)", "hooks", RACE_GLOBAL),
    bug("chain-masses-over-statistics", CHAIN_REQUEST, "plan.masses = plan.map +", "plan.masses = plan.draft + 0 *", "hooks"),
    bug("chain-every-block-writes", CHAIN, "    } else if (share != 0) {\n        return;\n    }",
        "    }", "hooks", RACE_GLOBAL),
    bug("chain-token-everywhere", CHAIN_TOKEN, "i == accepted ? token : -1;", "token;"),
    bug("chain-greedy-accepts-all", CHAIN_JUDGE, "is_chain && d.draft == peak.argmax ?", "is_chain ?"),
    bug("chain-q-at-temperature-of-p", CHAIN_JUDGE, "q_peak.max, r.q.scale,", "q_peak.max, r.p.scale,"),
    bug("chain-bad-draft-row-read", CHAIN_REQUEST, " || row < 0 || row >= p.draft_logits.size[0]) return r;",
        ") return r;", "hooks"),
    bug("chain-too-many-rows", CHAIN_REQUEST, "min(rows.count, p.max_path + 1);",
        "min(rows.count, p.max_path + 2);", "hooks"),
    bug("chain-draft-nan-lost", CHAIN_JUDGE, "d.status = kDraftNan;", ""),
    bug("chain-first-row-decides", CHAIN_JUDGE, "if (d.verdict != Verdict::kAccept) {", "if (true) {"),
    bug("chain-accept-inclusive", CHAIN_JUDGE, "coin * d.q_draft < d.p_draft", "coin * d.q_draft <= d.p_draft",
        tests=f"{FAULTS}::A03"),
    bug("chain-token-from-the-last-row", CHAIN_TOKEN, "p_row = target_row(p, r, d.row)",
        "p_row = target_row(p, r, r.num_rows - 1)"),
    bug("chain-accept-coin-reused", CHAIN, "end.row + 1, Purpose::kResidual",
        "end.row + 1, Purpose::kAccept"),
    bug("chain-nan-row-goes-on", CHAIN_JUDGE, "if (d.status != 0) return d;", ""),
    bug("chain-q-from-the-target-row", CHAIN_JUDGE, "q(draft_row(p, r, j).at(column), column)",
        "q(target_row(p, r, j).at(column), column)"),
    bug("chain-draft-statistics-of-p", CHAIN, "wanted{slot.is_draft ? r.q.scale",
        "wanted{slot.is_draft ? r.p.scale"),
    bug("chain-bad-id-not-reported", CHAIN_JUDGE, "d.status = kBadId;", "d.status = 0;"),
    bug("chain-draft-rows-ignored", CHAIN_REQUEST, "p.draft_rows == nullptr ? b : p.draft_rows[b]", "b"),
    bug("chain-one-hot-flag-ignored", CHAIN_REQUEST,
        "p.draft_is_one_hot != nullptr && p.draft_is_one_hot[b]", "false"),
    bug("chain-statistics-overlap", CHAIN_REQUEST, "b * (p.max_path + 1) + j);", "b * p.max_path + j);"),
    bug("chain-natural-logarithm", STATS, "log2f(row_sum", "logf(row_sum", tests=TESTS[CHAIN]),
    bug("chain-id-past-the-vocabulary", VERIFY_CALL, "id >= 0 && id < p.vocab_size", "id >= 0"),
    bug("chain-first-row-not-clamped", CHAIN_REQUEST, "r.first = rows.first;", "r.first = p.cu_rows[b];",
        "hooks", BOUNDS),
]  # fmt: skip

_CONTROLS = [
    bug("edits-drafts-not-counted", EDITS, "count[i] = counted(count[i], id[i] == draft);", ";",
        tests=f"{CONTROLS}::each_control"),
    bug("edits-bias-overwrites", EDITS, "id[i] == biased ? x[i] + value", "id[i] == biased ? value",
        tests=f"{CONTROLS}::each_control"),
    bug("edits-mask-ignored", EDITS, "if (!is_known(id[i]) || !e.allowed(id[i]))",
        "if (!is_known(id[i]))", tests=f"{CONTROLS}::each_control"),
    bug("edits-counts-past-the-vocabulary", EDITS, "is_known(id[i]) ? __ldg(e.penalties.counts",
        "true ? __ldg(e.penalties.counts", "hooks", BOUNDS, tests=f"{CONTROLS}::each_control"),
    bug("tiles-groups-round-down", TILES, "(key_of(most) >> 16)", "((key_of(most) >> 16) - 1)",
        tests=f"{CONTROLS}::edge"),
    bug("select-ties-highest-id", SELECT, "(0xffffffffu - static_cast<uint32_t>(id))",
        "static_cast<uint32_t>(id)"),
    bug("select-group-upper-bound", SELECT, "(r.groups[g] << 16 | 0xffffu) < key",
        "(r.groups[g] << 16) < key"),
    bug("select-bucket-off-by-one", SELECT, "here + buckets[bucket] < limit",
        "here + buckets[bucket] <= limit"),
    bug("select-list-cleared-late", SELECT,
        "    if (threadIdx.x == 0) plan.length = 0;\n    __syncthreads();\n",
        "    if (threadIdx.x == 0) plan.length = 0;\n", "hooks", RACE_SHARED),
    bug("select-sort-too-short", SELECT, "run <= size; run *= 2", "run < size; run *= 2"),
    bug("filter-top-p-inclusive", FILTER, "inside && before < limit", "inside && before <= limit",
        tests=f"{CONTROLS}::top_p_reached"),
    bug("filter-joint-is-sequential", FILTER, "if (!f.joint) whole", "if (true) whole"),
    bug("filter-min-p-without-temperature", FILTER, "- r.max) * r.scale >= min_cut",
        "- r.max) * kLog2E >= min_cut", tests=f"{CONTROLS}::each_control"),
    bug("filter-tiles-not-restated", FILTER, "sum = static_cast<float>(plan.masses[t]) * kMassUnit;",
        "sum += 0.0f;"),
    bug("top-of-the-edited-row", TOP, "raw{job.z.row.raw(),", "raw{job.z.row,"),
    bug("map-one-column-of-the-range", MAP, "end = map.lower_bound(t, end_id);", "end = begin + 1;"),
    bug("map-values-of-the-tile-before", MAP, "values[i] = 0.0f;", ""),
    bug("block-alpha-not-capped", CHAIN_JUDGE, "scaled < d.q_draft ? scaled / d.q_draft : scaled > 0.0f ? 1.0f : 0.0f",
        "scaled / d.q_draft", tests=f"{CONTROLS}::chain and block"),
    bug("block-residual-without-alpha", CHAIN, "set_residual(p, end, alpha,", "set_residual(p, end, 1.0f,",
        tests=f"{CONTROLS}::many and block"),
    bug("chain-map-makes-room-for-raw-maxima", CHAIN_REQUEST, "needs.edited = p.controls.any_edits;",
        "needs.edited = has_edits(p);", tests=f"{CONTROLS}::not_looked_at"),
    bug("chain-inactive-without-logprobs", CHAIN, "if (share == 0) write_outputs(p, plan, r, 0, -1, 0);", "",
        tests=f"{FUZZED}::chain"),
    bug("typical-threshold-inclusive-of-max", CHAIN_JUDGE, "fminf(p.posterior_threshold",
        "fmaxf(p.posterior_threshold", tests=f"{CONTROLS}::chain and typical"),
]  # fmt: skip

_ATTENTION = [Mutation(*row, attention.TESTS, attention.OBJECTS) for row in attention.BUGS]
_OTHERS = [
    Mutation(*row)
    for row in [
        *tree_ops.BUGS,
        *tree_build.BUGS,
        *verify_tree.BUGS,
        *attention.VALUE_BUGS,
        *rounds.BUGS,
        *row_linear.BUGS,
        *dspark.BUGS,
        *pruning.BUGS,
        *dflash.BUGS,
    ]
]


_CPU = [
    Mutation(id, file, old, new, "cpu", "", tests, *objects)
    for id, file, old, new, tests, *objects in cpu.BUGS + dflash.CPU_BUGS + tree_build.CPU_BUGS
]
_SOME_ISAS = [
    Mutation(id, file, old, new, "cpu", "", tests, isas=isas)
    for isas, bugs in (
        (("baseline",), cpu.BASELINE_BUGS),
        (("avx512bf16", "amx"), cpu.PAIRS_BUGS),
        (("avx512bf16",), cpu.DOT_BUGS + row_linear.DOT_BUGS),
        (("amx",), row_linear.AMX_BUGS),
    )
    for id, file, old, new, tests in bugs
]

_KEYS = [
    Mutation(id, file, old, new, build, "", keys.TESTS, objects)
    for id, file, old, new, build, objects in keys.BUGS
]

ALL = (
    _APPEND_KV
    + _BLOCK
    + _ROWS
    + _DRAW
    + _SAMPLE
    + _CHAIN
    + _CONTROLS
    + _ATTENTION
    + _OTHERS
    + _CPU
    + _SOME_ISAS
    + _KEYS
)
