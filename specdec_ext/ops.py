"""Typed wrappers of torch.ops.specdec.*, each followed by its fake kernel (shapes and dtypes only).

Conventions shared by all ops (sizes, ragged layout, slots, status bits): docs/conventions.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.specdec


def op_names() -> list[str]:
    """Names of all public ops, as registered under torch.ops.specdec."""
    return ["append_kv"]


def cpu_isa() -> str:
    """Instruction set of the CPU kernels in this process: "baseline", "avx2" or "avx512".

    SPECDEC_CPU_ISA forces one (it must be supported by the CPU); results are bitwise the same.
    """
    return _ops._cpu_isa()


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write this pass's K and V rows into a paged KV cache, in one launch.

    For every row r with ``0 <= slots[r] < num_pages * page_size``:
    ``k_cache[slots[r] // page_size, slots[r] % page_size] = k[r]``, and the same for v.

    Args:
        k: ``[R, Hkv, D]`` float32, float16 or bfloat16, last dimension dense.
        v: ``[R, Hkv, Dv]``, dtype of k.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides with a dense last dimension (NHD,
            HND and interleaved caches are views); dtype of k, or float8_e4m3fn. Written in place.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, dtype of k_cache. Written in place.
        slots: ``[R]`` int32 or int64; a slot outside the cache (such as -1) writes nothing. Two rows
            with the same slot: undefined which one stays.
        k_scale, v_scale: float32 ``[1]`` or ``[Hkv]``, for float8 caches only: x / scale is stored,
            rounded to nearest even, saturated to +-448, NaN kept. None is 1.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    _ops.append_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


@torch.library.register_fake("specdec::append_kv")
def _append_kv_fake(k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None):
    return None
