"""fuse_features against cat, linear and RMSNorm of torch: five hidden states of width 1024 (Qwen3-0.6B) into the
draft's width, 1, 8 and 64 rows."""

import torch
import torch.nn.functional as F
from compare import assert_close, assert_same
from oracles import fuse_features as oracle

import specdec_ext

LAYERS, WIDTH, EPS = 5, 1024, 1e-6
ROTATED_BYTES = 1 << 28


def bench(harness):
    on = harness.device
    for dtype in (torch.float32, torch.bfloat16):
        g = torch.Generator().manual_seed(0)
        _, weight, norm = oracle.random_case(g, 1, (WIDTH,) * LAYERS, WIDTH, dtype)
        norm = norm.to(on)
        weights = [weight.to(on).clone() for _ in range(ROTATED_BYTES // weight.nbytes)]
        for rows in (1, 8, 64):
            hiddens = [torch.randn(rows, WIDTH, generator=g).to(on, dtype) for _ in range(LAYERS)]

            def composed(w, hiddens=hiddens, norm=norm, dtype=dtype):
                y = F.linear(torch.cat(hiddens, -1), w)
                return F.rms_norm(y, (WIDTH,), norm, EPS)

            def ours(w, hiddens=hiddens, norm=norm):
                return specdec_ext.fuse_features(hiddens, w, norm, EPS)

            def check(ours=ours, composed=composed, hiddens=hiddens, norm=norm, w=weights[0]):
                got, peer = ours(w), composed(w)
                some = [h[:2].cpu() for h in hiddens]
                wanted = oracle.fuse_features(some, w.cpu(), norm.cpu(), EPS)
                assert_close(got[:2], wanted, peer[:2], what="y", magnitude=4.0)
                alone = specdec_ext.fuse_features([h[:1] for h in hiddens], w, norm, EPS)
                assert_same(got[:1], alone)

            harness.case(
                "fuse_features",
                f"{rows} rows, {LAYERS} x {WIDTH} to {WIDTH}, {str(dtype)[6:]}",
                inputs=weights,
                ours=ours,
                peers={"torch cat, linear, rms_norm": composed},
                bytes=weight.nbytes + (LAYERS + 1) * rows * WIDTH * dtype.itemsize,
                flops=2 * rows * LAYERS * WIDTH * WIDTH,
                dtype=dtype,
                check=check,
            )
