"""EAGLE-3 of examples/ on a small random target: its chains are those of a plain reading of the checkpoint, over rounds
with rejections, and the output is that without drafts."""

from dataclasses import replace

import compare
import draft_models
import pytest
import torch
from draft_models import requests_of

pytest.importorskip("safetensors")

from drafters.configs import eagle3_taps  # noqa: E402
from drafters.eagle3 import Eagle3  # noqa: E402
from drafters.weights import load_eagle3  # noqa: E402
from engine.batch import Drafts  # noqa: E402
from engine.decode import Engine  # noqa: E402

KINDS = ("eagle3", "deepspec_eagle3")


@pytest.fixture
def target(backend, monkeypatch):
    return draft_models.target_on(backend, monkeypatch)


@pytest.fixture
def checkpoint(tmp_path):
    def make(kind):
        tensors = draft_models.tensors_of(kind)
        draft_models.write(tmp_path / kind, draft_models.config_of(kind), tensors)
        return tensors, *load_eagle3(tmp_path / kind)

    return make


class Watched(Eagle3):
    """Notes its chains, and proposes good[b] true tokens and wrong ones behind them."""

    def follow(self, requests, outputs, good):
        self.texts = [r.prompt_ids + ids for r, ids in zip(requests, outputs, strict=True)]
        self.good, self.rounds = good, []
        return self

    def logits(self, hidden):
        self.chain.append(super().logits(hidden))
        return self.chain[-1]

    def propose(self, state, num_drafts):
        self.chain = []
        drafts = super().propose(state, num_drafts)
        begins, vocab_size = state.num_tokens.tolist(), self.config.layers.vocab_size
        taking_part = (state.active & (drafts.counts > 0)).tolist()
        noted = torch.stack(self.chain, 1), drafts.tokens.cpu()
        self.rounds.append((begins, taking_part, state.history.cpu().clone(), *noted))
        tokens = drafts.tokens.clone()
        for b, (text, begin) in enumerate(zip(self.texts, begins, strict=True)):
            for j, token in enumerate(text[begin : begin + tokens.size(1)]):
                tokens[b, j] = token if j < self.good[b] else (token + 1) % vocab_size
        return Drafts(tokens, drafts.counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts, linear", [(1, "specdec"), (4, "specdec"), (2, "torch")])
def test_chains_are_what_the_checkpoint_says(backend, target, checkpoint, kind, num_drafts, linear):
    tensors, config, weights = checkpoint(kind)
    target = draft_models.target_model(backend.device, linear=linear)
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    plain = engine.generate(requests).output_ids
    drafter = Watched(config, weights, target).follow(requests, plain, good=[2, 0, 1])
    assert drafter.tapped_layers == draft_models.EAGLE3_TAPS[kind]
    got = engine.generate(requests, drafter, num_drafts)
    assert 0 < got.accepted < got.drafted
    assert got.output_ids == plain or linear == "torch"

    def chain(dtype, tokens, drafts):
        t = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        weights = target.weights.to("cpu").to(dtype)
        return draft_models.eagle3_chain(t, kind, weights, tokens, drafts)

    compared = 0
    for begins, taking_part, history, logits, drafts in drafter.rounds:
        for b in range(len(requests)):
            if taking_part[b]:
                tokens = history[b, : begins[b]]
                oracle, peer = (chain(d, tokens, drafts[b]) for d in (torch.float64, torch.float32))
                compare.assert_close(logits[b], oracle, peer, f"logits of request {b}")
                columns = logits[b].argmax(-1).cpu()
                ids = columns + tensors["d2t"][columns] if kind == "eagle3" else columns
                compare.assert_same(drafts[b], ids)
                compared += 1
    # Every round of every request but the first of the one without features.
    assert compared == got.request_passes - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_output_is_the_plain_one(backend, target, checkpoint, kind, dtype):
    _, config, weights = checkpoint(kind)
    model = draft_models.target_model(backend.device, dtype)
    requests, engine = requests_of(), Engine(model, [])
    plain = engine.generate(requests).output_ids
    got = engine.generate(requests, Eagle3(config, weights, model), 4)
    assert got.output_ids == plain and got.drafted > 0 and not any(got.status)


def test_drafts_do_not_depend_on_the_batch(target, checkpoint):
    _, config, weights = checkpoint("eagle3")
    requests, engine = requests_of(temperature=1.0), Engine(target, [], page_size=4)
    drafter = Eagle3(config, weights, target)
    together = engine.generate(requests, drafter, 4)
    alone = [engine.generate([request], drafter, 4) for request in requests]
    assert together.output_ids == [one.output_ids[0] for one in alone]
    assert together.accepted == sum(one.accepted for one in alone)


def test_tapped_layers_and_targets(target, checkpoint):
    assert eagle3_taps(32) == (1, 15, 28)  # what enters layers 2, 16 and 29
    _, config, weights = checkpoint("eagle3")
    with pytest.raises(ValueError, match="hidden_size: wanted 128, got 96"):
        Eagle3(replace(config, target_hidden_size=128), weights, target)
    with pytest.raises(ValueError, match=r"target layers \(1, 6\): wanted ids of -1 to 5"):
        Eagle3(replace(config, target_layer_ids=(1, 6)), weights, target)
