"""Results of row_linear on one instruction set, saved to the file named on the command line
(test_row_linear.py compares them). Not a test by itself: SPECDEC_CPU_ISA is read once per process."""

import sys

import torch

import specdec_ext


def results():
    out = {"isa": specdec_ext.cpu_isa()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rows, outputs, size in ((1, 7, 333), (3, 5, 64), (8, 6, 577), (13, 10, 31)):
            g = torch.Generator().manual_seed(size)
            x = torch.randn(rows, size, generator=g).to(dtype)
            weight = torch.randn(outputs, size, generator=g).to(dtype)
            bias = torch.randn(outputs, generator=g).to(dtype)
            x[0, size // 2], weight[2, 3] = 1e-40, 3e4
            out[f"{dtype} {rows} {outputs} {size}"] = specdec_ext.row_linear(x, weight, bias)
    return out


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
