"""What the emulator counts: launches and bytes per op against the floor, sector efficiency.

The hooks build sees every access of the kernels' real source, so these are exact counts of what a GPU
would be asked for (docs/cuda_on_cpu.md), not estimates.
"""

import backends
import pytest
import torch

pytestmark = pytest.mark.skipif(
    "emu_hooks" not in backends.available(), reason="the hooks build is not among the backends"
)


def global_lines(stats, op):
    return [line for line in stats["lines"] if line["space"] == "global" and line["op"] == op]


def assert_full_sectors(stats, ignore=()):
    """Every line that streams data uses each 32-byte sector that it fetches."""
    for line in stats["lines"]:
        if line["space"] != "global" or line["bytes"] < 1024:
            continue
        assert line["sectors"] == line["ideal_sectors"], line


def test_append_kv_moves_each_byte_once():
    backend = backends.get("emu_hooks")
    rows, heads, head_dim = 12, 2, 128
    k, v = torch.randn(2, rows, heads, head_dim).bfloat16()
    k_cache, v_cache = torch.zeros(2, 4, 16, heads, head_dim).bfloat16()
    slots = torch.randperm(64)[:rows]
    stats = backend.stats(lambda: backend.ops.append_kv(k, v, k_cache, v_cache, slots))
    assert stats["launches"] == 1
    for name in ("k", "v"):
        assert stats["tensors"][name]["read_bytes"] == k.numel() * 2
        assert stats["tensors"][f"{name}_cache"]["written_bytes"] == k.numel() * 2
        assert stats["tensors"][f"{name}_cache"]["read_bytes"] == 0
    assert_full_sectors(stats)
