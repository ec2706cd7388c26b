"""verify_attention against every formulation of torch's scaled_dot_product_attention that computes
the same, heads of Llama-3.1-8B and Qwen3-8B (32 query heads, 8 KV heads, head_dim 128).

torch gets K and V gathered from their pages and turned to [1, Hkv, places, D] for nothing, and its
masks ready made; ours reads the pages. is_causal aligns the first row with the first key, so it
computes something else here and cannot be used; a single row needs no mask.

With several rows the CPU is bound by arithmetic, not by memory: 4 Hq D operations per row and place, so
the floor of arithmetic is printed beside that of memory.
"""

import torch
import torch.nn.functional as F
from compare import assert_close
from oracles import verify_attention as oracle

import specdec_ext

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS


def peers_of(q, keys, values):
    """name -> call, of one request; every result is [1, .., D] in some order of rows and heads."""
    rows, places = q.shape[0], keys.shape[2]
    heads_first = q.transpose(0, 1)[None].contiguous()  # [1, Hq, rows, D]
    # Hand-packed: the rows of all heads that share a KV head, [1, Hkv, rows * group, D].
    packed = q.view(rows, KV_HEADS, GROUP, HEAD_DIM).transpose(0, 1)
    packed = packed.reshape(1, KV_HEADS, rows * GROUP, HEAD_DIM).contiguous()
    if rows == 1:
        return {
            "torch sdpa, packed": lambda _: F.scaled_dot_product_attention(packed, keys, values),
            "torch sdpa, enable_gqa": lambda _: F.scaled_dot_product_attention(
                heads_first, keys, values, enable_gqa=True
            ),
        }
    seen = torch.ones(rows, places, dtype=torch.bool, device=q.device).tril(places - rows)
    packed_seen = seen.repeat_interleave(GROUP, 0)
    added = torch.zeros(packed_seen.shape, dtype=q.dtype, device=q.device)
    added.masked_fill_(~packed_seen, float("-inf"))
    wide = [t.repeat_interleave(GROUP, 1) for t in (keys, values)]
    return {
        "torch sdpa, packed, float mask": lambda _: F.scaled_dot_product_attention(
            packed, keys, values, attn_mask=added
        ),
        "packed, bool mask": lambda _: F.scaled_dot_product_attention(
            packed, keys, values, attn_mask=packed_seen
        ),
        "enable_gqa": lambda _: F.scaled_dot_product_attention(
            heads_first, keys, values, attn_mask=seen, enable_gqa=True
        ),
        "expanded heads": lambda _: F.scaled_dot_product_attention(
            heads_first, *wide, attn_mask=seen
        ),
    }


def bench(harness):
    on = harness.device
    for rows, places, dtype, target in [
        (8, 8192, torch.bfloat16, 2.0),
        (8, 8192, torch.float32, 2.0),
        (8, 1024, torch.bfloat16, None),
        (1, 8192, torch.bfloat16, None),
    ]:
        g = torch.Generator().manual_seed(rows + places)
        case = oracle.random_case(
            g,
            [rows],
            [places],
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE,
            dtype=dtype,
            spare_pages=0,
        )
        on_device = [t.to(on) for t in case]
        q, k_cache, v_cache, table = on_device[:4]
        pages = table[0, : places // PAGE].long()
        keys, values = (
            c[pages].reshape(1, places, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
            for c in (k_cache, v_cache)
        )
        peers = peers_of(q, keys, values)

        def ours(_, arguments=on_device, rows=rows):
            return specdec_ext.verify_attention(*arguments, max_rows=rows)

        def check(case=case, ours=ours, peers=peers, rows=rows):
            out, lse = ours(None)
            wanted, wanted_lse = oracle.verify_attention(*case, max_rows=rows)
            first = next(iter(peers.values()))(None)  # packed: [1, Hkv, rows * group, D]
            peer = first.view(KV_HEADS, rows, GROUP, HEAD_DIM).transpose(0, 1).reshape(out.shape)
            assert_close(out, wanted, peer, what="out")
            assert_close(lse, wanted_lse, what="lse", magnitude=16.0)

        size = dtype.itemsize
        harness.case(
            "verify_attention",
            f"{rows} rows, {places} places, {str(dtype)[6:]}",
            ours=ours,
            peers=peers,
            bytes=2 * places * KV_HEADS * HEAD_DIM * size + 2 * rows * HEADS * HEAD_DIM * size,
            flops=4 * HEADS * HEAD_DIM * (rows * places - rows * (rows - 1) // 2),
            dtype=dtype,
            check=check,
            target=target,
        )
    for rows, places in [(8, 8192), (1, 8192)]:
        bench_fp8(harness, rows, places)


def bench_fp8(harness, rows, places):
    """float8 caches with a scale per head against the same call on bf16 caches: half the bytes, and so
    no slower."""
    g = torch.Generator().manual_seed(rows + places)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE}
    q, k_cache, v_cache, *lists = oracle.random_case(
        g, [rows], [places], dtype=torch.bfloat16, spare_pages=0, **shape
    )
    scales = {
        "k_scale": torch.linspace(0.5, 1.5, KV_HEADS),
        "v_scale": torch.linspace(2.0, 0.25, KV_HEADS),
    }
    stored = [
        oracle.unscaled(cache, 1 / scale).to(torch.float8_e4m3fn)
        for cache, scale in zip((k_cache, v_cache), scales.values(), strict=True)
    ]
    on = harness.device
    plain = [t.to(on) for t in (q, k_cache, v_cache, *lists)]
    arguments = [t.to(on) for t in (q, *stored, *lists)]
    on_device = {name: scale.to(on) for name, scale in scales.items()}

    def ours(_):
        return specdec_ext.verify_attention(*arguments, max_rows=rows, **on_device)

    def check():
        out, lse = ours(None)
        options = {"max_rows": rows, **scales}
        wanted, wanted_lse = oracle.verify_attention(q, *stored, *lists, **options)
        peer, _ = oracle.torch_peer(q, *stored, *lists, **options)
        assert_close(out, wanted, peer, what="out")
        assert_close(lse, wanted_lse, what="lse", magnitude=16.0)

    harness.case(
        "verify_attention",
        f"{rows} rows, {places} places, bfloat16, fp8 cache",
        ours=ours,
        peers={
            "bf16 cache": lambda _: specdec_ext.verify_attention(*plain, max_rows=rows),
        },
        bytes=2 * places * KV_HEADS * HEAD_DIM + 2 * rows * HEADS * HEAD_DIM * 2,
        flops=4 * HEADS * HEAD_DIM * (rows * places - rows * (rows - 1) // 2),
        dtype=torch.bfloat16,
        check=check,
        target=1.0,
    )
