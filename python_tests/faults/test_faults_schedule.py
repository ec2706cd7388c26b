"""Public faults of confidence scheduling, by id: the smallest input that showed each of them."""

import pytest
import torch
from oracles import schedule_prefix as oracle

SURVIVAL = [0.9, 0.8, 0.3, 0.2, 0.1]


def plan(backend, survival, table, **options):
    confidence = [[s / b for s, b in zip(survival, [1.0, *survival], strict=False)]]
    tensors = [torch.tensor(confidence), torch.tensor(table)]
    options = {k: v.to(backend.device) for k, v in options.items()}
    out = backend.ops.schedule_prefix(*[t.to(backend.device) for t in tensors], **options)
    return [t.cpu() for t in out]


def of_costs(costs):
    """Passes per second of 1.. rows, from costs."""
    return [1.0, *(1.0 / c for c in costs)]


def test_I04_staircase_costs(backend):
    """First descent stops at the first stair: that is the price of looking at nothing later. A budget that was
    planned from older confidences goes over it."""
    stairs = of_costs([10.0, 14.0, 14.0, 20.0, 20.5, 21.0])
    assert plan(backend, SURVIVAL, stairs)[0].tolist() == [2]
    cliff = of_costs([10.0, 20.0, 20.0, 20.0, 20.0, 20.0])
    assert plan(backend, SURVIVAL, cliff)[0].tolist() == [0]
    budget = torch.tensor([5], dtype=torch.int32)
    assert plan(backend, SURVIVAL, cliff, budget=budget)[0].tolist() == [5]
    flat = of_costs([10.0] * 6)
    assert plan(backend, SURVIVAL, flat)[0].tolist() == [5]


@pytest.mark.parametrize(
    "budget, lens, cu_rows", [(0, [0, 0, 0], [0, 1, 2, 3]), (2, [0, 2, 0], [0, 1, 4, 5])]
)
def test_I05_budget_zero_is_normal(backend, budget, lens, cu_rows):
    confidence = torch.tensor([[0.1, 0.1], [0.9, 0.9], [0.1, 0.1]]).to(backend.device)
    num_drafts, rows = backend.ops.schedule_prefix(
        confidence,
        torch.ones(1, device=backend.device),
        budget=torch.tensor([budget], dtype=torch.int32, device=backend.device),
    )
    assert num_drafts.tolist() == lens and rows.tolist() == cu_rows
    tokens, num_accepted, status, *_ = backend.ops.verify_chain(
        torch.zeros(9, 8, device=backend.device),
        torch.zeros(9, dtype=torch.int64, device=backend.device),
        rows,
        torch.arange(3, device=backend.device),
        torch.arange(3, device=backend.device),
        2,
        vocab_size=8,
    )
    assert status.tolist() == [0] * 3
    for b, drafts in enumerate(lens):
        assert int(num_accepted[b]) <= drafts
        assert [int(t) >= 0 for t in tokens[b]] == [i <= int(num_accepted[b]) for i in range(3)]


def test_I07_padded_graph_rows(backend):
    """Requests of a graph's padding are inactive: no rows; an active one without drafts has its bonus row."""
    confidence = torch.tensor([[0.9, 0.9], [1.0, 1.0], [1.0, 1.0], [0.0, 0.9]])
    active = torch.tensor([True, False, False, True])
    case = {"confidence": confidence, "steps_per_second": torch.ones(1), "active": active}
    on = backend.device
    out = backend.ops.schedule_prefix(
        confidence.to(on), torch.ones(1, device=on), active=active.to(on)
    )
    assert out[0].tolist() == [2, 0, 0, 0] and out[1].tolist() == [0, 3, 3, 3, 4]
    assert out[0].tolist() == oracle.schedule_prefix(**case)[0].tolist()
