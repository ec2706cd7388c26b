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


# --- Expected numbers of accepted drafts ------------------------------------------------------------
BUSHY = [-1, 0, 0, 1, 1, 2, 2]
SOME_CONTROLS = [0, 1, 6, 24, 40, 96, 129, 199]  # bits of controls_of
FEW_IDS = [6, 199]  # of these: filters leave so few that no method gains


def accepted(context, parents, bits=0, **options):
    some = controls_of([bool(bits >> i & 1) for i in range(8)], bits)
    one_hot = options.get("siblings", "deterministic") == "deterministic"
    return Job(context, parents, some, one_hot=one_hot, **options).emitted()[1]


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_expected_accepts_of_a_chain_are_the_published_formulas(drafts, seed):
    """Prefixes x of length i pass with probability prod min(p, q) token by token, with Q(x) w(x) in block
    verification (w_i = min(1, w_{i-1} p / q)); drafts chosen without chance with the product of p."""
    context, parents = Context(3, seed), list(range(-1, drafts))
    by_token = by_block = 0.0
    for i in range(1, drafts + 1):
        for x in itertools.product(range(3), repeat=i):
            passes, drawn, w = 1.0, 1.0, 1.0
            for j in range(i):
                p = _softmax(context.target(list(x[:j])))[x[j]]
                q = _softmax(context.draft(list(x[:j])))[x[j]]
                passes, drawn, w = passes * min(p, q), drawn * q, min(1.0, w * p / q)
            by_token, by_block = by_token + passes, by_block + drawn * w
    for method, wanted in (("token", by_token), ("block", by_block)):
        got = accepted(context, parents, siblings="sampled", method=method)
        assert abs(got - wanted) < FORMULA_ERROR, method
    job = Job(context, parents, one_hot=True)
    ((_, ids),) = job.drafts()
    chances = [_softmax(context.target(ids[1 : u + 1]))[ids[u + 1]] for u in range(drafts)]
    assert abs(job.emitted()[1] - np.cumprod(chances).sum()) < FORMULA_ERROR


def _softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_expected_accepts_of_a_deterministic_tree_are_the_target_mass_of_its_nodes(parents):
    for seed in range(3):
        job = Job(Context(3, seed), parents, one_hot=True)
        ((_, ids),) = job.drafts()
        wanted = 0.0
        for path in job.paths[1:]:
            before = [[ids[v] for v in path[1:i]] for i in range(1, len(path))]
            laws = [_softmax(job.context.target(tokens)) for tokens in before]
            wanted += np.prod([law[ids[v]] for law, v in zip(laws, path[1:], strict=True)])
        for method in ("token", "traversal"):
            got = Job(Context(3, seed), parents, one_hot=True, method=method).emitted()[1]
            assert abs(got - wanted) < FORMULA_ERROR, method


@pytest.mark.parametrize("bits", SOME_CONTROLS)
def test_block_never_accepts_fewer_than_token(bits):
    gains = []
    for seed in range(6):
        one, other = (
            accepted(Context(3, seed), [-1, 0, 1, 2], bits, siblings="sampled", method=method)
            for method in ("token", "block")
        )
        gains.append(other - one)
    assert min(gains) > -FORMULA_ERROR, gains
    assert max(gains) > 1e-3 or bits in FEW_IDS, gains


@pytest.mark.parametrize("siblings", ["sampled", "sampled_with_replacement"])
@pytest.mark.parametrize("bits", SOME_CONTROLS)
def test_traversal_never_accepts_fewer_than_token(siblings, bits):
    gains = []
    for seed in range(2):
        one, other = (
            accepted(Context(3, seed), BUSHY, bits, siblings=siblings, method=method)
            for method in ("token", "traversal")
        )
        gains.append(other - one)
    assert min(gains) > -FORMULA_ERROR, gains
    assert max(gains) > 1e-3 or bits in FEW_IDS, gains


def test_traversal_of_one_path_accepts_as_block_does():
    for seed in range(3):
        block, traversal = (
            accepted(Context(3, seed), [-1, 0, 1, 2], siblings="sampled", method=method)
            for method in ("block", "traversal")
        )
        assert abs(block - traversal) < FORMULA_ERROR


@pytest.mark.parametrize("method", ["token", "traversal"])
def test_siblings_without_replacement_are_accepted_more_often(method):
    for seed in range(3):
        without, replaced = (
            accepted(Context(3, seed), BUSHY, siblings=siblings, method=method)
            for siblings in ("sampled", "sampled_with_replacement")
        )
        assert without > replaced
