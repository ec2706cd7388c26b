// The public API on one page. Shapes, laws and costs: docs/ and the docstrings in
// specdec_ext/ops.py.
#include "stable/abi.h"

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
    // --- Round bookkeeping ---------------------------------------------------------------------
    // Writes this pass's K and V rows to their slots of a paged cache (quantising to fp8 caches).
    m.def(
        "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, "
        "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

    // --- Build facts ---------------------------------------------------------------------------
    // The instruction set that CPU kernels use in this process: baseline, avx2 or avx512.
    m.def("_cpu_isa() -> str");
}
