"""Argument checks of functions that are tensor code, in the words of the ops: name, argument, wanted, got."""

from __future__ import annotations

from torch import Tensor


def fail(function, argument, wanted, got):
    raise RuntimeError(f"specdec_ext.{function}: {argument}: wanted {wanted}, got {got}")


def check(function, argument, t, shape, dtypes, sizes=(), like=None):
    """A tensor of so many dimensions; sizes: (dimension, size, of what); like: (name, tensor) on its device."""
    if not isinstance(t, Tensor):
        fail(function, argument, "a tensor", type(t).__name__)
    if t.dim() != shape.count(",") + 1:
        fail(function, argument, f"shape {shape}", list(t.shape))
    if dtypes and t.dtype not in dtypes:
        names = " or ".join(str(dtype)[6:] for dtype in dtypes)
        fail(function, argument, f"dtype {names}", str(t.dtype)[6:])
    for dim, size, what in sizes:
        if t.shape[dim] != size:
            fail(function, argument, f"size {size} ({what})", t.shape[dim])
    if like is not None and t.device != like[1].device:
        fail(function, argument, f"device {like[1].device} (of {like[0]})", t.device)
