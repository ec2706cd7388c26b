"""Results of row_linear on this process's instruction set: see instruction_sets.py and test_row_linear.py."""

import torch

import specdec_ext

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 7, 333), (3, 5, 64), (8, 6, 577), (13, 10, 31), (40, 37, 96))


def cases():
    """Name, and x, weight and bias."""
    for dtype in DTYPES:
        for rows, outputs, size in SHAPES:
            g = torch.Generator().manual_seed(size)
            x = torch.randn(rows, size, generator=g).to(dtype)
            weight = torch.randn(outputs, size, generator=g).to(dtype)
            bias = torch.randn(outputs, generator=g).to(dtype)
            x[0, size // 2], weight[2, 3] = 1e-40, 3e4
            yield f"{dtype} {rows} {outputs} {size}", (x, weight, bias)


def results():
    out = {}
    for name, (x, weight, bias) in cases():
        out[name] = specdec_ext.row_linear(x, weight, bias)
        alone = [specdec_ext.row_linear(x[r : r + 1], weight, bias) for r in range(x.shape[0])]
        out[f"{name} row by row"] = torch.cat(alone)
    return out
