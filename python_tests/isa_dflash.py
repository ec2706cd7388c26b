"""Results of inject_kv and fuse_features on this process's instruction set: see instruction_sets.py and test_fuse_features.py."""

import torch
from oracles import fuse_features as fuse_oracle
from oracles import inject_kv as inject_oracle

import specdec_ext


def results():
    out = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size, rotary_dim, cache_dtype in (
            (128, 128, None),
            (80, 50, torch.float8_e4m3fn),
            (37, 12, None),
        ):
            g = torch.Generator().manual_seed(size)
            case = inject_oracle.random_case(
                g, head_dim=size, rotary_dim=rotary_dim, dtype=dtype, cache_dtype=cache_dtype
            )
            for interleaved in (False, True):
                arguments = [case[name] for name in inject_oracle.NAMES]
                specdec_ext.inject_kv(*arguments, eps=1e-6, interleaved=interleaved)
                for name in ("k_caches", "v_caches"):
                    out[f"inject {dtype} {size} {interleaved} {name}"] = torch.stack(
                        case[name]
                    ).clone()
            arguments = fuse_oracle.random_case(g, 9, (33, 40, 7), size, dtype)
            for norm in (None, arguments[2]):
                fused = specdec_ext.fuse_features(*arguments[:2], norm)
                out[f"fuse {dtype} {size} {norm is not None}"] = fused
    return out
