"""The two ways in which the engine multiplies activations by weights; `--linear` picks one.

`specdec` is the op `row_linear`: a row has the same bits in a pass of any size, so a pass over drafts
computes exactly what decoding one by one computes, in every dtype, and greedy outputs are identical.

`torch` is the matrix library, whose rounding of a row hangs on the number of rows. Its rules below were
measured on one AVX2 core, fp32, torch 2.13, over all weights of SmolLM2-135M (milliseconds per pass, best
of 8):

    rows                      1    2    3    4    5    6    7    8   16   32
    F.linear(x, w)           60  110  147  127  139  137  147  142  192  250
    (w @ x.T).T              61   84   80   72  120   97  120  109  190  234

One row is a matrix-vector product either way. From two rows on, the matrix library is better at "many
rows of w times a few columns" than at "a few rows of x times w", and best at 4, 6 and 8 columns; so
passes of up to 8 rows use the transposed product and are rounded up to such a count with dummy rows.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

ops = torch.ops.specdec

MAX_TRANSPOSED_ROWS = 8
_CHEAP_ROW_COUNT = {2: 4, 3: 4, 5: 6, 7: 8}


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [R, K] times weight [N, K] transposed: [R, N], contiguous."""

    def cheap_row_count(self, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        """The number of rows (>= num_rows) at which a pass over num_rows rows costs least."""


class SpecdecLinear:
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.row_linear(x, weight)

    def cheap_row_count(self, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        return num_rows


class TorchLinear:
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if (
            x.device.type == "cpu"
            and x.dtype == torch.float32
            and 2 <= x.size(0) <= MAX_TRANSPOSED_ROWS
        ):
            return torch.mm(weight, x.t()).t().contiguous()
        return functional.linear(x, weight)

    def cheap_row_count(self, num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
        if device.type == "cpu" and dtype == torch.float32:
            return _CHEAP_ROW_COUNT.get(num_rows, num_rows)
        return num_rows


LINEARS: dict[str, Linear] = {"specdec": SpecdecLinear(), "torch": TorchLinear()}
