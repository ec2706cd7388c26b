"""Functions of serving engines, by their names and signatures, on the ops of this library.

Each module stands in for the one that an engine imports from; the functions take the same arguments, write the
same outputs in place and follow the same conventions, on the CPU and on CUDA:

    specdec_ext.compat.sgl_kernel   for sgl_kernel                             (docs/compat_sglang.md)
    specdec_ext.compat.flashinfer   for flashinfer, flashinfer.sampling        (docs/compat_flashinfer.md)
    specdec_ext.compat.vllm.v1      for vllm.v1.sample, vllm.v1.spec_decode    (docs/compat_vllm.md)
    specdec_ext.compat.vllm.v2      for vllm.v1.worker.gpu.spec_decode         (docs/compat_vllm.md)

They are for changing over step by step: the ops themselves take logits, per-request controls and ragged
rows, and need neither probabilities nor scratch.
"""
