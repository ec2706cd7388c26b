"""Every number has a key of its own: one purpose, one round, one request, one place of the walk.

The ops agree with the oracles on these batches (test_keys), the oracles use no key twice
(test_no_key_is_used_twice), and every alteration of a key shows in some result of these batches
(test_every_alteration_shows), so an op that altered one would fail test_keys. cpp_tests/seeded_bugs/keys.py
plants such alterations in the kernels.
"""

import functools

import chains
import control_cases
import pytest
import torch
import trees
from oracles import choices, verify_chain, verify_tree
from oracles import sample as sample_oracle

from specdec_ext._philox import ACCEPT, BONUS, DRAFT, RESIDUAL, SAMPLE, uniform

BATCH, TREES, VOCAB, ROUNDS = 150, 80, 6, 3

# What each rule draws: at the anchor's position all but SAMPLE, which is at the row's own.
PURPOSES = {
    "sample": {SAMPLE},
    "chain token": {ACCEPT, RESIDUAL, BONUS},
    "chain one-hot": {ACCEPT, RESIDUAL, BONUS},
    "chain block": {ACCEPT, RESIDUAL, BONUS},
    "chain sampled": {SAMPLE},
    "chain typical": {RESIDUAL, BONUS},
    "tree deterministic token": {ACCEPT, RESIDUAL, BONUS},
    "tree sampled token": {ACCEPT, RESIDUAL, BONUS},
    "tree sampled_with_replacement token": {ACCEPT, RESIDUAL, BONUS},
    "tree deterministic traversal": {ACCEPT, RESIDUAL, BONUS},
    "tree sampled traversal": {ACCEPT, RESIDUAL, BONUS},
    "tree sampled_with_replacement traversal": {ACCEPT, RESIDUAL, BONUS},
}


@functools.cache
def case_of(rule):
    """Laws that are neither flat nor peaked, so that most numbers decide something."""
    g = torch.Generator().manual_seed(3)
    if rule == "sample":
        return {
            "logits": torch.randn(BATCH, VOCAB, generator=g),
            "seeds": torch.randint(-(2**63), 2**63 - 1, (BATCH,), generator=g),
            "positions": torch.randint(0, 2**40, (BATCH,), generator=g),
            "vocab_size": VOCAB,
        }
    kind, *names = rule.split()
    if kind == "tree":
        children, method = names
        case = trees.random_case(
            TREES, VOCAB, 8, seed=4, children=children, method=method, with_controls=False,
            bad=False, scale=0.7,
        )  # fmt: skip
        return {**case, "draft_temperature": None, "max_depth": 3}
    case = chains.random_case(BATCH, VOCAB, 3, seed=5, scale=0.7)
    case.update(draft_rows=None, draft_is_one_hot=None, draft_temperature=None)
    case["temperature"] = None
    if names[0] in ("one-hot", "typical"):  # drafts that pass often enough
        best = case["target_logits"][:-1].argmax(1)
        mask = torch.rand(len(best), generator=g) < 0.7
        case["input_ids"][1:] = torch.where(mask, best, case["input_ids"][1:])
    if names == ["one-hot"]:
        return {**case, "draft_logits": None}
    if names == ["typical"]:
        case.update(posterior_threshold=0.2, posterior_alpha=2.0)
    return {**case, "method": names[0]}


def run(backend, rule):
    call = {"sample": control_cases.check_sample, "chain": chains.check, "tree": trees.check}
    return call[rule.split()[0]](backend, case_of(rule))


def decisions(rule, case):
    """The oracle's decision per request: an id, or (accepted drafts or path, token, status)."""
    case = dict(case)
    if rule == "sample":
        names, oracle = ["logits", "seeds", "positions"], sample_oracle.allowed
    elif rule.startswith("chain"):
        names, oracle = chains.POSITIONAL, verify_chain.outcomes
    else:
        names, oracle = trees.POSITIONAL, verify_tree.outcomes
    return [some[0] for some in oracle(*[case.pop(name) for name in names], **case)]


def with_keys(monkeypatch, altered):
    """The oracles' numbers come from altered(seed, position, index, purpose)."""

    def number(*key):
        return uniform(*altered(*key))

    monkeypatch.setattr(choices, "uniform", number)
    monkeypatch.setattr(sample_oracle, "uniform", number)


def recorded(monkeypatch, rule, case):
    """(decisions, the keys of all numbers that they took)."""
    seen = []

    def kept(*key):
        seen.append(key)
        return key

    with monkeypatch.context() as patch:
        with_keys(patch, kept)
        return decisions(rule, case), seen


def alterations(first_seed):
    """name -> (purpose that it alters, altered key)."""
    out = {}
    names = {"accept": ACCEPT, "residual": RESIDUAL, "bonus": BONUS, "sample": SAMPLE}
    for name, own in names.items():
        for other, purpose in {"draft": DRAFT, **names}.items():
            if purpose != own:
                out[f"{name} draws {other}'s number"] = (
                    own,
                    lambda s, p, i, _, to=purpose: (s, p, i, to),
                )
        out |= {
            f"{name} of the index before": (own, lambda s, p, i, w: (s, p, i - 1, w)),
            f"{name} of the index behind": (own, lambda s, p, i, w: (s, p, i + 1, w)),
            f"{name} in every round alike": (own, lambda s, p, i, w: (s, 0, i, w)),
            f"{name} of the next round": (own, lambda s, p, i, w: (s, p + 1, i, w)),
            f"{name} without the position's high word": (
                own,
                lambda s, p, i, w: (s, p % 2**32, i, w),
            ),
            f"{name} without the seed's high word": (own, lambda s, p, i, w: (s % 2**32, p, i, w)),
            f"{name} without the seed's low word": (
                own,
                lambda s, p, i, w: (s >> 32 << 32, p, i, w),
            ),
            f"{name} of the first request's seed": (own, lambda s, p, i, w: (first_seed, p, i, w)),
        }
        if own == ACCEPT:
            out["accept with one number for all nodes"] = own, lambda s, p, i, w: (s, p, 1, w)
        if own == RESIDUAL:
            out["residual with the number of the test"] = own, lambda s, p, i, w: (s, p, i, ACCEPT)
    return out


@pytest.mark.parametrize("rule", PURPOSES)
def test_keys(backend, rule):
    """Given its numbers the op decides as the oracle does, in every request."""
    if backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("keys are arithmetic, which the plain build shows")
    run(backend, rule)


@pytest.mark.parametrize("rule", PURPOSES)
def test_every_alteration_shows(monkeypatch, rule):
    case = case_of(rule)
    wanted, keys = recorded(monkeypatch, rule, case)
    used = {purpose for *_, purpose in keys}
    assert used == PURPOSES[rule]
    for name, (own, altered) in alterations(int(case["seeds"][0])).items():
        if own not in used:
            continue
        with monkeypatch.context() as patch:
            with_keys(patch, lambda *key, own=own, f=altered: f(*key) if key[3] == own else key)
            changed = sum(a != b for a, b in zip(decisions(rule, case), wanted, strict=True))
        # One would be enough; test_keys lets a single request cross a threshold within rounding.
        assert changed > 1, f"{rule}: {name} changes {changed} results"


@pytest.mark.parametrize("rule", PURPOSES)
def test_no_key_is_used_twice(monkeypatch, rule):
    """Not within a walk, not by two requests with one seed, not in the rounds that follow: each round
    starts one position behind the last token that came out."""
    case = dict(case_of(rule))
    case["seeds"] = torch.full_like(case["seeds"], 7)
    case["positions"] = torch.arange(len(case["seeds"])) * 1000
    keys = []
    for _ in range(ROUNDS):
        some, more = recorded(monkeypatch, rule, case)
        keys += more
        case["positions"] = case["positions"] + torch.tensor([1 + accepted_in(d) for d in some])
    assert len(keys) > ROUNDS * len(case["seeds"]) // 2
    assert len(set(keys)) == len(keys)


def accepted_in(decision):
    """Number of accepted drafts; none for `sample` and for an inactive request."""
    if not isinstance(decision, tuple):
        return 0
    return decision[0] if isinstance(decision[0], int) else len(decision[0]) - 1
