"""Faults seen in public KV injection, by id: the smallest input that shows them. G03, of draft blocks, is in
test_dflash_rounds.py."""

import pytest
import torch
from compare import assert_same
from huge_strides import huge
from oracles import inject_kv as oracle
from test_inject_kv import DTYPES, FP8, assert_cpu_has_these_bits, check, run


@pytest.mark.parametrize("bad", [0.0, -2.0, float("nan"), float("inf")])
def test_F07_scales_are_data(backend, bad):
    """The scale of one head of one layer: no other head is touched by it, and nothing raises."""
    g = torch.Generator().manual_seed(5)
    case = oracle.random_case(g, dtype=torch.float32, cache_dtype=FP8, head_dim=8)
    good = torch.full((3, 3), 2.0)
    wanted = run(backend, case | {"k_scale": good, "v_scale": good})
    scale = good.clone()
    scale[1, 2] = bad
    got = run(backend, case | {"k_scale": scale, "v_scale": scale})
    for mine, theirs in zip(got, wanted, strict=True):
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            others = [h for h in range(3) if (layer, h) != (1, 2)]
            assert_same(a[:, :, others].view(torch.uint8), b[:, :, others].view(torch.uint8))
    assert_cpu_has_these_bits(case | {"k_scale": scale, "v_scale": scale}, got)


def test_J08_padding_changes_nothing(backend):
    """12 requests of one row in a batch that is padded to 13 rows and 13 requests: the padded row has a slot."""
    g = torch.Generator().manual_seed(21)
    case = oracle.random_case(g, rows=13, head_dim=8)
    case["slots"], case["positions"] = torch.randperm(24, generator=g)[:13], torch.arange(13)
    one = {name: case[name][:12] for name in ("kv", "positions", "slots")}
    wanted = run(backend, case | one)
    padded = torch.tensor([*range(13), 12], dtype=torch.int32)
    got = check(backend, case | {"cu_rows": padded, "commit_rows": torch.full((13,), 5).int()})
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b)


def test_G01_only_valid_slots_and_positions_write(backend):
    """8 slots of zeros; slots -1, behind the cache and far outside; positions beside the tables."""
    case = oracle.random_case(
        torch.Generator().manual_seed(12), rows=8, layers=2, heads=1, head_dim=4, pages=2
    )
    for name in ("k_caches", "v_caches"):
        case[name] = [torch.zeros_like(c) for c in case[name]]
    case["slots"] = torch.tensor([3, -1, 5, 8, 2**32 + 1, -(2**40), 1, 2])
    case["positions"] = torch.tensor([0, 1, 49, 2, 3, 4, -1, 50])
    got = check(backend, case)
    for caches in got:
        for cache in caches:
            changed = cache.view(8, -1).ne(0).any(1).nonzero().flatten().tolist()
            assert changed == [3, 5]


def test_G04_injection_stores_what_append_kv_stores(backend):
    """fp8 with k_scale = 2: the same bytes by the normal path and by injection."""
    g = torch.Generator().manual_seed(13)
    for dtype in DTYPES:
        case = oracle.random_case(g, dtype=dtype, cache_dtype=FP8, layers=1)
        case["k_norm_weight"] = None
        case["cos"], case["sin"] = torch.ones(50, 32), torch.zeros(50, 32)
        scale = {"k_scale": torch.tensor([2.0]), "v_scale": torch.tensor([0.3])}
        got = run(backend, case | scale)
        k, v = (case[name][0].clone().to(backend.device) for name in ("k_caches", "v_caches"))
        slots = torch.where(case["positions"] < 50, case["slots"], -1)
        rows = case["kv"].to(backend.device)
        backend.ops.append_kv(
            rows[:, 0, 0], rows[:, 0, 1], k, v, slots.to(backend.device),
            **{name: t.to(backend.device) for name, t in scale.items()},
        )  # fmt: skip
        assert_same(got[0][0].view(torch.uint8), k.cpu().view(torch.uint8))
        assert_same(got[1][0].view(torch.uint8), v.cpu().view(torch.uint8))


def test_E01_slots_behind_2_to_31_elements(backend):
    """E01: products of slot and stride, and of row and stride, beyond int32."""
    cache = huge(backend, (2100, 1, 1, 8), (2**20, 8, 8, 1), torch.bfloat16)
    kv = huge(backend, (4, 1, 2, 1, 8), (2**30, 16, 8, 8, 1), torch.bfloat16)
    kv[:, 0, :, 0] = torch.arange(64).view(4, 2, 8).bfloat16()
    on = backend.device
    slots, positions = torch.tensor([0, 2047, 2048, 2099]), torch.zeros(4, dtype=torch.int64)
    one, zero = torch.ones(1, 4, device=on), torch.zeros(1, 4, device=on)
    backend.ops.inject_kv(
        kv, None, one, zero, positions.to(on), slots.to(on), [cache], [torch.zeros(2100, 1, 1, 8).bfloat16().to(on)],
        eps=0.0,
    )  # fmt: skip
    assert_same(cache[slots.to(on), 0, 0].cpu(), kv[:, 0, 0, 0].cpu())
