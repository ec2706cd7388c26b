"""Prompt lookup mixed with a trained drafter, in examples/: who drafts, request by request, and what comes out."""

from dataclasses import replace

import draft_models
import pytest
import tiny_llama
import torch
from test_examples_lookup import search

pytest.importorskip("safetensors")

from drafters.base import TreeShape  # noqa: E402
from drafters.mixed import LookupOr, choose  # noqa: E402
from engine.batch import Drafts, Request  # noqa: E402
from engine.decode import Engine  # noqa: E402

KINDS = ["eagle3", "eagle3 tree", "dflash", "dspark", "dspark tree"]
NUM_DRAFTS = 7  # more than a block has: rows of different width


@pytest.fixture
def target(backend, monkeypatch):
    return draft_models.target_on(backend, monkeypatch)


@pytest.fixture
def make(tmp_path, target):
    def make(kind):
        kind, *tree = kind.split()
        shape = TreeShape(3, 10) if tree else None
        return draft_models.load_drafter(tmp_path, kind, target, tree=shape)

    return make


def requests_of(temperature=0.0):
    """Greedy outputs of the model run in circles sooner or later, and prompts hold phrases twice."""
    return [
        Request(prompt, 18 - 3 * index, temperature, 100 + index)
        for index, prompt in enumerate(tiny_llama.random_prompts(4))
    ]


class Watched(LookupOr):
    def propose(self, state, num_drafts):
        drafts = super().propose(state, num_drafts)
        ends = state.num_tokens.tolist()
        texts = [row[:end] for row, end in zip(state.history.tolist(), ends, strict=True)]
        alone = self.drafter.propose(state, num_drafts)
        self.rounds = [*getattr(self, "rounds", []), (texts, state.active.tolist(), drafts, alone)]
        return drafts


def request_of(drafts, b):
    """What is proposed for one request: ids, their parents and depths, and whether they are certain."""
    count, tree = int(drafts.counts[b]), drafts.tree
    parents, depths = (
        (tree.parents[b], tree.depths[b]) if tree else torch.arange(count).expand(2, -1)
    )
    depths = depths if tree else depths + 1
    certain = drafts.logits is None or (drafts.one_hot is not None and bool(drafts.one_hot[b]))
    return (
        drafts.tokens[b, :count].tolist(),
        parents[:count].tolist(),
        depths[:count].tolist(),
        certain,
    )


@pytest.mark.parametrize(
    "kind, shortest", [*((kind, 3) for kind in KINDS), ("dspark", 1), ("eagle3 tree", 1)]
)
def test_a_request_is_looked_up_where_its_text_repeats(target, make, kind, shortest):
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    mixed = Watched(make(kind), shortest)
    got = engine.generate(requests, mixed, NUM_DRAFTS)
    assert got.output_ids == engine.generate(requests).output_ids and not any(got.status)
    looked_up = asked = both = 0
    for texts, active, drafts, alone in mixed.rounds:
        before = looked_up, asked
        for b, text in enumerate(texts):
            if not active[b]:
                continue
            wanted = search(text, 4, 3, NUM_DRAFTS)
            repeats = any(
                text[i : i + shortest] == text[-shortest:] for i in range(len(text) - shortest)
            )
            if len(text) > shortest and repeats:
                places = list(range(len(wanted) + 1))
                assert request_of(drafts, b) == (wanted, places[:-1], places[1:], True)
                looked_up += 1
            else:
                assert request_of(drafts, b) == request_of(alone, b)
                if drafts.logits is not None:
                    same = drafts.logits[b, : alone.logits.size(1)] == alone.logits[b]
                    assert same.all() and drafts.temperature[b] == alone.temperature[b]
                asked += 1
        both += looked_up > before[0] and asked > before[1]
    assert looked_up > 0 and asked > 0 and both > 0


@pytest.mark.parametrize("kind", ["eagle3 tree", "dspark"])
def test_mixed_drafts_do_not_depend_on_the_batch(target, make, kind):
    requests = [
        replace(request, temperature=temperature)
        for request, temperature in zip(requests_of(), (0.0, 0.7, 0.3, 0.0), strict=True)
    ]
    engine, drafter = Engine(target, [], page_size=4), LookupOr(make(kind), shortest=2)
    together = engine.generate(requests, drafter, NUM_DRAFTS)
    alone = [engine.generate([request], drafter, NUM_DRAFTS) for request in requests]
    assert together.output_ids == [one.output_ids[0] for one in alone]
    assert together.accepted == sum(one.accepted for one in alone)


class EverySecond(LookupOr):
    """Certain drafts for odd seeds, instead of a look-up that needs a long prompt."""

    def propose(self, state, num_drafts):
        certain = torch.tensor([[6, 14]], device=state.history.device).expand(state.batch_size, 2)
        chain = Drafts(certain, torch.full_like(state.num_tokens, 2))
        return choose(state.seeds % 2 == 1, chain, self.drafter.propose(state, num_drafts))


def test_output_of_a_mixed_batch_has_the_law_of_the_target(target, make):
    """Certain drafts and drafts drawn from logits in one pass."""
    drafter, outputs = EverySecond(make("dspark")), []
    for begin in range(0, 1500, 500):
        requests = [Request([7], 3, 1.0, seed) for seed in range(begin, begin + 500)]
        outputs += Engine(target, []).generate(requests, drafter, 2).output_ids
    for half in (outputs[::2], outputs[1::2]):
        draft_models.assert_first_two_tokens_have_their_law(target, [7], half)


def test_choices_keep_what_was_certain_before():
    """A drafter that mixes itself marks certain requests of its own."""
    logits, ids = torch.zeros(3, 1, 5), torch.tensor([[1], [2], [3]])
    inner = Drafts(ids, torch.ones(3).long(), logits, one_hot=torch.tensor([False, True, False]))
    chain = Drafts(torch.full((3, 2), 4), torch.full((3,), 2))
    got = choose(torch.tensor([True, False, False]), chain, inner)
    assert got.one_hot.tolist() == [True, True, False] and got.logits.shape == (3, 2, 5)
    assert got.tokens.tolist() == [[4, 4], [2, -1], [3, -1]] and got.counts.tolist() == [2, 1, 1]
