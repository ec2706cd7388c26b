"""append_kv against index_put_ of torch on the flattened cache, one layer of Llama-3.1-8B."""

import torch
from compare import assert_same
from oracles import append_kv as oracle

import specdec_ext

KV_HEADS, HEAD_DIM, PAGE, PAGES = 8, 128, 16, 2048


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    shape = (PAGES, PAGE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = torch.zeros(2, *shape, dtype=torch.bfloat16, device=on)
    # Other rows and other places in every call, through all of the cache: a model's next layer finds
    # none of them in the processor's caches.
    some = torch.randn(2, 4096, KV_HEADS, HEAD_DIM, generator=g).bfloat16()
    every_k, every_v = some.repeat(1, PAGES * PAGE // 4096, 1, 1).to(on)
    every_slot = torch.randperm(PAGES * PAGE, generator=g).to(on)
    for rows in (8, 64, 512):
        inputs = list(zip(*(t.split(rows) for t in (every_k, every_v, every_slot)), strict=True))

        def ours(call):
            k, v, slots = call
            specdec_ext.append_kv(k, v, k_cache, v_cache, slots)

        def index_put(call):
            k, v, slots = call
            k_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = k
            v_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = v

        def check(call=inputs[0], ours=ours):
            k, v, slots = (t.cpu() for t in call)
            wanted = oracle.append_kv(k, v, k_cache.cpu(), v_cache.cpu(), slots)
            ours(call)
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
