"""The table by which greedy drafts of `markov_draft` leave out columns that cannot win.

csrc/kernels/markov_draft/bounds.h has the bound and its proof; docs/dspark.md says when it pays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16  # columns whose codes lie together
MAX_WIDTH = 1024
_LARGEST = 127
_HUGE = 1e15  # of norms: rows beyond are never left out
_SLAB = 8192  # rows at a time


class PreparedHead(NamedTuple):
    """What `markov_draft(prepared=)` takes; rows of w2 in tiles of 16.

    codes: int8 ``[tiles, ceil(r / 4), 16, 4]``, turned rows in units of their scale.
    rows: float32 ``[tiles, 3, 16]``: scale, norm of what rounding lost, norm of what is left.
    turn: float32 ``[4 ceil(r / 4)]``, signs of the turn over the root of the size of their transform.
    """

    codes: Tensor
    rows: Tensor
    turn: Tensor


def _transforms(width):
    """(from, size) of the Walsh-Hadamard transforms of a row: powers of two, the largest that fit."""
    at = 0
    while at < width:
        size = 1 << ((width - at).bit_length() - 1)
        yield at, size
        at += size


def _turned(x, turn):
    """Rows of x in float64 times an orthogonal matrix: signs, then transforms."""
    x = torch.nn.functional.pad(x.double(), (0, len(turn) - x.shape[1]))
    signs = turn.double().sign()
    out = torch.empty_like(x)
    for at, size in _transforms(len(turn)):
        part = (x[:, at : at + size] * signs[at : at + size]).unsqueeze(1)
        while part.shape[-1] > 1:
            low, high = part.chunk(2, -1)
            part = torch.stack([low + high, low - high], 2).flatten(1, 2)
        out[:, at : at + size] = part[:, :, 0] / size**0.5
    return out


def _above(x):
    """float32 numbers above those of x (float64, not negative)."""
    x = x.float()
    return torch.nextafter(x, torch.full_like(x, float("inf")))


def prepare_markov(w2: Tensor) -> PreparedHead:
    """Round the rows of a DSpark head's w2 to 8 bits, with bounds on what that loses.

    Every row is turned by a fixed orthogonal matrix (random signs, then Walsh-Hadamard transforms of the largest
    powers of two that fit the rank), which spreads it evenly over its places, and rounded to 127 steps each way.
    The table takes 0.52 of the memory of a bfloat16 w2 of rank 256, is made once for a checkpoint and belongs
    to these values of w2: after a change of w2, make it again.

    Args:
        w2: ``[V', r]`` float32, float16 or bfloat16, any strides, r at most 1024.

    Returns:
        PreparedHead: three tensors on the device of w2.

    Raises:
        RuntimeError: wrong shape or dtype.
    """
    if not isinstance(w2, Tensor):
        raise RuntimeError(f"specdec::prepare_markov: w2: wanted a tensor, got {type(w2).__name__}")
    w2 = w2.detach()
    if w2.dim() != 2 or w2.shape[1] > MAX_WIDTH:
        raise RuntimeError(
            f"specdec::prepare_markov: w2: wanted shape [V', r], r <= {MAX_WIDTH}, got {list(w2.shape)}"
        )
    if w2.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError(
            f"specdec::prepare_markov: w2: wanted dtype float32 or float16 or bfloat16, got {str(w2.dtype)[6:]}"
        )
    columns, rank = w2.shape
    width, tiles = (rank + 3) // 4 * 4, (columns + TILE - 1) // TILE
    # Whatever the default dtype and device are: the codes belong to this matrix to the last bit.
    g = torch.Generator().manual_seed(2507)
    sign = torch.randint(0, 2, (width,), generator=g, device="cpu").float() * 2 - 1
    for at, size in _transforms(width):
        sign[at : at + size] /= size**0.5
    turn = sign.to(w2.device)
    codes = torch.zeros(tiles * TILE, width, dtype=torch.int8, device=w2.device)
    rows = torch.zeros(tiles * TILE, 3, dtype=torch.float32, device=w2.device)
    for begin in range(0, columns, _SLAB):
        slab = w2[begin : begin + _SLAB]
        end = begin + len(slab)
        codes[begin:end], rows[begin:end] = _rounded(slab, turn)
    return PreparedHead(
        codes.view(tiles, TILE, width // 4, 4).transpose(1, 2).contiguous(),
        rows.view(tiles, TILE, 3).transpose(1, 2).contiguous(),
        turn,
    )


def _rounded(w, turn):
    """codes int8 [n, width] and float32 [n, 3] of rows of w2."""
    size = w.double().norm(dim=1)
    x = _turned(w, turn)
    usable = torch.isfinite(size) & (size < _HUGE)
    x = torch.where(usable[:, None], x, torch.zeros_like(x))
    scale = (x.abs().amax(1) if x.shape[1] else x.sum(1)).div(_LARGEST).float()
    # Rows as good as 0 have no codes: what they are is lost, and bounded.
    scale = torch.where(scale > 1e-30, scale, torch.zeros_like(scale)).double()
    unit = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (x / unit[:, None]).round().clamp(-_LARGEST, _LARGEST) * (scale > 0)[:, None]
    kept = codes * scale[:, None]
    left = kept.norm(dim=1) * (1 + 1e-9)
    # float32 rounding of the canonical sum and of the bound itself, relative to |w| |y|; and what flushed
    # subnormal numbers could lose.
    rounding = (w.shape[1] + 64) * 2.0**-24 * (size + left)
    lost = (x - kept).norm(dim=1) * (1 + 1e-9) + rounding + 1e-30
    lost = torch.where(usable, _above(lost), torch.full_like(lost, float("inf")).float())
    return codes.to(torch.int8), torch.stack([scale.float(), lost, _above(left)], 1)
