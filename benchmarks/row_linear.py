"""row_linear against torch.nn.functional.linear, layers of SmolLM2-135M: 1 and 8 rows.

Weights are rotated through more memory than a cache holds, as the layers of a model are. A second contender,
"own one-row call", is row_linear with the first row: its ratio is one row over all rows, so 0.80 means
that the call costs 1.25 times a call of one row.
"""

import torch
import torch.nn.functional as F
from compare import assert_close, assert_same
from oracles import row_linear as oracle

import specdec_ext

LAYERS = {"qkv": (960, 576), "gate, up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROTATED_BYTES = 1 << 28


def bench(harness):
    for dtype in (torch.float32, torch.bfloat16):
        for name, (outputs, size) in LAYERS.items():
            g = torch.Generator().manual_seed(size)
            copies = -(-ROTATED_BYTES // (outputs * size * dtype.itemsize))
            _, weight, _ = oracle.random_case(g, 1, outputs, size, dtype)
            weights = [weight.to(harness.device).clone() for _ in range(copies)]
            for rows in (1, 8):
                case(harness, name, weights, torch.randn(rows, size, generator=g).to(dtype))


def case(harness, name, weights, x):
    x = x.to(harness.device)
    (rows, size), outputs, dtype = x.shape, weights[0].shape[0], x.dtype
    first = x[:1]
    peers = {"torch linear": lambda w: F.linear(x, w)}
    if rows > 1:
        peers["own one-row call"] = lambda w: specdec_ext.row_linear(first, w)

    def check():
        got = specdec_ext.row_linear(x, weights[0])
        some = weights[0][:64]
        wanted, peer = oracle.row_linear(x.cpu(), some.cpu()), F.linear(x, some)
        assert_close(got[:, :64], wanted, peer, what="y", magnitude=1.0)
        assert_same(got[:1], specdec_ext.row_linear(first, weights[0]))

    harness.case(
        "row_linear",
        f"{name}, {rows} rows, {str(dtype)[6:]}",
        inputs=weights,
        ours=lambda w: specdec_ext.row_linear(x, w),
        peers=peers,
        bytes=(outputs * size + rows * (outputs + size)) * dtype.itemsize,
        flops=2 * rows * outputs * size,
        dtype=dtype,
        check=check,
    )
