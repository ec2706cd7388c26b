"""The trained drafters of examples/ on a small random target: what they compute is what a plain reading of their
checkpoint computes, over rounds with rejections, and the output is that without drafts."""

from dataclasses import replace
from types import SimpleNamespace

import compare
import draft_models
import pytest
import torch
from draft_models import requests_of

pytest.importorskip("safetensors")

from drafters.dflash import DFlash  # noqa: E402
from drafters.dspark import DSpark, leading  # noqa: E402
from drafters.weights import load_block_drafter  # noqa: E402
from engine.batch import Drafts, Request  # noqa: E402
from engine.decode import Engine  # noqa: E402
from specdec_ext._philox import DRAFT, uniform  # noqa: E402


@pytest.fixture
def target(backend, monkeypatch):
    return draft_models.target_on(backend, monkeypatch)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint and gives its tensors and what the loader makes of it."""

    def make(kind, markov_head="vanilla", **options):
        tensors = draft_models.tensors_of(kind, markov_head)
        config = draft_models.config_of(kind, markov_head)
        draft_models.write(tmp_path / kind, config, tensors)
        return tensors, load_block_drafter(tmp_path / kind, **options)

    return make


def watched(kind, outputs, requests, good):
    """A drafter that notes what it drafts from, and proposes of the true continuation as many tokens as good[b]
    says, then wrong ones: rounds that accept some and reject some."""
    texts = [r.prompt_ids + ids for r, ids in zip(requests, outputs, strict=True)]

    class Watched(kind):
        seen = []

        def draw(self, state, hidden, base_logits):
            drafts = super().draw(state, hidden, base_logits)
            begins = state.num_tokens.tolist()
            self.seen.append(
                (begins, state.active.tolist(), state.history.clone(), hidden, base_logits, drafts)
            )
            tokens = drafts.tokens.clone()
            for b, (text, begin) in enumerate(zip(texts, begins, strict=True)):
                for j, token in enumerate(text[begin : begin + tokens.size(1)]):
                    tokens[b, j] = token if j < good[b] else (token + 1) % len(base_logits[0, 0])
            return Drafts(tokens, drafts.counts)

    return Watched


def references(tensors, target, history, rows, first):
    """Hidden states and base logits of a block, plainly: in float64 and in float32."""
    tokens = history.cpu()
    for dtype in (torch.float64, torch.float32):
        weights = target.weights.to("cpu").to(dtype)
        t = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        hidden = draft_models.block_hidden(t, weights, tokens, rows)[first:]
        yield hidden, hidden @ weights.embedding.T


@pytest.mark.parametrize("kind", ["dflash", "deepspec_dflash", "dspark"])
@pytest.mark.parametrize("num_drafts, linear", [(2, "specdec"), (9, "specdec"), (2, "torch")])
def test_blocks_are_what_the_checkpoint_says(backend, target, checkpoint, kind, num_drafts, linear):
    """After rejections, too: base logits of every round against a model without any cache."""
    tensors, (config, weights) = checkpoint(kind)
    target = draft_models.target_model(backend.device, linear=linear)
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    plain = engine.generate(requests).output_ids
    drafter = watched(DSpark if kind == "dspark" else DFlash, plain, requests, good=[2, 0, 1])(
        config, weights, target
    )
    got = engine.generate(requests, drafter, num_drafts)
    assert 0 < got.accepted < got.drafted
    assert got.output_ids == plain or linear == "torch"
    first = 0 if config.sample_from_anchor else 1
    rows = min(num_drafts, config.max_drafts) + first
    compared = 0
    for begins, active, history, hidden, base_logits, _ in drafter.seen:
        for b in range(len(requests)):
            if active[b]:
                tokens = history[b, : begins[b]]
                oracle, peer = references(tensors, target, tokens, rows, first)
                compare.assert_close(hidden[b], oracle[0], peer[0], f"hidden of request {b}")
                compare.assert_close(base_logits[b], oracle[1], peer[1], f"logits of request {b}")
                compared += 1
    assert compared == got.request_passes


@pytest.mark.parametrize("kind", ["dflash", "deepspec_dflash"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_output_with_dflash_is_the_plain_one(target, checkpoint, kind, batch):
    _, (config, weights) = checkpoint(kind)
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    for begin in range(0, 3, batch):
        group = requests[begin : begin + batch]
        plain = engine.generate(group)
        got = engine.generate(group, DFlash(config, weights, target), 4)
        assert got.output_ids == plain.output_ids and got.drafted > 0 and not any(got.status)


@pytest.mark.parametrize("markov_head", ["vanilla", "gated", "rnn"])
def test_drafts_of_dspark_come_from_the_law_of_its_head(target, checkpoint, markov_head):
    tensors, (config, weights) = checkpoint("dspark", markov_head)
    requests, engine = requests_of(temperature=0.9), Engine(target, [], page_size=4)
    plain = engine.generate(requests).output_ids
    Watched = watched(DSpark, plain, requests, good=[2, 0, 1])

    class Confident(Watched):
        def plan(self, state, confidence):
            self.confidences = [*getattr(self, "confidences", []), confidence.clone()]
            return super().plan(state, confidence)

    drafter = Confident(config, weights, target)
    engine.generate(requests, drafter, 5)
    t = {name: tensor.double() for name, tensor in tensors.items()}
    for seen, confidence in zip(drafter.seen, drafter.confidences, strict=True):
        begins, active, history, hidden, base_logits, drafts = seen
        for b in range(len(requests)):
            if not active[b]:
                continue
            previous = torch.cat([history[b, begins[b] - 1 : begins[b]], drafts.tokens[b, :-1]])
            law, certain = (
                draft_models.markov_bias(
                    {name: x.to(dtype) for name, x in t.items()},
                    markov_head,
                    previous.cpu(),
                    hidden[b].cpu().to(dtype),
                )
                for dtype in (torch.float64, torch.float32)
            )
            base = base_logits[b].cpu()
            compare.assert_close(
                drafts.logits[b], base.double() + law[0], base + certain[0], "logits"
            )
            compare.assert_close(confidence[b], law[1], certain[1], "confidence")
            laws = (drafts.logits[b].cpu().double() / drafts.temperature[b].item()).softmax(-1)
            for k, token in enumerate(drafts.tokens[b].tolist()):
                u = uniform(requests[b].seed, begins[b] - 1, k + 1, DRAFT)
                ends = [laws[k, : token + end].sum() - u for end in (0, 1)]
                assert ends[0] <= compare.DECISION_BAND and ends[1] >= -compare.DECISION_BAND


@pytest.mark.parametrize("markov_head", ["vanilla", "rnn"])
@pytest.mark.parametrize("options", [{}, {"threshold": 0.5}, {"steps": [1.0, 1.0, 0.95, 0.9, 0.5]}])
def test_greedy_output_with_dspark_is_the_plain_one(target, checkpoint, markov_head, options):
    _, (config, weights) = checkpoint("dspark", markov_head)
    options = dict(options)
    if "steps" in options:
        steps = torch.tensor(options.pop("steps"), device=target.device)
        options["steps_per_second"] = steps
    requests, engine = requests_of(), Engine(target, [])
    plain = engine.generate(requests)
    got = engine.generate(requests, DSpark(config, weights, target, **options), 5)
    assert got.output_ids == plain.output_ids and got.drafted > 0 and not any(got.status)
    if options:
        assert got.drafted < engine.generate(requests, DSpark(config, weights, target), 5).drafted


def test_confidences_say_how_many_drafts_are_verified(target, checkpoint):
    _, (config, weights) = checkpoint("dspark")
    confidence = torch.tensor([[0.9, 0.5, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.5, 0.6, 0.7, 0.8]])
    drafter = DSpark(config, weights, target, threshold=0.5)
    assert drafter.plan(None, confidence).tolist() == [2, 0, 4]
    confidence = torch.tensor([[0.9, 0.8, 0.3], [0.5, 0.4, 0.9]], device=target.device)
    steps = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.6, 0.5, 0.4, 0.4], device=target.device)
    drafter = DSpark(config, weights, target, steps_per_second=steps)
    state = SimpleNamespace(active=torch.ones(2, dtype=torch.bool, device=target.device))
    assert drafter.plan(state, confidence).tolist() == [2, 0]
    assert leading(torch.tensor([[True, False, True], [True] * 3])).tolist() == [1, 3]


def test_sampled_drafts_do_not_depend_on_the_batch(target, checkpoint):
    _, (config, weights) = checkpoint("dspark")
    requests, engine = requests_of(temperature=1.0), Engine(target, [], page_size=4)
    drafter = DSpark(config, weights, target, threshold=0.3)
    together = engine.generate(requests, drafter, 5)
    alone = [engine.generate([request], drafter, 5).output_ids[0] for request in requests]
    backwards = engine.generate(requests[::-1], drafter, 5).output_ids[::-1]
    assert together.output_ids == alone == backwards


def test_output_with_dspark_has_the_law_of_the_target(target, checkpoint):
    """Second tokens of 1500 seeds, whose drafts are drawn, scheduled and partly rejected, against their law. Draft
    logits that are not those the drafts came from show in it."""
    _, (config, weights) = checkpoint("dspark")
    steps = 1 / (1 + torch.arange(2001, device=target.device) / 2500)
    drafter = DSpark(config, weights, target, steps_per_second=steps)
    outputs = []
    for begin in range(0, 1500, 500):
        requests = [Request([7], 4, 1.0, seed) for seed in range(begin, begin + 500)]
        got = Engine(target, []).generate(requests, drafter, 3)
        assert 0 < got.accepted < got.drafted < 3 * got.request_passes
        outputs += got.output_ids

    draft_models.assert_first_two_tokens_have_their_law(target, [7], outputs)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_bf16_greedy_output_is_the_plain_one(backend, target, checkpoint, kind):
    _, (config, weights) = checkpoint(kind)
    model = draft_models.target_model(backend.device, torch.bfloat16)
    drafter = (DSpark if kind == "dspark" else DFlash)(config, weights, model)
    requests, engine = requests_of(), Engine(model, [])
    plain = engine.generate(requests).output_ids
    assert engine.generate(requests, drafter, 4).output_ids == plain


def test_a_drafter_of_another_target_is_refused(target, checkpoint):
    _, (config, weights) = checkpoint("dflash")
    with pytest.raises(ValueError, match="num_layers: wanted 7, got 6"):
        DFlash(replace(config, num_target_layers=7), weights, target)
    with pytest.raises(ValueError, match="DSpark: markov_rank: wanted at least 1, got 0"):
        DSpark(config, weights, target)
    _, (config, weights) = checkpoint("dspark")
    silent = replace(config, has_confidence=False)
    with pytest.raises(ValueError, match="no confidence head to decide by"):
        DSpark(silent, weights, target, threshold=0.5)
