"""The one place where the engine multiplies activations by weights.

Everything the model computes for a pass goes through `linear`, so a kernel that streams each weight
once and rounds a row the same way in every batch can replace it here and nowhere else.

The rules below were measured on one AVX2 core, fp32, torch 2.13, over all weights of SmolLM2-135M
(milliseconds per pass, best of 8):

    rows                      1    2    3    4    5    6    7    8   16   32
    F.linear(x, w)           60  110  147  127  139  137  147  142  192  250
    (w @ x.T).T              61   84   80   72  120   97  120  109  190  234

One row is a matrix-vector product either way. From two rows on, the matrix library is better at "many
rows of w times a few columns" than at "a few rows of x times w", and best at 4, 6 and 8 columns; so
passes of up to 8 rows use the transposed product and are rounded up to such a count with dummy rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

MAX_TRANSPOSED_ROWS = 8
_CHEAP_ROW_COUNT = {2: 4, 3: 4, 5: 6, 7: 8}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] times weight [N, K] transposed: [R, N], contiguous."""
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and 2 <= x.size(0) <= MAX_TRANSPOSED_ROWS
    ):
        return torch.mm(weight, x.t()).t().contiguous()
    return functional.linear(x, weight)


def cheap_row_count(num_rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """The number of rows (>= num_rows) at which a pass over num_rows rows costs least."""
    if device.type == "cpu" and dtype == torch.float32:
        return _CHEAP_ROW_COUNT.get(num_rows, num_rows)
    return num_rows
