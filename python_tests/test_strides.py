"""Index arguments of every op are read through their stride, int32 and int64 alike, on every backend."""

import chains
import pytest
import torch
import trees
from compare import assert_same
from control_cases import random_controls
from oracles import append_kv as append_oracle
from oracles import compact_kv as compact_oracle
from oracles import next_round as round_oracle
from test_sample import random_case as sample_case


def sample_arguments():
    logits, seeds, positions = sample_case(5, 300, seed=1)
    case = {"logits": logits, "seeds": seeds, "positions": positions, "vocab_size": 300}
    controls = random_controls(5, 5, 300, seed=1, filters=[])
    assert controls["bias_ids"].numel() > 3
    return case | controls


def chain_arguments():
    case = chains.random_case(6, 40, 3, seed=2)
    return case | random_controls(6, case["target_logits"].shape[0], 40, seed=3, filters=[])


def tree_arguments():
    return trees.random_case(5, 40, 6, seed=4, children="sampled", method="token")


def round_arguments():
    return round_oracle.random_case(torch.Generator().manual_seed(5), batch=9)


CASES = {
    "next_round": (round_arguments, ["stop_token_ids"]),
    "sample": (sample_arguments, ["seeds", "positions", "bias_ids"]),
    "verify_chain": (chain_arguments, ["input_ids", "seeds", "positions", "bias_ids"]),
    "verify_tree": (tree_arguments, ["input_ids", "parents", "seeds", "positions"]),
}
ONE_TYPE = {"seeds": torch.int64, "parents": torch.int32}


def spread(t, step, device):
    """The same values `step` elements apart; nothing between them may be read."""
    wide = torch.full((max(len(t), 1), step), 77, dtype=t.dtype, device=device)
    wide[: len(t), 0] = t.to(device)
    return wide[: len(t), 0]


def call(backend, op, case):
    schema = getattr(torch.ops.specdec, op).default._schema
    on = {k: v.to(backend.device) if torch.is_tensor(v) else v for k, v in case.items()}
    on.update({k: v for k, v in case.items() if torch.is_tensor(v) and v.device == backend.device})
    positional = [on.pop(a.name) for a in schema.arguments if not a.kwarg_only]
    return [t.cpu() for t in getattr(backend.ops, op)(*positional, **on)]


@pytest.mark.parametrize(
    "op, name", [(op, name) for op, (_, names) in CASES.items() for name in names]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_arguments(backend, op, name, dtype):
    if ONE_TYPE.get(name, dtype) != dtype:
        pytest.skip(f"{name} has one dtype")
    case = CASES[op][0]()
    if "positions" in case:
        case["positions"] = case["positions"] % 2**30
    if name != "seeds":
        case[name] = case[name].clamp(-(2**31), 2**31 - 1).to(dtype)
    wanted = call(backend, op, case)
    for step in (2, 5):
        view = spread(case[name], step, backend.device)
        assert view.stride() == (step,)
        for mine, theirs in zip(call(backend, op, case | {name: view}), wanted, strict=True):
            assert_same(mine, theirs, f"{name} with stride {step}")
    if name in ("seeds", "positions"):  # one for all: a view with stride 0
        same = torch.full_like(case[name], 9)
        view = same[:1].to(backend.device).expand(len(same))
        wanted = call(backend, op, case | {name: same})
        for mine, theirs in zip(call(backend, op, case | {name: view}), wanted, strict=True):
            assert_same(mine, theirs, f"{name} with stride 0")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [2, 5])
def test_slots(backend, dtype, step):
    g = torch.Generator().manual_seed(8)
    k, v, k_cache, v_cache, slots = append_oracle.random_case(g, rows=9)
    wanted = append_oracle.append_kv(k, v, k_cache, v_cache, slots)
    on = [t.clone().to(backend.device) for t in (k, v, k_cache, v_cache)]
    backend.ops.append_kv(*on, spread(slots.to(dtype), step, backend.device))
    assert_same(on[2].cpu(), wanted[0], "k_cache")
    assert_same(on[3].cpu(), wanted[1], "v_cache")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [2, 5])
def test_slots_of_compact_kv(backend, dtype, step):
    g = torch.Generator().manual_seed(9)
    slots, *lists = compact_oracle.random_case(g)
    cache = torch.randn(10, 4, 2, 8, generator=g)
    wanted = compact_oracle.compact_kv([cache], slots, *lists)[0]
    ours, *lists = (t.clone().to(backend.device) for t in (cache, *lists))
    backend.ops.compact_kv([ours], [], spread(slots.to(dtype), step, backend.device), *lists)
    assert_same(ours.cpu(), wanted)
