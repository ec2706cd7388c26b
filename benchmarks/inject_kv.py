"""inject_kv against RMSNorm, RoPE and index_put_ of torch: the five draft layers of DFlash for Qwen3-8B, 8 heads
of 128."""

import torch
from compare import assert_close, assert_same
from oracles import inject_kv as oracle

import specdec_ext

LAYERS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 5, 8, 128, 16, 512
EPS, DTYPE = 1e-6, torch.bfloat16


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    shape = (2, LAYERS, PAGES, PAGE, KV_HEADS, HEAD_DIM)
    k_caches, v_caches = (list(c) for c in torch.zeros(shape, dtype=DTYPE, device=on))
    weight = (1 + 0.1 * torch.randn(LAYERS, HEAD_DIM, generator=g)).to(on, DTYPE)
    cos, sin = (t.to(on) for t in oracle.angles(PAGES * PAGE, HEAD_DIM, theta=1e6))
    # Other rows and other places in every call, through all of the caches.
    some = torch.randn(PAGES * PAGE, LAYERS, 2, KV_HEADS, HEAD_DIM, generator=g).to(on, DTYPE)
    every_slot = torch.randperm(PAGES * PAGE, generator=g).to(on)
    every_position = torch.randint(0, PAGES * PAGE, (PAGES * PAGE,), generator=g).to(on)
    for rows in (8, 64, 512):
        inputs = list(
            zip(*(t.split(rows) for t in (some, every_position, every_slot)), strict=True)
        )

        def ours(call):
            kv, positions, slots = call
            specdec_ext.inject_kv(
                kv, weight, cos, sin, positions, slots, k_caches, v_caches, eps=EPS
            )

        def composed(call):
            kv, positions, slots = call
            k = kv[:, :, 0].float()
            k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + EPS) * weight[:, None]
            c, s = cos[positions][:, None, None], sin[positions][:, None, None]
            a, b = k.chunk(2, -1)
            k = torch.cat([a * c - b * s, b * c + a * s], -1).to(DTYPE)
            for layer in range(LAYERS):
                k_caches[layer].view(-1, KV_HEADS, HEAD_DIM)[slots] = k[:, layer]
                v_caches[layer].view(-1, KV_HEADS, HEAD_DIM)[slots] = kv[:, layer, 1]

        def check(call=inputs[0], ours=ours, composed=composed):
            kv, _, slots = (t.cpu() for t in call)
            pages, places = slots // PAGE, slots % PAGE
            composed(call)
            peer = [c.cpu()[pages, places].clone() for c in k_caches]
            ours(call)
            exact = [torch.zeros(PAGES, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.float64)] * 2
            for layer in (0, LAYERS - 1):
                wanted = oracle.inject_kv(
                    kv[:8, layer : layer + 1], weight[layer:][:1].cpu(), cos.cpu(), sin.cpu(),
                    call[1][:8].cpu(), slots[:8], exact[:1], exact[1:], eps=EPS,
                )[0][0]  # fmt: skip
                got = k_caches[layer].cpu()[pages, places]
                assert_close(
                    got[:8], wanted[pages[:8], places[:8]], peer[layer][:8], what="k", magnitude=1.0
                )
                assert_same(v_caches[layer].cpu()[pages, places], kv[:, layer, 1])

        harness.case(
            "inject_kv",
            f"{rows} rows, {LAYERS} layers, 8 heads of 128, bfloat16",
            inputs=inputs,
            ours=ours,
            peers={"torch RMSNorm, RoPE, index_put_": composed},
            bytes=2 * rows * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2,
            check=check,
            target=2.0,
        )
