"""The decoding engine of examples/ on a tiny random model: every backend's kernels, in seconds."""

import compare
import pytest
import tiny_llama
import torch

from drafters import PromptLookup
from engine.batch import Drafts, Request
from engine.decode import Engine
from engine.kv_cache import PagedKvCache, slots_of
from engine.model import PassRows

NO_STOP = []
NEW_TOKENS = [30, 7, 19, 1, 26, 12, 23, 16]


@pytest.fixture
def any_model(backend, monkeypatch):
    """On the CPU, on a GPU and on emulated CUDA kernels."""
    if backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("the kernels' own tests run under these detectors; a model only takes longer")
    tiny_llama.use_ops(monkeypatch, backend)
    return tiny_llama.random_model(backend.device)


@pytest.fixture
def model(backend, any_model):
    if backend.emulated:
        pytest.skip(
            "any_model covers emulated kernels; all the bookkeeping cases would take minutes"
        )
    return any_model


def requests_of(prompts, new_tokens=None, temperature=0.0, seed=100):
    return [
        Request(prompt, limit, temperature, seed + index)
        for index, (prompt, limit) in enumerate(
            zip(prompts, new_tokens or NEW_TOKENS[: len(prompts)], strict=True)
        )
    ]


class Scripted:
    """Drafts what a script says comes next; `distort` makes some of it wrong."""

    name = "scripted"

    def __init__(self, requests, outputs, distort=lambda request, place, token: token):
        self.texts = [
            request.prompt_ids + [distort(b, i, token) for i, token in enumerate(output)]
            for b, (request, output) in enumerate(zip(requests, outputs, strict=True))
        ]

    def propose(self, state, num_drafts):
        counts, rows = [], []
        for text, begin in zip(self.texts, state.num_tokens.tolist(), strict=True):
            ids = text[begin : begin + num_drafts]
            counts.append(len(ids))
            rows.append(ids + [-1] * (num_drafts - len(ids)))
        device = state.history.device
        tokens = torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), num_drafts)
        return Drafts(tokens, torch.tensor(counts, dtype=torch.int64, device=device))


class Certain:
    """The drafts of another drafter, given as logits that leave no other choice."""

    name = "certain"

    def __init__(self, inner, vocab_size):
        self.inner, self.vocab_size = inner, vocab_size

    def propose(self, state, num_drafts):
        drafts = self.inner.propose(state, num_drafts)
        shape = (*drafts.tokens.shape, self.vocab_size)
        logits = torch.full(shape, -torch.inf, device=drafts.tokens.device)
        logits.scatter_(2, drafts.tokens.clamp(min=0)[:, :, None], 0.0)
        return Drafts(drafts.tokens, drafts.counts, logits=logits)


def transformers_model(model, dtype=torch.float32):
    pytest.importorskip("transformers")
    from transformers_baseline import build_transformers_model

    return build_transformers_model(model.config, model.weights.to("cpu")).to(dtype)


def test_logits_are_those_of_transformers(any_model):
    prompt = tiny_llama.random_prompts(4)[3]
    rows, device = len(prompt), any_model.device
    cache = any_model.new_cache(num_pages=8, page_size=4)
    table, _ = cache.take([rows])
    positions = torch.arange(rows, device=device)
    got = any_model.logits(
        any_model.forward(
            PassRows(
                token_ids=torch.tensor(prompt, device=device),
                positions=positions,
                slots=slots_of(table, torch.zeros_like(positions), positions, 4),
                cu_rows=torch.tensor([0, rows], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([rows], dtype=torch.int32, device=device),
                block_table=table,
                max_rows=rows,
            ),
            cache,
        )
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        peer = transformers_model(any_model)(ids).logits[0]
        oracle = transformers_model(any_model, torch.float64)(ids).logits[0]
    compare.assert_close(got, oracle, peer, "logits")


def test_plain_greedy_output_is_that_of_transformers(model):
    from transformers_baseline import transformers_generate

    prompts = tiny_llama.random_prompts(3)
    plain = Engine(model, NO_STOP).generate(requests_of(prompts, [20] * 3))
    reference = transformers_model(model)
    for prompt, output in zip(prompts, plain.output_ids, strict=True):
        assert transformers_generate(reference, [prompt], 20, [0]).output_ids == [output]
    # The same with stop tokens, as one padded batch.
    stop = plain.output_ids[1][6]
    stopped = Engine(model, [stop]).generate(requests_of(prompts, [20] * 3)).output_ids
    assert transformers_generate(reference, prompts, 20, [stop]).output_ids == stopped


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_greedy_speculative_output_is_the_plain_one(model, batch, num_drafts):
    requests = requests_of(tiny_llama.random_prompts(8))
    engine = Engine(model, NO_STOP, page_size=4)
    groups = [requests[begin : begin + batch] for begin in range(0, 8, batch)]
    for group in groups:
        plain = engine.generate(group)
        fast = engine.generate(group, PromptLookup(), num_drafts)
        assert fast.output_ids == plain.output_ids
        assert [len(ids) for ids in fast.output_ids] == [r.max_new_tokens for r in group]
        assert fast.rounds <= plain.rounds == max(r.max_new_tokens for r in group)
        assert plain.accepted_length == 1.0
        assert fast.num_tokens == fast.accepted + fast.request_passes
        assert not any(fast.status)


def test_batch_of_eight_is_eight_batches_of_one(model):
    requests = requests_of(tiny_llama.random_prompts(8))
    engine = Engine(model, NO_STOP)
    together = engine.generate(requests).output_ids
    assert together == [engine.generate([request]).output_ids[0] for request in requests]
    assert len({tuple(ids) for ids in together}) == 8


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_size_changes_nothing(model, page_size):
    requests = requests_of(tiny_llama.random_prompts(4))
    wanted = Engine(model, NO_STOP, page_size=5).generate(requests, PromptLookup(), 4).output_ids
    got = Engine(model, NO_STOP, page_size=page_size).generate(requests, PromptLookup(), 4)
    assert got.output_ids == wanted


def test_perfect_drafts_are_all_accepted(any_model):
    requests = requests_of(tiny_llama.random_prompts(4), [24, 12, 24, 6])
    engine = Engine(any_model, NO_STOP)
    plain = engine.generate(requests).output_ids
    perfect = engine.generate(requests, Scripted(requests, plain), 5)
    assert perfect.output_ids == plain
    assert perfect.accepted == perfect.drafted
    assert perfect.rounds == 4
    assert perfect.request_passes == 4 + 2 + 4 + 1


def test_wrong_drafts_cost_time_only(model):
    requests = requests_of(tiny_llama.random_prompts(3), [15, 9, 12])
    engine = Engine(model, NO_STOP)
    plain = engine.generate(requests).output_ids
    vocab_size = model.config.vocab_size

    def all_wrong(_request, _place, token):
        return (token + 1) % vocab_size

    def every_third_wrong(_request, place, token):
        return token if place % 3 else (token + 1) % vocab_size

    wrong = engine.generate(requests, Scripted(requests, plain, all_wrong), 4)
    assert wrong.output_ids == plain
    assert (wrong.accepted, wrong.rounds) == (0, 15)
    mixed = engine.generate(requests, Scripted(requests, plain, every_third_wrong), 4)
    assert mixed.output_ids == plain
    assert 0 < mixed.accepted < mixed.drafted


def test_a_drafter_without_ideas_is_plain_decoding(model):
    requests = requests_of(tiny_llama.random_prompts(2), [6, 9])
    engine = Engine(model, NO_STOP)
    plain = engine.generate(requests)
    silent = engine.generate(requests, Scripted(requests, [[], []]), 4)
    assert silent.output_ids == plain.output_ids
    assert (silent.drafted, silent.rounds) == (0, plain.rounds)


@pytest.mark.parametrize("stop_at", [0, 1, 5, 6])
def test_a_stop_token_inside_an_accepted_run_ends_the_request(model, stop_at):
    """Five perfect drafts per round: place 5 is the round's own token, the others are drafts."""
    requests = requests_of(tiny_llama.random_prompts(2), [20, 20])
    full = Engine(model, NO_STOP).generate(requests).output_ids
    stop = full[0][stop_at]
    stopping = Engine(model, [stop, 10_000])
    wanted = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in full]
    records = []
    got = stopping.generate(requests, Scripted(requests, full), 5, records.append)
    assert got.output_ids == wanted == stopping.generate(requests).output_ids
    assert got.num_tokens == sum(len(ids) for record in records for ids in record.committed)
    for record in records:
        for accepted, committed in zip(record.num_accepted, record.committed, strict=True):
            assert accepted <= len(committed)


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_sampled_requests_depend_on_their_seed_and_not_on_their_slot(model, drafter):
    prompts = tiny_llama.random_prompts(8)
    requests = requests_of(prompts, temperature=1.0)
    engine, k = Engine(model, NO_STOP), 4 if drafter else 0
    together = engine.generate(requests, drafter, k).output_ids
    backwards = engine.generate(requests[::-1], drafter, k).output_ids[::-1]
    alone = [engine.generate([request], drafter, k).output_ids[0] for request in requests]
    assert together == backwards == alone
    reseeded = engine.generate(requests_of(prompts, temperature=1.0, seed=900), drafter, k)
    assert reseeded.output_ids != together


def test_greedy_and_sampled_requests_mix(any_model):
    prompts = tiny_llama.random_prompts(4)
    greedy, sampled = requests_of(prompts), requests_of(prompts, temperature=0.8)
    engine = Engine(any_model, NO_STOP)
    mixed = [(sampled if b % 2 else greedy)[b] for b in range(4)]
    for drafter, k in ((None, 0), (PromptLookup(), 4)):
        got = engine.generate(mixed, drafter, k).output_ids
        of_greedy = engine.generate(greedy, drafter, k).output_ids
        of_sampled = engine.generate(sampled, drafter, k).output_ids
        assert got == [(of_sampled if b % 2 else of_greedy)[b] for b in range(4)]


def test_drafts_with_logits_reach_verification(model):
    """Logits that leave one choice are a one-hot law, so the outcome is that of bare drafts; draft
    logits that contradict the drafts (q = 0 there) accept every draft that the target allows."""
    requests = requests_of(tiny_llama.random_prompts(4), temperature=1.0)
    engine = Engine(model, NO_STOP)
    bare = engine.generate(requests, PromptLookup(), 4)
    certain = engine.generate(requests, Certain(PromptLookup(), model.config.vocab_size), 4)
    assert certain.output_ids == bare.output_ids
    assert bare.accepted < bare.drafted

    class Contradicting(Certain):
        def propose(self, state, num_drafts):
            drafts = super().propose(state, num_drafts)
            return Drafts(drafts.tokens, drafts.counts, drafts.logits.roll(1, dims=2))

    contradicted = engine.generate(
        requests, Contradicting(PromptLookup(), model.config.vocab_size), 4
    )
    assert contradicted.accepted == contradicted.drafted


def test_limits_are_refused_with_a_reason(model):
    engine = Engine(model, NO_STOP)
    with pytest.raises(ValueError, match="at least one prompt token"):
        engine.generate([Request([], 5)])
    with pytest.raises(ValueError, match="258 positions, the model has 256"):
        engine.generate([Request([1, 2], 256)])
    assert engine.generate([Request([1], 0), Request([5], 3)]).output_ids[0] == []


def test_pages_go_round_and_come_back():
    cache = PagedKvCache(1, 6, 4, 1, 8, torch.float32, torch.device("cpu"))
    table, pages = cache.take([9, 4, 5])
    assert table.shape == (3, 3) and table.dtype == torch.int32
    assert [len(owned) for owned in pages] == [3, 1, 2]
    assert sorted(page for owned in pages for page in owned) == list(range(6))
    assert (table < 0).tolist() == [[False] * 3, [False, True, True], [False, False, True]]
    with pytest.raises(RuntimeError, match="0 free pages, 1 wanted"):
        cache.take([1])
    cache.give_back(pages[:1])
    assert cache.num_free_pages == 3

    requests, positions = torch.tensor([0, 0, 2]), torch.tensor([0, 8, 6])
    slots = slots_of(table, requests, positions, 4).tolist()
    assert slots == [4 * pages[0][0], 4 * pages[0][2], 4 * pages[2][1] + 2]
