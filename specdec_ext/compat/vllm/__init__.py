"""The speculative functions of vLLM (0.33), by its signatures: docs/compat_vllm.md.

specdec_ext.compat.vllm.v1   the first sampler generation, and the inputs of its EAGLE and DFlash proposers
specdec_ext.compat.vllm.v2   the second one (the V2 model runner), and the inputs of its speculators
"""

from specdec_ext.compat.vllm import v1, v2

__all__ = ["v1", "v2"]
