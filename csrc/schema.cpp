// The public API on one page. Shapes, laws and costs: docs/ and the docstrings in
// specdec_ext/ops.py.
#include "stable/abi.h"

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
    // --- Verification --------------------------------------------------------------------------
    // Accepts a prefix of each request's drafts so that the emitted tokens have the target's law.
    m.def(
        "verify_chain(Tensor target_logits, Tensor input_ids, Tensor cu_rows, Tensor seeds, "
        "Tensor positions, SymInt max_drafts, *, SymInt vocab_size, Tensor? draft_logits=None, "
        "Tensor? draft_rows=None, Tensor? draft_temperature=None, Tensor? draft_is_one_hot=None, "
        "str method=\"token\", Tensor? temperature=None) -> (Tensor tokens, Tensor num_accepted, "
        "Tensor status, Tensor logprobs, Tensor top_ids, Tensor top_logprobs)");
    // One token per row from softmax(logits / temperature), with its log-probability.
    m.def(
        "sample(Tensor logits, Tensor seeds, Tensor positions, *, SymInt vocab_size, "
        "Tensor? temperature=None) -> (Tensor tokens, Tensor logprob, Tensor lse, Tensor status, "
        "Tensor top_ids, Tensor top_logprobs)");
    // Attention of the rows of a verification pass over a paged KV cache: out and its log-sum-exp.
    m.def(
        "verify_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
        "Tensor cu_rows, Tensor seq_lens, *, SymInt max_rows, float? scale=None, "
        "str mask=\"causal\") -> (Tensor out, Tensor lse)");

    // --- Drafting ------------------------------------------------------------------------------
    // Ancestor masks, depths and child links of draft trees, from their parents.
    m.def(
        "tree_links(Tensor parents, Tensor cu_rows, SymInt max_nodes) -> (Tensor tree_mask, "
        "Tensor depth, Tensor first_child, Tensor next_sibling, Tensor status)");
    // The inverse: parents, depths and child links from ancestor masks.
    m.def(
        "tree_from_mask(Tensor tree_mask, Tensor cu_rows) -> (Tensor parents, Tensor depth, "
        "Tensor first_child, Tensor next_sibling, Tensor status)");

    // --- Round bookkeeping ---------------------------------------------------------------------
    // Writes this pass's K and V rows to their slots of a paged cache (quantising to fp8 caches).
    m.def(
        "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

    // --- Build facts ---------------------------------------------------------------------------
    // The instruction set that CPU kernels use in this process: baseline, avx2 or avx512.
    m.def("_cpu_isa() -> str");
}
