"""append_kv against index_put_ of torch on the flattened cache, one layer of Llama-3.1-8B."""

import torch
from compare import assert_same
from oracles import append_kv as oracle

import specdec_ext

KV_HEADS, HEAD_DIM, PAGE, PAGES = 8, 128, 16, 2048


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    for rows in (8, 64, 512):
        k, v = torch.randn(2, rows, KV_HEADS, HEAD_DIM, generator=g).bfloat16().to(on)
        shape = (PAGES, PAGE, KV_HEADS, HEAD_DIM)
        k_cache, v_cache = torch.zeros(2, *shape, dtype=torch.bfloat16, device=on)
        # Other places in every call, as in a growing cache.
        inputs = [
            torch.randperm(PAGES * PAGE, generator=g)[:rows].to(on)
            for _ in range(max(2, 512 // rows))
        ]

        def ours(slots, k=k, v=v, k_cache=k_cache, v_cache=v_cache):
            specdec_ext.append_kv(k, v, k_cache, v_cache, slots)

        def index_put(slots, k=k, v=v, k_cache=k_cache, v_cache=v_cache):
            k_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = k
            v_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = v

        def check(ours=ours, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=inputs[0]):
            wanted = oracle.append_kv(k.cpu(), v.cpu(), k_cache.cpu(), v_cache.cpu(), slots.cpu())
            ours(slots)
            assert_same(k_cache.cpu(), wanted[0], "k_cache")
            assert_same(v_cache.cpu(), wanted[1], "v_cache")

        harness.case(
            "append_kv",
            f"{rows} rows, 8 heads of 128, bfloat16",
            inputs=inputs,
            ours=ours,
            peers={"torch index_put_": index_put},
            bytes=2 * 2 * rows * KV_HEADS * HEAD_DIM * 2,
            check=check,
        )
