"""compact_kv against index_select and index_copy_ of torch, one of each per layer and side: 36 layers of 8
heads of 128 (Qwen3-8B)."""

import torch
from compare import assert_same
from oracles import compact_kv as oracle

import specdec_ext

LAYERS, KV_HEADS, HEAD_DIM, PAGE = 36, 8, 128, 16
NODES, WIDTH = 60, 8


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    for batch in (1, 8, 64):
        # As many other places as fit in memory: a call finds none of its own in the processor's caches.
        calls = max(1, 16 // batch)
        pages = calls * batch * NODES // PAGE + 1
        shape = (2 * LAYERS, pages, PAGE, KV_HEADS, HEAD_DIM)
        caches = torch.zeros(shape, dtype=torch.bfloat16, device=on)
        caches += torch.arange(pages * PAGE, device=on).view(1, pages, PAGE, 1, 1) % 251
        k_caches, v_caches = list(caches[:LAYERS]), list(caches[LAYERS:])
        slots = torch.randperm(pages * PAGE, generator=g)
        cu_rows = torch.arange(batch + 1, dtype=torch.int32) * NODES
        path = torch.full((batch, WIDTH), -1, dtype=torch.int32)
        path[:, :4] = torch.tensor([0, 2, 11, 33])  # three drafts accepted, all to be moved
        counts = torch.full((batch,), 3, dtype=torch.int32)
        first = cu_rows[:-1].long()[:, None]
        inputs = []
        for mine in slots[: calls * batch * NODES].view(calls, -1):
            source = mine[(first + path[:, 1:4]).flatten()]
            target = mine[(first + torch.arange(1, 4)).flatten()]
            inputs.append([t.to(on) for t in (mine, cu_rows, path, counts, source, target)])

        def ours(call, k_caches=k_caches, v_caches=v_caches):
            specdec_ext.compact_kv(k_caches, v_caches, *call[:4])

        def index_copy(call, both=k_caches + v_caches):
            *_, source, target = call  # which slots move is given to it
            for cache in both:
                flat = cache.view(-1, KV_HEADS, HEAD_DIM)
                flat.index_copy_(0, target, flat.index_select(0, source))

        def check(call=inputs[0], both=k_caches + v_caches, ours=ours):
            lists = [t.cpu() for t in call[:4]]
            wanted = oracle.compact_kv([cache.cpu() for cache in both[::35]], *lists)
            ours(call)
            for mine, theirs in zip(both[::35], wanted, strict=True):
                assert_same(mine.cpu(), theirs)

        harness.case(
            "compact_kv",
            f"{batch} x 3 places, {LAYERS} layers, 8 heads of 128, bfloat16",
            inputs=inputs,
            ours=ours,
            peers={"torch index_select, index_copy_": index_copy},
            bytes=2 * batch * 3 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2,
            check=check,
        )
