"""Seeded bugs of the CPU kernels: (id, file, old text, new text, tests, objects), see mutations.py.

Planted in the instruction set that this machine uses; the others are the same source.
"""

APPEND = "csrc/kernels/append_kv/cpu.cpp"
SAMPLE = "csrc/kernels/sample/cpu.cpp"
CHAIN = "csrc/kernels/verify_chain/cpu.cpp"
COMPACT = "csrc/kernels/compact_kv/cpu.cpp"
ROUND = "csrc/kernels/next_round/cpu.cpp"
ATTENTION = "csrc/kernels/verify_attention/cpu.cpp"
PLAN = "csrc/kernels/verify_attention/cpu_plan.h"
MASK = "csrc/kernels/verify_attention/mask.h"
SOFTMAX = "csrc/kernels/common/softmax.h"
PAIRS = "csrc/kernels/verify_attention/cpu_pairs.h"
PAIRS_WEIGHTS = "csrc/kernels/verify_attention/cpu_pairs_weights.h"
PAIRS_COPY = "csrc/kernels/verify_attention/cpu_pairs_copy.h"
PAIRS_DOT = "csrc/kernels/verify_attention/cpu_pairs_dot.h"
PAIRS_FEW = "csrc/kernels/verify_attention/cpu_pairs_few.h"
VOCAB_TILE = "csrc/kernels/common/vocab_tile.h"
VIEW = "csrc/kernels/common/view.h"
APPEND_TESTS = "python_tests/test_append_kv.py"
COMPACT_TESTS = "python_tests/test_compact_kv.py"
ROUND_TESTS = "python_tests/test_next_round.py"
SAMPLE_TESTS = "python_tests/test_sample.py"
CHAIN_TESTS = "python_tests/test_verify_chain.py"
ATTENTION_TESTS = "python_tests/test_verify_attention.py"
FP8_TESTS = "python_tests/test_attention_fp8.py"
ATTENTION_PARAMS = "csrc/kernels/verify_attention/params.h"
FMA = "csrc/kernels/verify_attention/cpu_fma.h"
SIMD = "csrc/kernels/common/simd.h"
MASK_TESTS = "python_tests/test_attention_masks.py"
WALK = "csrc/kernels/common/verify_walk.h"
TILED = "csrc/kernels/common/tiled_row.h"
RESULTS = "csrc/kernels/common/verify_results.h"
FUZZED = "python_tests/test_fuzzed_inputs.py::chain"
STRIDES = "python_tests/test_strides.py"

BUGS = [
    ("cpu-append-v-with-stride-of-k-scale", APPEND, "p.v_scale, begin",
     "HeadScale{p.v_scale.data, p.k_scale.stride}, begin", APPEND_TESTS),
    ("cpu-append-scale-multiplies", "csrc/kernels/common/kv_store.h", "to_float(x) / scale",
     "to_float(x) * scale", APPEND_TESTS),
    ("cpu-append-head-stride", APPEND, "h * cache.stride[2]", "h * rows.size[2]", APPEND_TESTS),
    ("cpu-append-scale-of-head-0", APPEND, "scale[h]);", "scale[0]);", APPEND_TESTS),
    ("cpu-compact-scatter-while-gathering", COMPACT, "std::memcpy(at, head + move.source, bytes);",
     "std::memcpy(head + move.target, head + move.source, bytes), std::memcpy(at, head + move.target, bytes);",
     COMPACT_TESTS),
    ("cpu-compact-head-stride", COMPACT, "h * cache.stride[2]", "h * bytes", COMPACT_TESTS),
    ("cpu-compact-first-head-only", COMPACT, "h < cache.size[2]", "h < 1", COMPACT_TESTS),
    ("cpu-compact-request-0", COMPACT, "pair % accepted.batch", "0", COMPACT_TESTS),
    ("cpu-compact-first-cache", COMPACT, "p.caches[pair / accepted.batch]", "p.caches[0]", COMPACT_TESTS),
    ("cpu-compact-moves-of-the-pair-before", COMPACT, "    moves.clear();\n", "", COMPACT_TESTS),
    ("cpu-round-stop-ignored", ROUND, "stopped = is_stop(p, token);", "", ROUND_TESTS),
    ("cpu-round-negative-id-emitted", ROUND, "if (token < 0) break;", "", ROUND_TESTS),
    ("cpu-round-full-goes-on", ROUND, "(stopped || emitted >= room_of(p, b))", "stopped", ROUND_TESTS),
    ("cpu-round-length-of-what-was-cut", ROUND, "p.seq_lens[b] + emitted;", "p.seq_lens[b] + most;",
     ROUND_TESTS),
    ("cpu-round-block-of-the-finished", ROUND, "active && !finished ? block_row", "active ? block_row",
     ROUND_TESTS),
    ("cpu-round-inactive-is-finished", ROUND, "active && (stopped", "(stopped", ROUND_TESTS),
    ("cpu-index-stride-of-int32", VIEW, "static_cast<const int32_t*>(data)[i * stride]",
     "static_cast<const int32_t*>(data)[i]", f"{STRIDES}::slots", "append_kv"),
    ("cpu-index-stride-of-int64", VIEW, "static_cast<const int64_t*>(data)[i * stride]",
     "static_cast<const int64_t*>(data)[i]", f"{STRIDES}::slots", "append_kv"),
    ("cpu-sample-seed-of-row-0", SAMPLE, "p.seeds[r], p.positions[r]", "p.seeds[0], p.positions[r]",
     SAMPLE_TESTS),
    ("cpu-sample-plain-tile-of-small-entries", VOCAB_TILE, " | (least < set1(-bound))", "", SAMPLE_TESTS,
     "sample"),
    ("cpu-sample-plain-tile-of-large-entries", VOCAB_TILE, "(most > set1(bound)) | ", "", SAMPLE_TESTS,
     "sample"),
    ("cpu-sample-plain-tile-with-nan", VOCAB_TILE, "good = good && sums[k] == sums[k];", "", SAMPLE_TESTS,
     "sample"),
    ("cpu-sample-row-stride", SAMPLE, "r * p.logits.stride[0]", "r * p.vocab_size", SAMPLE_TESTS),
    ("cpu-sample-status-lost", SAMPLE, "p.status[r] = row.status();", "p.status[r] = 0;", SAMPLE_TESTS),
    ("cpu-sample-greedy-draws", SAMPLE, "law.greedy ? row.argmax()", "false ? row.argmax()",
     SAMPLE_TESTS),
    ("cpu-chain-one-draft-row-too-many", CHAIN, "row < p.draft_logits.size[0] ? row",
     "row <= p.draft_logits.size[0] ? row", CHAIN_TESTS),
    ("cpu-chain-draft-rows-ignored", CHAIN, "p.draft_rows == nullptr ? b : p.draft_rows[b]", "b",
     CHAIN_TESTS),
    ("cpu-chain-one-hot-flag-ignored", CHAIN,
     "if (p.draft_is_one_hot != nullptr && p.draft_is_one_hot[b]) return -1;", "", CHAIN_TESTS),
    ("cpu-chain-last-row-forgotten", CHAIN, "std::min(rows.count, p.max_path + 1)",
     "std::min(rows.count, p.max_path)", CHAIN_TESTS),
    ("cpu-chain-draft-stride", CHAIN, "u * p.draft_logits.stride[1]", "u * p.vocab_size", CHAIN_TESTS),
    ("cpu-walk-foreign-ids-looked-up", WALK, "return id >= 0 && id < p_.vocab_size;", "return id != -1;",
     FUZZED, "verify_chain"),
    ("cpu-results-padding-unwritten", RESULTS, "p.top_logprobs[(b * width + i) * n + k] = 0.0f;", "",
     FUZZED, "verify_chain"),
    ("cpu-rows-room-for-every-entry", TILED, "tiles_.resize(num_vocab_tiles(size));",
     "tiles_.reserve(size / 8);\n        tiles_.resize(size / 8);\n        tiles_.resize(num_vocab_tiles(size));",
     "python_tests/test_scratch.py::fresh", "sample"),
    ("cpu-attention-sees-the-next-token", PLAN, "own + 1 : seq_len", "own + 2 : seq_len",
     ATTENTION_TESTS),
    ("cpu-attention-window-over-places", MASK,
     "return given ? p.positions[rows.first_row + place - rows.prefix] : place;", "return place;",
     MASK_TESTS),
    ("cpu-attention-window-one-too-wide", MASK, "< static_cast<uint64_t>(p.window);",
     "<= static_cast<uint64_t>(p.window);", MASK_TESTS),
    ("cpu-attention-word-of-the-next-row", MASK,
     "    if (word >= p.tree_mask.size[1]) return false;\n", "", MASK_TESTS),
    ("cpu-attention-window-from-segment-0", ATTENTION, "(g.first_segment + s) * kSegmentTokens;",
     "s * kSegmentTokens;", MASK_TESTS),
    ("cpu-attention-empty-row-sees-the-sink", ATTENTION, "p.sinks != nullptr && sum != 0.0f",
     "p.sinks != nullptr", MASK_TESTS),
    ("cpu-attention-sink-without-rescaling", ATTENTION, "sum == 0.0f ? 0.0f : keep / sum",
     "sum == 0.0f ? 0.0f : 1.0f / sum", MASK_TESTS),
    ("cpu-attention-cap-loses-the-sign", SOFTMAX, "zero - far, far)", "far, far)", MASK_TESTS),
    ("cpu-attention-max-rows-ignored", PLAN, "clamp(end - begin, 0, p.max_rows) * share",
     "(end - begin) * share", ATTENTION_TESTS),
    ("cpu-attention-row-number-of-computed-rows", PLAN, "g.row_count = end - begin;",
     "g.row_count = clamp(end - begin, 0, p.max_rows);", ATTENTION_TESTS),
    ("cpu-attention-empty-row-lse-0", PLAN, "= -__builtin_inff();", "= 0.0f;", ATTENTION_TESTS),
    ("cpu-attention-rows-see-what-the-last-one-sees", PLAN, "first_keys(places[m] - first)",
     "first_keys(g.limit - first)", ATTENTION_TESTS),
    ("cpu-attention-fold-skips-a-segment", ATTENTION, "for (int64_t s = 1; s < end; ++s) {",
     "for (int64_t s = 2; s < end; ++s) {", ATTENTION_TESTS),
    ("cpu-attention-fp8-v-scale-lost", ATTENTION, "keep = p.v_scale[g.head + h];", "keep = 1.0f;", FP8_TESTS),
    ("cpu-attention-fp8-v-scale-of-a-group", ATTENTION, "keep = p.v_scale[g.head + h];",
     "keep = p.v_scale[g.head];", f"{FP8_TESTS}::many_requests"),
    ("cpu-attention-fp8-k-scale-of-a-group", FMA, "                                logit_scale(p, g.head + h),\n",
     "                                logit_scale(p, g.head),\n", f"{FP8_TESTS}::many_requests"),
    ("cpu-attention-fp8-sink-over-scale", ATTENTION, "keep *= kept;", "keep = kept;", FP8_TESTS),
    ("cpu-attention-fp8-k-scale-lost", ATTENTION_PARAMS, "scale.factor *= p.k_scale[kv_head];", "",
     FP8_TESTS),
]  # fmt: skip

# Of code that is compiled only where no instruction widens halves.
BASELINE_BUGS = [
    ("cpu-fp8-subnormal-is-normal", SIMD, "magnitude < 8 ?", "magnitude < 0 ?", FP8_TESTS),
    ("cpu-fp8-nan-is-480", SIMD, "magnitude == 0x7f ?", "magnitude == 0x80 ?", FP8_TESTS),
    ("cpu-fp8-sign-lost", SIMD, "bits | (codes << 24", "bits & ~(codes << 24", FP8_TESTS),
]  # fmt: skip

# Of code that runs only where the CPU multiplies pairs of bf16.
PAIRS_BUGS = [
    ("pairs-attention-nan-of-unseen-keys", PAIRS,
     "    decay_outputs(w, t.rows, width, state);\n    if (t.view.same || !leaves_traces(t)) {\n"
     "        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);\n        add_values(",
     "    decay_outputs(w, t.rows, width, state);\n    if (true) {\n"
     "        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);\n        add_values(",
     ATTENTION_TESTS),
    ("pairs-attention-strip-over-two-pages", PAIRS_COPY,
     "places.page[key] == places.page[key + kTileRows - 1]", "true", ATTENTION_TESTS),
    ("pairs-attention-weights-of-neighbours-swapped", PAIRS_WEIGHTS, "auto pair = cvt_pair(x[j + 1], x[j])",
     "auto pair = cvt_pair(x[j], x[j + 1])", ATTENTION_TESTS),
    ("pairs-attention-mask-forgotten-without-cap", PAIRS_WEIGHTS, "!(plain && view.same && view.count == kTile)",
     "!plain", ATTENTION_TESTS),
    ("pairs-attention-negative-scale-as-plain", PAIRS_WEIGHTS, " && scale.factor > 0.0f", "", ATTENTION_TESTS),
    ("pairs-attention-fused-against-a-rounded-maximum", PAIRS_WEIGHTS,
     "score(half + i + j) * factor - base", "fma(score(half + i + j), factor, spread<Native>(0.0f) - base)",
     ATTENTION_TESTS),
    ("pairs-attention-never-decays", PAIRS, "d < width && w.decay[m] != 1.0f", "false", ATTENTION_TESTS),
    ("pairs-attention-strips-share-their-copy", PAIRS, "key + kTileRows, w.keys + kTileRows * width",
     "key + kTileRows, w.keys", ATTENTION_TESTS),
    ("pairs-attention-fp8-nan-is-480", PAIRS_COPY, "if (code == 127) bits = 0x7fc0;", "", FP8_TESTS),
    ("pairs-attention-fp8-subnormal-is-0", PAIRS_COPY, "bits = mantissa == 0 ? 0 :", "bits = mantissa >= 0 ? 0 :",
     FP8_TESTS),
    ("pairs-attention-fp8-channels-behind-the-row", PAIRS_COPY, "_mm256_maskz_loadu_epi8(mask, at)",
     "_mm256_maskz_loadu_epi8(~__mmask32{0} | mask, at)", FP8_TESTS),
    ("pairs-attention-fp8-nan-leaves-a-trace", PAIRS, "? 0x7f80 : 0x7f;", "? 0x7f80 : 0x17f;", FP8_TESTS),
]  # fmt: skip

# And only where vectors, not tiles, do so.
DOT_BUGS = [
    ("dot-attention-last-rows-lost", PAIRS_DOT, "m < rows; m += kRows", "m + kRows <= rows; m += kRows",
     ATTENTION_TESTS),
    ("dot-attention-second-half-of-v-first", PAIRS_DOT, "values + (half * width + d) * kHalf, acc",
     "values + d * kHalf, acc", ATTENTION_TESTS),
    ("dot-attention-strip-0-twice", PAIRS_DOT, "keys[key / kTileRows]", "keys[0]", ATTENTION_TESTS),
    ("dot-few-keys-out-of-order", PAIRS_FEW, "(i % 4 * 4 + i / 4) * step", "i * step", ATTENTION_TESTS),
    ("dot-few-mask-of-row-0", PAIRS_FEW, "kApart[view.visible[r] >>", "kApart[view.visible[0] >>",
     ATTENTION_TESTS),
    ("dot-few-sum-of-two-keys-twice", PAIRS_FEW, "IntTag<0xb1>{}", "IntTag<0x4e>{}", ATTENTION_TESTS),
    ("dot-few-weights-stay-in-pairs", PAIRS, "spread_weights_few(w.weights);", "", ATTENTION_TESTS),
    ("dot-few-nan-of-unseen-keys", PAIRS,
     "if (t.view.same || !leaves_traces(t)) {\n"
     "        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);\n        add_values_few",
     "if (true) {\n"
     "        interleave_values(t.v, t.v_dim, t.view.count, t.ahead, w.values);\n        add_values_few",
     ATTENTION_TESTS),
    ("dot-few-negative-scale-as-plain", PAIRS_FEW, " && scale.factor > 0.0f", "", ATTENTION_TESTS),
    ("dot-few-cap-forgotten", PAIRS_FEW, "if (scale.cap != 0.0f) x = soft_cap(x, scale.cap);", "",
     MASK_TESTS),
]  # fmt: skip
