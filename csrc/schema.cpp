// The public API on one page. Shapes, laws and costs: docs/ and the docstrings in
// specdec_ext/ops.py.
#include "stable/abi.h"

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
    // --- Verification --------------------------------------------------------------------------
    // Attention of the rows of a verification pass over a paged KV cache: out and its log-sum-exp.
    m.def(
        "verify_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
        "Tensor cu_rows, Tensor seq_lens, *, SymInt max_rows, float? scale=None, "
        "str mask=\"causal\") -> (Tensor out, Tensor lse)");

    // --- Round bookkeeping ---------------------------------------------------------------------
    // Writes this pass's K and V rows to their slots of a paged cache (quantising to fp8 caches).
    m.def(
        "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

    // --- Build facts ---------------------------------------------------------------------------
    // The instruction set that CPU kernels use in this process: baseline, avx2 or avx512.
    m.def("_cpu_isa() -> str");
}
