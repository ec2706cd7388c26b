"""inject_kv's CUDA kernel moves each byte of K and V once, in one launch and in whole sectors."""

import backends
import pytest
import torch
from oracles import inject_kv as oracle

HOOKS = [name for name in backends.available() if name == "emu_hooks"]


@pytest.fixture(params=HOOKS)
def hooks(request):
    return backends.get(request.param)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_moves_each_byte_once(hooks, cache_dtype, interleaved):
    """Five layers of 8 heads of 128, three requests: bytes in all within 5 % of kv, what is stored of it, the
    angles of the rows and the norm weights."""
    g = torch.Generator().manual_seed(1)
    rows, layers, heads, size = 12, 5, 8, 128
    case = oracle.random_case(
        g, rows=rows, layers=layers, heads=heads, head_dim=size, dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    case["positions"][2] = 5
    case["slots"] = torch.arange(rows)
    case["cu_rows"] = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    case["commit_rows"] = torch.tensor([4, 1, 3], dtype=torch.int32)
    angles = 8 * case["cos"].shape[1] * (4 + 4)
    weights = case["k_norm_weight"].nbytes
    arguments = [case.pop(name) for name in oracle.NAMES]
    stats = hooks.stats(lambda: hooks.ops.inject_kv(*arguments, interleaved=interleaved, **case))
    assert stats["launches"] == 1
    tensors, written = stats["tensors"], 8 * layers * heads * size
    assert tensors["kv"]["read_bytes"] == 2 * written * 2
    for name in ("k_caches", "v_caches"):
        assert tensors[name]["written_bytes"] == written * cache_dtype.itemsize
        assert tensors[name]["read_bytes"] == 0
    total = sum(t["read_bytes"] + t["written_bytes"] for t in tensors.values())
    floor = 2 * written * (2 + cache_dtype.itemsize) + angles + weights
    assert total <= 1.05 * floor, (total, floor)
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] >= 1024:
            assert line["sectors"] == line["ideal_sectors"], line


def test_rows_that_are_not_written_are_not_read(hooks):
    case = oracle.random_case(torch.Generator().manual_seed(2), rows=3, head_dim=8)
    case["cu_rows"], case["commit_rows"] = torch.tensor([0, 3]).int(), torch.tensor([0]).int()
    arguments = [case.pop(name) for name in oracle.NAMES]
    tensors = hooks.stats(lambda: hooks.ops.inject_kv(*arguments, **case))["tensors"]
    for name in ("kv", "cos", "k_norm_weight"):
        assert tensors[name]["read_bytes"] == 0
