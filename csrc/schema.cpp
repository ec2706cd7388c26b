// The public API on one page. Shapes, laws and costs: docs/ and the docstrings in
// specdec_ext/ops.py.
#include "stable/abi.h"

// The sampling controls, the same for every op that has a law (order: stable/control_args.h).
#define SPECDEC_CONTROLS_SCHEMA                                                                \
    "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "   \
    "Tensor? repetition_penalty=None, Tensor? frequency_penalty=None, "                        \
    "Tensor? presence_penalty=None, Tensor? token_counts=None, Tensor? prompt_mask=None, "     \
    "Tensor? bias_offsets=None, Tensor? bias_ids=None, Tensor? bias_values=None, "             \
    "Tensor? token_bitmask=None, Tensor? bitmask_rows=None, str filter_order=\"sequential\", " \
    "SymInt num_logprobs=-1, str logprobs_mode=\"raw\""

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
    // --- Verification --------------------------------------------------------------------------
    // Accepts a prefix of each request's drafts so that the emitted tokens have the target's law.
    m.def(
        "verify_chain(Tensor target_logits, Tensor input_ids, Tensor cu_rows, Tensor seeds, "
        "Tensor positions, SymInt max_drafts, *, SymInt vocab_size, Tensor? draft_logits=None, "
        "Tensor? draft_rows=None, Tensor? draft_temperature=None, Tensor? draft_is_one_hot=None, "
        "Tensor? d2t=None, bool d2t_is_offset=True, bool draft_controls=False, "
        "str method=\"token\", float posterior_threshold=0.09, float "
        "posterior_alpha=0.3, Tensor[]? markov=None, " SPECDEC_CONTROLS_SCHEMA
        ") -> (Tensor tokens, Tensor num_accepted, Tensor status, Tensor logprobs, "
        "Tensor top_ids, Tensor top_logprobs)");
    // Accepts a path of each request's draft tree so that the emitted tokens have the target's law.
    m.def(
        "verify_tree(Tensor target_logits, Tensor input_ids, Tensor parents, Tensor cu_rows, "
        "Tensor seeds, Tensor positions, SymInt max_depth, *, SymInt vocab_size, "
        "Tensor? draft_logits=None, Tensor? draft_temperature=None, "
        "str children=\"deterministic\", str method=\"token\", Tensor? d2t=None, "
        "bool d2t_is_offset=True, bool draft_controls=False, " SPECDEC_CONTROLS_SCHEMA
        ") -> (Tensor tokens, Tensor path, Tensor num_accepted, Tensor status, Tensor logprobs, "
        "Tensor top_ids, Tensor top_logprobs)");
    // One token per row from the row's law under the controls, with its log-probability.
    m.def(
        "sample(Tensor logits, Tensor seeds, Tensor positions, *, SymInt "
        "vocab_size, " SPECDEC_CONTROLS_SCHEMA
        ") -> (Tensor tokens, Tensor logprob, Tensor lse, Tensor status, Tensor top_ids, "
        "Tensor top_logprobs)");
    // Attention of the rows of a verification pass over a paged KV cache: out and its log-sum-exp.
    m.def(
        "verify_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
        "Tensor cu_rows, Tensor seq_lens, *, SymInt max_rows, float? scale=None, "
        "str mask=\"causal\", Tensor? tree_mask=None, Tensor? positions=None, int window=-1, "
        "float softcap=0.0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) "
        "-> (Tensor out, Tensor lse)");
    // A linear layer for the rows of a pass: a row has the same bits in a pass of any size.
    m.def("row_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
    // The same for an x whose columns lie in several tensors; its sums may stay float32.
    m.def("_linear_of_parts(Tensor[] parts, Tensor weight, bool rounded) -> Tensor");

    // --- Drafting ------------------------------------------------------------------------------
    // The drafts of a block, one after the other: base logits, a sequential head, confidences.
    m.def(
        "markov_draft(Tensor base_logits, Tensor anchor_ids, Tensor w1, Tensor w2, Tensor seeds, "
        "Tensor positions, *, SymInt vocab_size, str head=\"vanilla\", Tensor? hidden=None, "
        "Tensor? gate_weight=None, Tensor? gate_bias=None, Tensor? joint_weight=None, "
        "Tensor? joint_bias=None, Tensor? confidence_weight=None, float confidence_bias=0.0, "
        "Tensor? sts_temperature=None, Tensor? temperature=None, Tensor? d2t=None, "
        "bool d2t_is_offset=True, bool return_logits=False, Tensor[]? prepared=None, "
        "bool return_logprobs=True) -> (Tensor tokens, Tensor logprob, Tensor lse, "
        "Tensor confidence, Tensor logits)");
    // What the drafts of verify_chain(markov=) were drawn from.
    m.def(
        "_markov_logits(Tensor base_logits, Tensor input_ids, Tensor cu_rows, Tensor w1, Tensor "
        "w2, "
        "SymInt max_drafts, SymInt vocab_size, Tensor? draft_rows, Tensor? d2t, bool "
        "d2t_is_offset) "
        "-> (Tensor logits, Tensor rows)");
    // How many drafts of each request are verified, by their confidences and what a row costs.
    m.def(
        "schedule_prefix(Tensor confidence, Tensor steps_per_second, *, Tensor? budget=None, "
        "SymInt min_drafts=0, SymInt? max_drafts=None, Tensor? active=None) -> "
        "(Tensor num_drafts, Tensor cu_rows)");
    // One depth of an EAGLE-2/3 draft tree: candidates of the frontier, and the next frontier.
    m.def(
        "expand_tree(Tensor logits, Tensor parent_scores, SymInt topk, *, SymInt vocab_size, "
        "Tensor? d2t=None, bool d2t_is_offset=True) -> (Tensor tokens, Tensor parent_slot, "
        "Tensor scores, Tensor candidate_tokens, Tensor candidate_scores, Tensor candidate_index)");
    // The best candidates of all depths as a tree: ids, parents, ancestor masks, positions, links.
    m.def(
        "build_tree(Tensor candidate_tokens, Tensor candidate_scores, Tensor candidate_parents, "
        "Tensor anchor_ids, Tensor positions, SymInt num_nodes) -> (Tensor input_ids, "
        "Tensor parents, Tensor tree_mask, Tensor node_positions, Tensor first_child, "
        "Tensor next_sibling, Tensor status)");
    // The best tree from the logits of a block drafter, by products of per-position probabilities.
    m.def(
        "block_tree(Tensor logits, Tensor anchor_ids, Tensor positions, SymInt num_nodes, SymInt "
        "topk, *, SymInt vocab_size, Tensor? d2t=None, bool d2t_is_offset=True, Tensor? "
        "temperature=None) -> (Tensor input_ids, Tensor parents, Tensor tree_mask, Tensor "
        "node_positions, Tensor first_child, Tensor next_sibling, Tensor status)");
    // Ancestor masks, depths and child links of draft trees, from their parents.
    m.def(
        "tree_links(Tensor parents, Tensor cu_rows, SymInt max_nodes) -> (Tensor tree_mask, "
        "Tensor depth, Tensor first_child, Tensor next_sibling, Tensor status)");
    // The inverse: parents, depths and child links from ancestor masks.
    m.def(
        "tree_from_mask(Tensor tree_mask, Tensor cu_rows) -> (Tensor parents, Tensor depth, "
        "Tensor first_child, Tensor next_sibling, Tensor status)");

    // Features of several target layers as one row of the draft's width, normalised.
    m.def(
        "fuse_features(Tensor[] hiddens, Tensor fc_weight, Tensor? norm_weight=None, "
        "float eps=1e-06) -> Tensor");
    // Writes K (normalised and turned) and V of context rows to the caches of all draft layers.
    m.def(
        "inject_kv(Tensor kv, Tensor? k_norm_weight, Tensor cos, Tensor sin, Tensor positions, "
        "Tensor slots, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, *, float eps, "
        "bool interleaved=False, Tensor? cu_rows=None, Tensor? commit_rows=None, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

    // --- Round bookkeeping ---------------------------------------------------------------------
    // Writes this pass's K and V rows to their slots of a paged cache (quantising to fp8 caches).
    m.def(
        "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
    // Moves the KV of each request's accepted path to its first rows, in all caches listed.
    m.def(
        "compact_kv(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor slots, Tensor cu_rows, "
        "Tensor path, Tensor num_accepted) -> ()");
    // Ends a round: how many tokens are emitted, which requests finish, and the next draft block.
    m.def(
        "next_round(Tensor tokens, Tensor num_accepted, Tensor seq_lens, Tensor block_table, *, "
        "SymInt page_size, SymInt block_len, SymInt mask_token_id, Tensor? stop_token_ids=None, "
        "Tensor? max_len=None) -> (Tensor input_ids, Tensor positions, Tensor slots, "
        "Tensor new_seq_lens, Tensor num_emitted, Tensor finished)");

    // --- Build facts ---------------------------------------------------------------------------
    // The instruction set that CPU kernels use in this process: baseline, avx2, avx512, avx512bf16 or amx.
    m.def("_cpu_isa() -> str");
}
