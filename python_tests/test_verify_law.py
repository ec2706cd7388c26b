"""The law of every method under every combination of controls, by exact enumeration of the oracle's
choices. The ops are held to the oracle's choices by test_verify_chain.py and test_verify_tree.py."""

import itertools

import numpy as np
import pytest
import torch
from compare import FORMULA_ERROR
from enumeration import Context, Job

CHAIN = [-1, 0, 1]


def controls_of(bits, seed):
    """Controls of one request; every bit switches one on."""
    g = torch.Generator().manual_seed(seed)
    vocab = 3
    some = {"temperature": torch.tensor([0.7 if bits[0] else 1.0])}
    if bits[1]:
        some["top_k"] = torch.tensor([2], dtype=torch.int32)
    if bits[2]:
        some["top_p"] = torch.tensor([0.6])
    if bits[3]:
        some["min_p"] = torch.tensor([0.3])
    if bits[4]:
        some["repetition_penalty"] = torch.tensor([1.3])
        some["frequency_penalty"] = torch.tensor([0.4])
        some["presence_penalty"] = torch.tensor([-0.2])
        some["token_counts"] = torch.tensor([[0, 2, 1]], dtype=torch.int32)
        some["prompt_mask"] = torch.tensor([[1]], dtype=torch.int32)
    if bits[5]:
        some["bias_offsets"] = torch.tensor([0, 3], dtype=torch.int32)
        some["bias_ids"] = torch.tensor([2, 0, 2])
        some["bias_values"] = torch.tensor([0.5, -0.3, 0.25])
    if bits[6]:  # two ids of three, other ones in every row
        some["token_bitmask"] = torch.tensor([[3], [6], [5], [3]], dtype=torch.int32)
        some["bitmask_rows"] = torch.randperm(4, generator=g).int()
    if bits[7]:
        some["filter_order"] = "joint"
    assert vocab == 3
    return some


DRAFTERS = [
    {"one_hot": True},
    {"draft_temperature": np.float32(1)},
    {"draft_temperature": np.float32(0.6)},
    {"draft_controls": True, "draft_temperature": np.float32(0.7)},
    {"draft_ids": np.array([0, 2])},
    {"draft_ids": np.array([2, 0]), "draft_controls": True},
]


def drafter(i):
    options = dict(DRAFTERS[i % len(DRAFTERS)])
    if not options.get("one_hot"):
        options["siblings"] = "sampled"
    return options


@pytest.mark.parametrize("method", ["token", "block", "sampled"])
def test_chain_under_every_combination_of_controls(method):
    for i, bits in enumerate(itertools.product([False, True], repeat=8)):
        job = Job(Context(3, i), CHAIN, controls_of(bits, i), method=method, **drafter(i + i // 8))
        joint, _ = job.emitted()
        assert np.abs(joint - job.plain_law()).max() < FORMULA_ERROR, (method, bits)


@pytest.mark.parametrize("method", ["token", "block", "sampled"])
@pytest.mark.parametrize("vocab, drafts", [(5, 1), (5, 2), (2, 3), (3, 3)])
def test_chain_shapes(method, vocab, drafts):
    for seed in range(3):
        for one_hot in (True, False):
            siblings = "deterministic" if one_hot else "sampled"
            context = Context(vocab, seed)
            job = Job(
                context,
                list(range(-1, drafts)),
                one_hot=one_hot,
                siblings=siblings,
                method=method,
            )
            joint, _ = job.emitted()
            assert np.abs(joint - job.plain_law()).max() < FORMULA_ERROR


TREES = [
    [-1, 0, 0],
    [-1, 0, 0, 0],
    [-1, 0, 0, 1, 1],
    [-1, 0, 1, 0, 3],
    [-1, 0, 0, 1, 2, 2],
    [-1, 0, 1, 1, 0, 2],
]
RULES = [
    ("deterministic", "token"),
    ("sampled", "token"),
    ("sampled_with_replacement", "token"),
    ("sampled", "traversal"),
    ("sampled_with_replacement", "traversal"),
    ("deterministic", "traversal"),
]


@pytest.mark.parametrize("siblings, method", RULES)
@pytest.mark.parametrize("parents", TREES, ids=str)
def test_tree_shapes(siblings, method, parents):
    for seed in range(2):
        one_hot = siblings == "deterministic"
        job = Job(Context(3, seed), parents, one_hot=one_hot, siblings=siblings, method=method)
        joint, _ = job.emitted()
        assert np.abs(joint - job.plain_law()).max() < FORMULA_ERROR


@pytest.mark.parametrize("siblings, method", RULES)
def test_tree_under_every_combination_of_controls(siblings, method):
    for i, bits in enumerate(itertools.product([False, True], repeat=8)):
        options = {"siblings": siblings, "method": method, "one_hot": siblings == "deterministic"}
        if siblings != "deterministic" and i % 3 == 0:
            options["draft_controls"] = True
        if siblings != "deterministic" and i % 3 == 1:
            options["draft_ids"] = np.array([2, 0])
        # Without replacement no more children can be drawn than q has ids: two under the filters.
        job = Job(Context(3, i), [-1, 0, 0, 1], controls_of(bits, i), **options)
        joint, _ = job.emitted()
        assert np.abs(joint - job.plain_law()).max() < FORMULA_ERROR, (siblings, method, bits)
