"""Results of verify_attention on this process's instruction set: see instruction_sets.py and test_verify_attention.py."""

import torch
from oracles import verify_attention as oracle

import specdec_ext


def results():
    out = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results_of(dtype, {}, out)
        fp8 = {"k_scale": torch.tensor([0.3, 1.7]), "v_scale": torch.tensor([2.5, 0.1])}
        results_of(dtype, fp8, out)
    return out


def results_of(dtype, scales, out):
    """Into `out`. Scales are those of float8 caches."""
    kind = f"{dtype}, fp8 cache" if scales else f"{dtype}"
    cache_dtype = torch.float8_e4m3fn if scales else dtype
    for head_dim, rows, lens in ((64, [3, 0, 1], [70, 9, 600]), (80, [7, 2], [65, 1])):
        g = torch.Generator().manual_seed(head_dim)
        case = oracle.random_case(
            g,
            rows,
            lens,
            heads=10,
            head_dim=head_dim,
            page_size=9,
            dtype=dtype,
            spare_rows=1,
            cache_dtype=cache_dtype,
        )
        for mask in ("causal", "full"):
            found = specdec_ext.verify_attention(*case, max_rows=7, mask=mask, **scales)
            for name, t in zip(("out", "lse"), found, strict=True):
                out[f"{name} of {kind} {head_dim} {mask}"] = t
        tree_mask, positions = oracle.random_trees(g, [*rows, 1], [*lens, 1])
        found = specdec_ext.verify_attention(
            *case,
            max_rows=7,
            mask="tree",
            tree_mask=tree_mask,
            positions=positions,
            window=50,
            softcap=0.7,
            sinks=torch.linspace(-2, 2, 10),
            **scales,
        )
        for name, t in zip(("out", "lse"), found, strict=True):
            out[f"{name} of {kind} {head_dim} tree"] = t
