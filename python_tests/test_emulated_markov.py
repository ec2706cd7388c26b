"""markov_draft's CUDA kernels ask memory for no more than they need."""

import backends
import pytest
import torch
from oracles import markov_draft as oracle

import specdec_ext

HOOKS = [name for name in backends.available() if name == "emu_hooks"]
NAMES = ["base_logits", "anchor_ids", "w1", "w2", "seeds", "positions"]


@pytest.fixture(params=HOOKS)
def hooks(request):
    return backends.get(request.param)


def stats_of(hooks, batch, drafts, weights, head="vanilla", **options):
    case = oracle.random_case(
        torch.Generator().manual_seed(1), batch, drafts, vocab=1536, rank=64, head=head,
        weights=weights, dtype=weights, confidence=False, **options,
    )  # fmt: skip
    case["base_logits"] = case["base_logits"][:, :, :1536].contiguous()
    positional = [case.pop(name) for name in NAMES]
    return positional, hooks.stats(lambda: hooks.ops.markov_draft(*positional, **case))


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_draft_is_one_launch_and_one_pass_over_w2(hooks, batch, weights):
    """And whole sectors; a last launch has the last token."""
    drafts = 3
    (base, _, _, w2, *_), stats = stats_of(hooks, batch, drafts, weights, return_logits=False)
    assert stats["launches"] == drafts + 1
    tensors = stats["tensors"]
    # Rows that stay in registers are read once; others again, from L1, for every request.
    held = weights == torch.bfloat16
    assert tensors["w2"]["read_bytes"] == drafts * w2.nbytes * (1 if held else batch)
    assert tensors["base_logits"]["read_bytes"] == base.nbytes
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] >= w2.nbytes:
            assert line["sectors"] == line["ideal_sectors"], line


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_launches_of_other_calls(hooks, head):
    batch = 9 if head == "vanilla" else 2
    (_, _, _, w2, *_), stats = stats_of(hooks, batch, 2, torch.bfloat16, head)
    assert stats["launches"] == 2 * 2 + 1
    assert stats["tensors"]["w2"]["read_bytes"] == 2 * w2.nbytes


@pytest.mark.parametrize(
    "head, batch", [("vanilla", 1), ("vanilla", 8), ("gated", 2), ("vanilla", 12)]
)
def test_a_table_is_read_once_per_four_requests_and_w2_where_it_can_win(hooks, head, batch):
    """A launch more per draft; codes in whole sectors."""
    drafts = 2
    case = oracle.random_case(
        torch.Generator().manual_seed(2), batch, drafts, vocab=1536, rank=64, head=head,
        weights=torch.bfloat16, dtype=torch.bfloat16, confidence=False, return_logits=False,
    )  # fmt: skip
    case["temperature"][:] = 0.0
    case["base_logits"] = 4.0 * case["base_logits"][:, :, :1536].contiguous()
    table = specdec_ext.prepare_markov(case["w2"])
    positional = [case.pop(name) for name in NAMES]
    stats = hooks.stats(
        lambda: hooks.ops.markov_draft(
            *positional, **case, prepared=list(table), return_logprobs=False
        )
    )
    settles = 1 if head == "vanilla" and batch <= 8 else drafts + 1
    assert stats["launches"] == 2 * drafts + settles
    tensors, groups = stats["tensors"], drafts * ((batch + 3) // 4)
    assert tensors["codes"]["read_bytes"] == groups * table.codes.nbytes
    assert tensors["rows"]["read_bytes"] <= drafts * batch * table.rows.nbytes
    # Per request two tiles of 16 columns at most, of the 96.
    row = positional[3][0].nbytes
    assert 0 < tensors["w2"]["read_bytes"] <= drafts * batch * 2 * 16 * row
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] == groups * table.codes.nbytes:
            assert line["sectors"] == line["ideal_sectors"], line


def test_more_requests_read_w2_once_per_32(hooks):
    (_, _, _, w2, *_), stats = stats_of(hooks, 40, 1, torch.bfloat16)
    assert stats["tensors"]["w2"]["read_bytes"] == 2 * w2.nbytes
