"""The serving loop of examples/: requests that come, go and give way get what they would get alone."""

import random
from dataclasses import replace

import draft_models
import pytest
import tiny_llama
import torch

pytest.importorskip("safetensors")

from drafters import PromptLookup  # noqa: E402
from drafters.base import TreeShape  # noqa: E402
from drafters.mixed import LookupOr  # noqa: E402
from engine.batch import Request  # noqa: E402
from engine.decode import Engine  # noqa: E402
from engine.serving import Server, profile_rounds  # noqa: E402

NUM_DRAFTS = 3


@pytest.fixture
def target(backend, monkeypatch):
    target = draft_models.target_on(backend, monkeypatch)
    tiny_llama.use_ops(monkeypatch, backend)
    return target


@pytest.fixture
def make(tmp_path, target):
    def make(kind, **options):
        if kind == "plain":
            return None
        kind, *more = kind.split()
        if "tree" in more:
            options["tree"] = TreeShape(3, 8)
        drafter = draft_models.load_drafter(tmp_path, kind, target, **options)
        return LookupOr(drafter, shortest=2) if "mixed" in more else drafter

    return make


def requests_of(count=6, greedy_only=False):
    """Greedy and sampled, of different lengths; the third prompt is a single token. Prompts come again, with other
    seeds."""
    prompts = tiny_llama.random_prompts(3)
    prompts = [*prompts[:2], prompts[2][:1]] * (count // 3)
    return [
        Request(prompt, 12 + 5 * b % 11, 0.0 if greedy_only or b % 2 else 0.9, 40 + b)
        for b, prompt in enumerate(prompts)
    ]


class Watched(Server):
    """Notes who gives way to whom."""

    def _leave(self, job):
        self.left = [*getattr(self, "left", []), (job.number, [j.number for j in self._running])]
        super()._leave(job)


def serve(server, requests, seed=0):
    """Requests arrive a few at a time; by number what each got, checked as it came."""
    draw, waiting = random.Random(seed), list(requests)
    outputs, finished = {}, set()
    while waiting or not server.idle:
        for _ in range(draw.randrange(3)):
            if waiting:
                outputs[server.add(waiting.pop(0))] = []
        for progress in server.step():
            assert progress.number not in finished and progress.status == 0
            outputs[progress.number] += progress.new_ids
            if progress.finished:
                finished.add(progress.number)
    assert finished == set(range(len(requests)))
    assert server.cache.num_free_pages == server.cache.num_pages
    return [outputs[number] for number in range(len(requests))]


@pytest.mark.parametrize(
    "kind, batch_size, num_pages",
    [
        ("plain", 4, 18),
        ("eagle3 mixed", 4, 24),
        ("eagle3", 4, 24),
        ("deepspec_eagle3 tree", 4, 32),
        ("dspark", 4, 20),
    ],
)
def test_a_request_gets_what_it_gets_alone(target, make, kind, batch_size, num_pages):
    """Trees, too: their rows are rounded otherwise when a request comes back, but no score of this model is that
    close to another."""
    requests, drafter = requests_of(), make(kind)
    engine = Engine(target, [6, 27, 32, 45, 57], page_size=2)
    alone = [engine.generate([r], drafter, NUM_DRAFTS).output_ids[0] for r in requests]
    assert any(ids[-1] in engine.stop_ids for ids in alone), "some end with a stop token"
    server = Watched(
        engine, drafter, NUM_DRAFTS, batch_size=batch_size, num_pages=num_pages, max_tokens=64
    )
    assert serve(server, requests) == alone
    assert server.num_preemptions > 0 and server.num_rounds < sum(map(len, alone))
    if drafter:
        assert 0 < server.accepted < server.drafted or kind == "deepspec_eagle3 tree"


def test_the_last_to_come_gives_way(target):
    """And comes back before those that came after it."""
    engine = Engine(target, [], page_size=4)
    server = Watched(engine, batch_size=3, num_pages=9)
    for length in (3, 4, 2, 2):
        server.add(Request(list(range(3, 3 + length)), 20))
    order = []
    while not server.idle:
        order += [p.number for p in server.step() if p.finished]
    gave_way = [(number, beside) for number, beside in server.left if number != beside[0]]
    assert order == [0, 1, 2, 3] and server.num_preemptions >= 2
    assert all(number == max(beside) for number, beside in gave_way)


@pytest.mark.parametrize("method", ["token", "sampled"])
def test_drafts_scheduled_for_the_whole_batch(target, make, method):
    """How many drafts are verified hangs on the batch then. Greedy tokens do not, and method "sampled" gives those of
    plain decoding at any temperature."""
    steps = torch.tensor([1.0, 1.0, 0.98, 0.96, 0.94, 0.8, 0.7, 0.4], device=target.device)
    drafter = make("dspark", steps_per_second=steps)
    requests = requests_of(greedy_only=method == "token")
    engine = Engine(target, [], page_size=2, method=method)
    plain = [engine.generate([r]).output_ids[0] for r in requests]
    server = Server(engine, drafter, NUM_DRAFTS, batch_size=4, num_pages=20, max_tokens=64)
    assert serve(server, requests) == plain
    alone = sum(engine.generate([r], drafter, NUM_DRAFTS).drafted for r in requests)
    assert server.num_preemptions > 0 and 0 < server.drafted != alone


def test_a_request_joins_while_others_run(target):
    engine = Engine(target, [])
    first, second, none = Request([5, 6, 7], 6, 0.7, 1), Request([8, 9], 4, 0.7, 2), Request([3], 0)
    server = Server(engine, batch_size=2, num_pages=8)
    numbers = [server.add(first)]
    outputs = {0: [], 1: [], 2: []}
    for step in range(6):
        if step == 3:
            numbers += [server.add(none), server.add(second)]
        for progress in server.step():
            outputs[progress.number] += progress.new_ids
        assert len(outputs[0]) == step + 1 and len(outputs[2]) == max(0, step - 2)
    assert numbers == [0, 1, 2] and not server.idle
    assert [p.finished for p in server.step()] == [True] and server.idle and server.step() == []
    assert outputs[0] == engine.generate([first]).output_ids[0] and outputs[1] == []


def test_what_cannot_be_served_is_refused_on_arrival(target, make):
    engine = Engine(target, [], page_size=4)
    server = Server(engine, PromptLookup(), 4, batch_size=2, num_pages=3, max_tokens=20)
    with pytest.raises(ValueError, match="at least one prompt token"):
        server.add(Request([], 3))
    with pytest.raises(ValueError, match="max_tokens: wanted at most 20, got 21"):
        server.add(Request([1], 20))
    with pytest.raises(ValueError, match="num_pages: the request wants 4, the cache has 3"):
        server.add(Request([1, 2, 3], 6))
    server.add(Request([1, 2, 3], 5))
    while not server.idle:
        server.step()
    with pytest.raises(ValueError, match="method: wanted 'token', got 'sampled'"):
        trees = make("eagle3 tree")
        sampling = Engine(target, [], method="sampled")
        sampling.generate([replace(requests_of()[0], max_new_tokens=3)], trees, 2)


def test_the_cost_table_is_made_of_passes_with_so_many_rows(target, monkeypatch):
    seen = []
    forward = target.forward

    def counting(rows, cache, taps=None):
        seen.append((rows.token_ids.numel(), rows.cu_rows.diff().tolist(), rows.seq_lens.tolist()))
        return forward(rows, cache, taps)

    monkeypatch.setattr(target, "forward", counting)
    table = profile_rounds(
        Engine(target, [], page_size=4), [1, 3, 8], 3, context=10, repeats=2, warmup=0
    )
    assert table.rows.tolist() == [1, 3, 8] and table.steps(9).shape == (10,)
    assert seen[::2] == [
        (1, [1, 0, 0], [10, 9, 9]),
        (3, [1, 1, 1], [10, 10, 10]),
        (8, [3, 3, 2], [12, 12, 11]),
    ]
    assert seen[::2] == seen[1::2]
