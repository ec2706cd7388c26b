"""Sectors and wavefronts of access patterns, against what the hardware rules say."""

import pathlib
import re

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent


def line_of(mark, source="counters.cu"):
    text = (HERE / source).read_text().splitlines()
    return next(i for i, line in enumerate(text, 1) if re.search(rf"@{mark}\b", line))


def aligned(count):
    """Zero bytes from a 128-byte border on, as allocations on a GPU are."""
    memory = np.zeros(count + 128, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + count]


def entry(stats, mark, space="global"):
    found = [e for e in stats["lines"] if e["line"] == line_of(mark) and e["space"] == space]
    assert len(found) == 1, stats["lines"]
    assert found[0]["file"].endswith("cuda_on_cpu/tests/counters.cu")
    return found[0]


@pytest.mark.parametrize("order", ["forward", "reverse", "random", "skewed"])
@pytest.mark.parametrize(
    "bytes_each, stride, offset, sectors, ideal",
    [
        (4, 1, 0, 16, 16),  # 4 warps, each 128 bytes in a row
        (4, 2, 0, 32, 16),
        (4, 8, 0, 128, 16),
        (4, 0, 0, 4, 4),  # one word for all lanes
        (4, 1, 1, 20, 16),  # in a row, but across sector borders
        (2, 1, 0, 8, 8),
        (16, 1, 0, 64, 64),
        (16, 2, 0, 128, 64),
    ],
)
def test_sectors(hooks, order, bytes_each, stride, offset, sectors, ideal):
    data, out = aligned(16384), aligned(2048)
    with hooks.settings(order=order):
        args = (bytes_each, 128, stride, offset)
        hooks.run("counters_strided", data, out, *args, read_only=[0])
    stats = hooks.stats()
    read, write = entry(stats, "strided_read"), entry(stats, "strided_write")
    assert (read["instructions"], read["sectors"], read["ideal_sectors"]) == (4, sectors, ideal)
    assert read["bytes"] == 128 * bytes_each == write["bytes"]
    assert write["sectors"] == write["ideal_sectors"] == 4 * bytes_each
    assert stats["global_read"]["sectors"] == sectors
    assert stats["tensors"]["arg0"] == {"read_bytes": 128 * bytes_each, "written_bytes": 0}
    assert stats["tensors"]["arg1"] == {"read_bytes": 0, "written_bytes": 128 * bytes_each}


@pytest.mark.parametrize(
    "bytes_each, stride, wavefronts, ideal",
    [
        (4, 1, 1, 1),
        (4, 2, 2, 1),
        (4, 8, 8, 1),
        (4, 31, 1, 1),
        (4, 0, 1, 1),
        (8, 1, 2, 2),
        (8, 16, 32, 2),
        (16, 1, 4, 4),
        (16, 2, 8, 4),
        (16, 8, 32, 4),
    ],
)
def test_bank_conflicts(hooks, bytes_each, stride, wavefronts, ideal):
    out = np.zeros(32 * bytes_each, np.uint8)
    hooks.run("counters_shared", out, bytes_each, stride)
    read = entry(hooks.stats(), "shared_read", "shared")
    assert (read["wavefronts"], read["ideal_wavefronts"]) == (wavefronts, ideal)


def test_transpose_with_and_without_padding(hooks):
    x = aligned(4096).view(np.float32).reshape(32, 32)
    for padded, wavefronts in ((0, 1024), (1, 32)):
        hooks.lib.emu_stats_reset()
        hooks.run("correct_transpose", x, x.copy(), 32, 32, padded, read_only=[0])
        shared = [e for e in hooks.stats()["lines"] if e["space"] == "shared"]
        assert {e["op"]: e["wavefronts"] for e in shared} == {"read": wavefronts, "write": 32}


def test_matmul_has_no_conflict(hooks):
    a, b, c = aligned(64 * 128 * 2), aligned(128 * 128 * 2), aligned(64 * 128 * 4)
    hooks.run("correct_matmul", a, b, c, 64, 128, 128, 0, read_only=[0, 1])
    stats = hooks.stats()
    assert stats["shared"]["wavefronts"] == stats["shared"]["ideal_wavefronts"] > 0
    for direction in ("global_read", "global_write"):
        assert stats[direction]["sectors"] == stats[direction]["ideal_sectors"] > 0


@pytest.mark.parametrize("order", ["forward", "random"])
def test_lanes_that_skip_do_not_shift_the_others(hooks, order):
    x = aligned(1024).view(np.float32)
    with hooks.settings(order=order, seed=3):
        hooks.run("counters_uneven", x, np.zeros(32, np.float32), read_only=[0])
    read = entry(hooks.stats(), "uneven_read")
    assert read["instructions"] == 8
    assert read["sectors"] == 8 * 4


def test_counters_can_be_switched_off(hooks):
    hooks.lib.emu_hooks_config(1, 0)
    try:
        x = np.zeros(4096, np.uint8)
        hooks.run("counters_strided", x, x.copy(), 4, 128, 1, 0)
        assert hooks.stats()["lines"] == []
    finally:
        hooks.lib.emu_hooks_config(1, 1)
