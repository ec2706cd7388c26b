"""Typed wrappers of torch.ops.specdec.*, each followed by its fake kernel (shapes and dtypes only).

Conventions shared by all ops (sizes, ragged layout, slots, status bits): docs/conventions.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.specdec


def op_names() -> list[str]:
    """Names of all public ops, as registered under torch.ops.specdec."""
    return ["append_kv", "verify_attention"]


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


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_rows: Tensor,
    seq_lens: Tensor,
    *,
    max_rows: int,
    scale: float | None = None,
    mask: str = "causal",
) -> tuple[Tensor, Tensor]:
    """Attention of the rows of a verification pass over a paged KV cache that already holds them.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1`` of q; row i of ``rows_b`` sits at place
    ``seq_lens[b] - rows_b + i`` of the request, and place t lies in page
    ``block_table[b, t // page_size]`` at ``t % page_size``. For every visible place t of a row,
    ``s_t = scale * q . k_t``; ``lse = ln sum exp(s_t)``; ``out = sum exp(s_t - lse) v_t``.

    Row j of a causal pass is bitwise the result of a one-row call at the same prefix, whatever the
    batch, the pages, the cache's strides and the number of threads.

    Args:
        q: ``[R, Hq, D]`` float32, float16 or bfloat16, last dimension dense. Rows that belong to no
            request are padding.
        k_cache: ``[num_pages, page_size, Hkv, D]``, dtype of q, any strides with a dense last
            dimension; Hq is a multiple of Hkv, page_size 1 .. 256. D and Dv: 64 or 128 on CUDA, any
            multiple of 16 up to 256 on the CPU.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, dtype of q.
        block_table: int32 ``[B, P]``. A place whose page is negative or not in the cache, or beyond
            column P, is visible to no row. Columns behind the last place are never read.
        cu_rows: int32 ``[B+1]``, non-decreasing; a request may have no rows.
        seq_lens: int32 ``[B]``, all places of the request including this pass's rows, which are the
            last ones. Places below 0 do not exist.
        max_rows: at least the largest number of rows of a request.
        scale: factor of the scores; None is ``D ** -0.5``.
        mask: "causal" (a row sees the places up to its own) or "full" (all rows of the request see
            all its places).

    Returns:
        out ``[R, Hq, Dv]`` in the dtype of q, and lse float32 ``[R, Hq]`` (natural logarithm). A row
        that sees no place, or belongs to no request, gets 0 and -inf. Values that some row of a
        request sees must be finite; everything else in the cache may be NaN.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.verify_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_rows,
        seq_lens,
        max_rows=max_rows,
        scale=scale,
        mask=mask,
    )


@torch.library.register_fake("specdec::verify_attention")
def _verify_attention_fake(
    q, k_cache, v_cache, block_table, cu_rows, seq_lens, *, max_rows, scale=None, mask="causal"
):
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, v_cache.shape[3])
    return out, q.new_empty(rows, heads, dtype=torch.float32)
