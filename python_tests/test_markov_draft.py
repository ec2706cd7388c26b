"""markov_draft: laws, tokens, numbers and confidences against the oracle, and their bits, on every backend."""

import itertools
import json
import os
import pathlib

import backends
import numpy as np
import pytest
import torch
from compare import (
    DECISION_BAND,
    LAW_ERROR,
    assert_close,
    assert_decisions,
    assert_rate,
    assert_same,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import results_by_isa
from oracles import markov_draft as oracle
from tree_cases import soil

import specdec_ext

POSITIONAL = ["base_logits", "anchor_ids", "w1", "w2", "seeds", "positions"]
HEADS = ["vanilla", "gated", "rnn"]
CASES = pathlib.Path(__file__).parent / "cases"
FUZZED = int(os.environ.get("SPECDEC_FUZZ_DRAFTS", "0"))


def run(backend, case):
    batch, drafts, width = case["base_logits"].shape
    soil(*[batch * drafts] * 4, batch * drafts * width)
    return backend.call("markov_draft", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle along the op's own tokens; returns the op's results."""
    out = run(backend, case)
    tokens, logprob, lse, confidence, logits = out
    batch, drafts = tokens.shape
    got, allowed = [], []
    for b in range(batch):
        request, before = oracle.Request(case, b), int(case["anchor_ids"][b])
        for k in range(drafts):
            step = request.step(k, before)
            token = int(tokens[b, k])
            if step is None or step.law is None:
                assert tokens[b, k:].tolist() == [-1] * (drafts - k)
                for numbers in (logprob, lse, confidence):
                    assert numbers[b, k:].tolist() == [0.0] * (drafts - k)
                break
            got.append(token)
            allowed.append(request.choices(step, DECISION_BAND))
            before = token
    assert_decisions(got, allowed, "token")
    wanted = oracle.follow(case, tokens)
    high = float(wanted[4][torch.isfinite(wanted[4])].abs().max()) if drafts and batch else 1.0
    coldest = float(case["temperature"].clamp(min=0.2).min()) if "temperature" in case else 1.0
    magnitude = 4.0 * max(high, 1.0) / coldest
    assert_close(logprob, wanted[1], what="logprob", magnitude=magnitude)
    assert_close(lse, wanted[2], what="lse", magnitude=magnitude)
    assert_close(confidence, wanted[3], what="confidence", magnitude=4.0)
    if case.get("return_logits"):
        assert_close(logits, wanted[4], what="logits", magnitude=4.0 * high)
    return out


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- Against the oracle -----------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("vocab, rank", [(1, 1), (7, 3), (50, 8), (513, 33), (1100, 64)])
def test_matches_oracle(backend, head, vocab, rank):
    for seed in range(3):
        g = seeded(seed * 100 + vocab)
        check(backend, oracle.random_case(g, vocab=vocab, rank=rank, head=head))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(backend, head, weights, dtype):
    """Widths that are whole pieces of 16 bytes, and others."""
    for rank, depth in ((64, 40), (37, 13)):
        g = seeded(rank)
        case = oracle.random_case(
            g, vocab=600, rank=rank, depth=depth, head=head, dtype=dtype, weights=weights
        )
        check(backend, case)


@pytest.mark.parametrize("rank", [256, 260, 520])
def test_long_ranks(backend, rank):
    for weights in (torch.bfloat16, torch.float32):
        check(backend, oracle.random_case(seeded(rank), vocab=530, rank=rank, weights=weights))


@pytest.mark.parametrize("batch, drafts", [(1, 1), (1, 7), (9, 2), (20, 3), (70, 1)])
def test_batches(backend, batch, drafts):
    head = HEADS[drafts % 3]
    check(backend, oracle.random_case(seeded(batch), batch, drafts, head=head))


@pytest.mark.parametrize("batch, drafts", [(0, 3), (3, 0), (0, 0)])
def test_empty(backend, batch, drafts):
    out = run(backend, oracle.random_case(seeded(1), batch, drafts))
    assert out[0].shape == (batch, drafts) and out[4].shape == (batch, drafts, 53)


def test_without_options(backend):
    """No temperature, no confidence head, no logits."""
    case = oracle.random_case(seeded(2), confidence=False, return_logits=False)
    del case["temperature"]
    out = check(backend, case)
    assert (out[3] == 1.0).all() and out[4].shape == (0,)
    ones = run(backend, case | {"temperature": torch.ones(3)})
    for mine, theirs in zip(out, ones, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("weight", ["hidden and embedding", "hidden", "embedding"])
@pytest.mark.parametrize("rank", [0, 8])
def test_I02_confidence_inputs_and_rank_zero(backend, weight, rank):
    """Rank 0 is no head: the drafts come from the base logits alone; the confidence head's width is checked."""
    case = oracle.random_case(seeded(3), rank=rank)
    full = torch.randn(12 + rank, generator=seeded(4))
    if weight == "hidden":
        case["confidence_weight"] = full[:12]
    elif weight == "embedding":
        del case["hidden"]
        case["confidence_weight"] = full[12:]
    else:
        case["confidence_weight"] = full
    out = check(backend, case)
    if rank == 0:
        logits = case["base_logits"][:, :, :50]
        assert_same(out[4][:, :, :50], logits + 0.0)
    for wrong in (torch.zeros(12 + rank + 1), torch.zeros(13 + rank)[: 11 + rank]):
        if wrong.shape[0] == 12 and weight != "embedding":
            continue
        with pytest.raises(RuntimeError, match=r"confidence_weight: wanted size \d+ \(d of hidden"):
            run(backend, case | {"confidence_weight": wrong})


def test_reduced_vocabulary(backend):
    """w1 goes by target ids, w2 and logits by columns, as offsets and as ids; in any order."""
    for head in HEADS:
        case = oracle.random_case(seeded(5), vocab=600, columns=530, head=head, drafts=5)
        out = check(backend, case)
        ids = case["d2t"] + torch.arange(530)
        assert set(out[0].flatten().tolist()) <= set(ids.tolist())
        same = run(backend, case | {"d2t": ids, "d2t_is_offset": False})
        for mine, theirs in zip(same, out, strict=True):
            assert_same(mine, theirs)
        order = torch.randperm(530, generator=seeded(6))
        check(backend, case | {"d2t": ids[order], "d2t_is_offset": False})


def test_columns_without_a_target_never_come_out(backend):
    case = oracle.random_case(seeded(7), vocab=600, columns=20, drafts=3)
    foreign = [0, 5, 19]
    for bad in (-1, 600, 2**40, -(2**63), 2**63 - 1):
        ids = case["d2t"] + torch.arange(20)
        ids[foreign] = bad
        case["base_logits"][:, :, foreign] = 50.0
        out = check(backend, case | {"d2t": ids, "d2t_is_offset": False})
        assert torch.isneginf(out[4][:, :, foreign]).all()
    case["base_logits"][:, :, foreign] = float("nan")  # not of the law: nobody looks at it
    assert (check(backend, case | {"d2t": ids, "d2t_is_offset": False})[0] >= 0).all()


# --- The law ----------------------------------------------------------------------------------------
def drawn_law(backend, case, seeds):
    """(frequencies of whole blocks, their number): many requests in one call."""
    many = {k: v for k, v in case.items()}
    for name in ("base_logits", "anchor_ids", "hidden", "temperature"):
        many[name] = case[name][:1].repeat_interleave(seeds, 0)
    many["seeds"], many["positions"] = torch.arange(seeds), torch.full((seeds,), 9)
    return run(backend, many | {"return_logits": False})[0]


@pytest.mark.parametrize("head", HEADS)
def test_law_by_enumeration(backend, head):
    """The probability of every block of 3 drafts over 3 ids: of the op's own numbers along each block, against
    float64. They are the exact law of the walk: each is what its bucket of the uniform measures."""
    case = oracle.random_case(seeded(8), batch=1, drafts=3, vocab=3, head=head, rank=4)
    case["temperature"] = torch.tensor([2.7])
    total, law = 0.0, {}
    for block in itertools.product(range(3), repeat=3):
        weight, request, before = 1.0, oracle.Request(case, 0), int(case["anchor_ids"][0])
        for k, token in enumerate(block):
            weight *= request.step(k, before).law[token]
            before = token
        law[block] = weight
        total += weight
    assert abs(total - 1.0) < LAW_ERROR
    tokens = drawn_law(backend, case, 4000 if backend.name == "cpu" else 200)
    many = case | {
        name: case[name].repeat_interleave(len(tokens), 0)
        for name in ("base_logits", "anchor_ids", "hidden", "temperature")
    }
    many |= {"seeds": torch.arange(len(tokens)), "positions": torch.full((len(tokens),), 9)}
    logprob = run(backend, many)[1].double().sum(1).exp()
    seen = {}
    for block, p in zip(tokens.tolist(), logprob.tolist(), strict=True):
        seen.setdefault(tuple(block), p)
        assert seen[tuple(block)] == p  # the same block has the same bits
        assert abs(p - law[tuple(block)]) < LAW_ERROR
    blocks = [tuple(block) for block in tokens.tolist()]
    common = [block for block, p in law.items() if p * len(blocks) >= 5]
    assert len(common) > 2
    for block in common:
        assert_rate(blocks.count(block) / len(blocks), law[block], len(blocks), f"block {block}")


@pytest.mark.parametrize("vocab", [3, 40])
def test_buckets_of_the_uniform_measure_the_law(backend, vocab):
    """One step, many numbers: tokens ascend with the uniform, and change at the law's thresholds."""
    count = 3000 if backend.name == "cpu" else 150
    case = oracle.random_case(seeded(9), batch=1, drafts=1, vocab=vocab)
    case["temperature"] = torch.tensor([1.3])
    tokens = drawn_law(backend, case, count)[:, 0].numpy()
    step = oracle.Request(case, 0).step(0, int(case["anchor_ids"][0]))
    ends = np.cumsum(step.law)
    u = np.array([oracle.uniform(s, 9, 1) for s in range(count)])
    order = np.argsort(u)
    assert (np.diff(tokens[order]) >= 0).all()
    wanted = np.searchsorted(ends, u, side="right")
    near = np.abs(u[:, None] - ends).min(1) < DECISION_BAND
    assert (tokens == wanted)[~near].all() and near.mean() < 0.01


def test_draws_fall_in_every_chunk(backend):
    """A flat law over several chunks: every one of them is drawn from, and its first and last column can be."""
    vocab = 512 * 3 + 5
    case = oracle.random_case(seeded(10), batch=60, drafts=1, vocab=vocab, rank=2, scale=0.0)
    case["base_logits"] = torch.zeros(60, 1, vocab)
    case["temperature"] = torch.ones(60)
    tokens = check(backend, case)[0]
    assert set((tokens // 512).flatten().tolist()) >= {0, 1, 2}
    for column in (0, 511, 512, 1023, vocab - 1):
        one = case["base_logits"].clone()
        one[:, :, column] = 200.0
        assert (run(backend, case | {"base_logits": one})[0] == column).all()


# --- Greedy -----------------------------------------------------------------------------------------
def test_greedy_takes_the_lowest_of_the_largest(backend):
    vocab = 1200
    case = oracle.random_case(seeded(11), batch=5, drafts=2, vocab=vocab, scale=0.0)
    base = torch.zeros(5, 2, vocab)
    for b, ids in enumerate([(0, 700), (511, 512), (1199, 3), (600, 601), (300, 40)]):
        base[b, :, list(ids)] = 2.0
    for t in (0.0, 9e-6, -1.0, float("nan"), -float("inf")):
        odd = case | {"base_logits": base, "temperature": torch.full((5,), t)}
        tokens, logprob, lse, *_ = run(backend, odd)
        assert tokens.tolist() == [[0, 0], [511, 511], [3, 3], [600, 600], [40, 40]]
        plain = torch.logsumexp(base.double(), -1)
        assert_close(lse, plain, magnitude=16.0)
        assert_close(logprob, 2.0 - plain, magnitude=16.0)


def test_hot_and_huge_temperatures(backend):
    case = oracle.random_case(seeded(12), batch=4)
    for t in (1.1e-5, 1e-3, 50.0, 1e30, float("inf")):
        case["temperature"] = torch.full((4,), t)
        out = run(backend, case)
        assert ((out[0] >= 0) & (out[0] < 50)).all()
        assert torch.isfinite(out[1]).all() and (out[1] <= 0).all()
    assert_close(out[1], torch.full((4, 4), -np.log(50.0)), magnitude=16.0)


# --- Bad data ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("head", HEADS)
def test_a_bad_row_ends_its_request_alone(backend, bad, head):
    case = oracle.random_case(seeded(13), batch=3, drafts=4, vocab=700, head=head)
    wanted = run(backend, case)
    broken = case | {"base_logits": case["base_logits"].clone()}
    broken["base_logits"][1, 2, 650] = bad
    out = check(backend, broken)
    for mine, theirs in zip(out, wanted, strict=True):
        assert_same(mine[[0, 2]], theirs[[0, 2]])
        assert_same(mine[1, :2], theirs[1, :2])
    assert (
        out[0][1].tolist()[2:] == [-1, -1] and out[0][1].tolist()[:2] == wanted[0][1].tolist()[:2]
    )
    assert torch.isneginf(out[4][1, 3]).all()
    broken["base_logits"][1, 2, :] = -float("inf")
    check(backend, broken)


@pytest.mark.parametrize("anchor", [-1, 50, 2**31 - 1, -(2**31)])
def test_an_anchor_outside_the_vocabulary(backend, anchor):
    case = oracle.random_case(seeded(14))
    case["anchor_ids"] = case["anchor_ids"].int()
    case["anchor_ids"][1] = anchor
    out = check(backend, case)
    assert out[0].dtype == torch.int32 and out[0][1].tolist() == [-1] * 4
    assert torch.isneginf(out[4][1]).all()
    far = case | {"anchor_ids": torch.tensor([0, 2**40, 1])}
    assert check(backend, far)[0][1].tolist() == [-1] * 4


def test_infinities_that_are_normal(backend):
    """-inf has probability 0; a column that is all of the law comes out for sure."""
    case = oracle.random_case(seeded(15), vocab=600)
    case["base_logits"][:, :, 1:] = -float("inf")
    assert (check(backend, case)[0] == 0).all()


def test_nan_in_weights_ends_requests_that_use_them(backend):
    case = oracle.random_case(seeded(16), batch=3, drafts=2)
    case["anchor_ids"] = torch.tensor([4, 5, 6])
    case["w1"][5, 0] = float("nan")
    out = run(backend, case)
    assert out[0][1].tolist() == [-1, -1] and (out[0][[0, 2], 0] >= 0).all()
    case["w2"][7, 3] = float("inf")
    assert (run(backend, case)[0][:, 1] == -1).all()


# --- Faults -----------------------------------------------------------------------------------------
def test_I01_previous_token_of_each_draft(backend):
    """A head that adds 5 to the id after the token before: 1, 2, 0 from anchor 0; base logits that lead by 9
    win over it."""
    case = {
        "base_logits": torch.zeros(1, 3, 3),
        "anchor_ids": torch.tensor([0]),
        "w1": torch.eye(3),
        "w2": 5.0 * torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]),
        "seeds": torch.tensor([1]),
        "positions": torch.tensor([2]),
        "vocab_size": 3,
        "temperature": torch.zeros(1),
    }
    assert run(backend, case)[0].tolist() == [[1, 2, 0]]
    assert run(backend, case | {"base_logits": 9.0 * torch.eye(3)[None]})[0].tolist() == [[0, 1, 2]]


def test_D02_padded_columns(backend):
    """Columns past vocab_size carry no mass and change nothing."""
    case = oracle.random_case(seeded(17), vocab=6, rank=4)
    case["base_logits"] = -1.0 - 4.0 * torch.rand(3, 4, 8, generator=seeded(18))
    for pad in (0.0, float("nan"), 1e30):
        case["base_logits"][:, :, 6:] = pad
        out = check(backend, case)
        assert out[0].max() < 6 and torch.isneginf(out[4][:, :, 6:]).all()


def test_D05_and_D03_maps(backend):
    """Argmax over the columns of the map alone; offsets are not ids."""
    case = {
        "base_logits": torch.tensor([[[0.0, 0.0, 0.0, 1.0]]]),
        "anchor_ids": torch.tensor([0]),
        "w1": torch.zeros(8, 2),
        "w2": torch.zeros(3, 2),
        "seeds": torch.tensor([1]),
        "positions": torch.tensor([2]),
        "vocab_size": 8,
        "temperature": torch.zeros(1),
        "d2t": torch.tensor([0, 2, 4]),
    }
    assert run(backend, case)[0].tolist() == [[0]]
    for column, by_offset, by_id in ((1, 3, 2), (2, 6, 4)):
        case["base_logits"] = torch.nn.functional.one_hot(torch.tensor([[column]]), 4).float()
        assert run(backend, case)[0].tolist() == [[by_offset]]
        assert run(backend, case | {"d2t_is_offset": False})[0].tolist() == [[by_id]]


PUBLISHED = json.loads((CASES / "draft_vocab_mapping_sglang.json").read_text())["cases"]


def test_published_maps(backend):
    """draft_vocab_mapping_sglang: drafted columns come out as target ids, which feed the next step's w1."""
    for case in PUBLISHED[:2]:
        delta = torch.tensor(case["delta"])
        columns = len(delta)
        ids = case.get("absolute") or [i + d for i, d in enumerate(case["delta"])]
        for draft, target in zip(
            case.get("draft_ids", range(columns)), case.get("target_ids", ids), strict=True
        ):
            call = {
                "base_logits": torch.nn.functional.one_hot(
                    torch.tensor([[draft]]), columns
                ).float(),
                "anchor_ids": torch.tensor([0]),
                "w1": torch.zeros(20, 2),
                "w2": torch.zeros(columns, 2),
                "seeds": torch.tensor([1]),
                "positions": torch.tensor([2]),
                "vocab_size": 20,
                "temperature": torch.zeros(1),
                "d2t": delta,
            }
            assert run(backend, call)[0].tolist() == [[target]]
    two = next(c for c in PUBLISHED if c.get("name") == "two_step_greedy")
    # A confidence head that reads the token before back from w1.
    call |= {
        "base_logits": torch.nn.functional.one_hot(
            torch.tensor([two["base_logits_peak_draft_ids"]]), 8
        ).float(),
        "anchor_ids": torch.tensor([two["anchor"]]),
        "w1": torch.arange(20.0)[:, None] / 8,
        "w2": torch.zeros(8, 1),
        "d2t": torch.tensor(two["delta"]),
        "confidence_weight": torch.ones(1),
    }
    tokens, _, _, confidence, _ = run(backend, call)
    assert tokens.tolist() == [two["expected_tokens"]]
    inputs = torch.logit(confidence.double()) * 8
    assert inputs.round().long().tolist() == [two["expected_markov_inputs"]]


# --- Bits -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_alone_in_any_batch_and_order(backend, head, weights):
    g = seeded(19)
    case = oracle.random_case(g, batch=13, vocab=1100, rank=40, head=head, weights=weights)
    names = ["base_logits", "anchor_ids", "seeds", "positions", "temperature", "hidden"]
    together = run(backend, case)
    order = torch.randperm(13, generator=g)
    shuffled = run(backend, case | {name: case[name][order] for name in names})
    for mine, theirs in zip(shuffled, together, strict=True):
        assert_same(mine, theirs[order])
    for b in (0, 7, 12):
        alone = run(backend, case | {name: case[name][b : b + 1] for name in names})
        for mine, theirs in zip(alone, together, strict=True):
            assert_same(mine[0], theirs[b])
    without = run(backend, case | {"return_logits": False})
    for mine, theirs in zip(without[:4], together[:4], strict=True):
        assert_same(mine, theirs)


def test_a_prefix_of_the_block_is_a_shorter_block(backend):
    case = oracle.random_case(seeded(20), drafts=5, head="rnn", vocab=600)
    whole = run(backend, case)
    short = {name: case[name][:, :2] for name in ("base_logits", "hidden")}
    part = run(backend, case | short | {"sts_temperature": case["sts_temperature"][:2]})
    for mine, theirs in zip(part, whole, strict=True):
        assert_same(mine, theirs[:, :2].contiguous())


def test_instruction_sets_give_the_same_bits():
    results = results_by_isa("isa_markov")
    for isa, tensors in results.items():
        for name, tensor in tensors.items():
            assert_same(tensor, results["baseline"][name], f"{name} on {isa}")


@pytest.mark.parametrize("other", [name for name in backends.available() if name != "cpu"])
def test_cpu_and_cuda_have_the_same_bits(other):
    """Every output, over heads, types, ranks, odd vocabularies, ties and NaN. `make fuzz` runs more."""
    rounds = FUZZED or (200 if other in ("emu", "cuda") else 24)
    cpu, cuda = backends.get("cpu"), backends.get(other)
    for seed in range(rounds):
        g = seeded(1000 + seed)

        def pick(*some, g=g):
            return some[int(torch.randint(0, len(some), (1,), generator=g))]

        vocab = pick(1, 5, 50, 511, 512, 513, 700, 1025)
        case = oracle.random_case(
            g,
            batch=pick(1, 2, 5, 9),
            drafts=pick(1, 2, 4),
            vocab=vocab,
            rank=pick(0, 1, 8, 31, 32, 64, 256, 300),
            depth=pick(1, 12, 64),
            head=pick(*HEADS),
            dtype=pick(torch.float32, torch.bfloat16, torch.float16),
            weights=pick(torch.float32, torch.bfloat16, torch.float16),
            confidence=pick(True, False),
            columns=pick(None, None, max(1, vocab // 2)),
            scale=pick(0.0, 1.0, 5.0),
            return_logits=pick(True, False),
        )
        kind = pick("plain", "plain", "ties", "nan", "anchor", "steep")
        if kind == "ties":
            case["base_logits"] = case["base_logits"].round()
        elif kind == "nan":
            case["base_logits"][0, -1, 0] = float("nan")
        elif kind == "anchor":
            case["anchor_ids"][-1] = pick(-1, vocab)
        elif kind == "steep":
            case["base_logits"] = case["base_logits"] * 30
        for name, mine, theirs in zip(oracle.NAMES, run(cuda, case), run(cpu, case), strict=True):
            # What a NaN's bits are is the machine's business.
            assert_same(
                mine.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0), f"{name}, case {seed}"
            )


@pytest.mark.parametrize("other", [n for n in backends.available() if n in ("emu", "cuda")])
@pytest.mark.parametrize("rank, batch", [(64, 2), (256, 1), (256, 9)])
def test_cpu_and_cuda_have_the_same_bits_at_full_size(other, rank, batch):
    """The vocabulary of Qwen3 in bf16: 297 chunks, of which the last one is cut."""
    case = oracle.random_case(
        seeded(rank), batch, 2, vocab=151936, rank=rank, confidence=False,
        weights=torch.bfloat16, dtype=torch.bfloat16,
    )  # fmt: skip
    wanted = run(backends.get("cpu"), case)
    for name, mine, theirs in zip(
        oracle.NAMES, run(backends.get(other), case), wanted, strict=True
    ):
        assert_same(mine, theirs, name)


def test_threads_and_positions_do_not_matter(backend):
    case = oracle.random_case(seeded(21), batch=5, vocab=3000, rank=16, head="gated")
    wanted = run(backend, case)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            for mine, theirs in zip(run(backend, case), wanted, strict=True):
                assert_same(mine, theirs)
    finally:
        torch.set_num_threads(threads)
    as_int = case | {"positions": case["positions"] % 2**31}
    for mine, theirs in zip(
        run(backend, as_int),
        run(backend, as_int | {"positions": as_int["positions"].int()}),
        strict=True,
    ):
        assert_same(mine, theirs)


def test_strides(backend):
    """Rows any distance apart, and unaligned ones; lists of any stride."""
    for weights in (torch.bfloat16, torch.float32):
        g = seeded(22)
        case = oracle.random_case(g, vocab=530, rank=32, head="rnn", weights=weights)
        wanted = run(backend, case)
        for name in ("base_logits", "hidden", "w1", "w2", "joint_weight"):
            t = case[name]
            wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), float("nan"), dtype=t.dtype)
            wide = wide.to(backend.device)
            view = wide[..., 1 : 1 + t.shape[-1]]
            view.copy_(t)
            for mine, theirs in zip(run(backend, case | {name: view}), wanted, strict=True):
                assert_same(mine, theirs, name)
        for name in ("anchor_ids", "seeds", "positions"):
            wide = torch.full((3, 4), -7, dtype=torch.int64, device=backend.device)
            wide[:, 2] = case[name]
            for mine, theirs in zip(run(backend, case | {name: wide[:, 2]}), wanted, strict=True):
                assert_same(mine, theirs, name)


def test_arguments_are_not_written(backend):
    case = oracle.random_case(seeded(23), head="rnn")
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


# --- Verification -----------------------------------------------------------------------------------
def test_q_of_the_logits_is_what_was_drawn_from(backend):
    """verify_chain with the returned logits: where the target is the drafter, every draft is accepted."""
    case = oracle.random_case(seeded(24), batch=4, drafts=3, vocab=600)
    case["temperature"] = torch.full((4,), 0.8)
    tokens, _, _, _, logits = run(backend, case)
    target = torch.cat([logits[:, :, :600], torch.zeros(4, 1, 600)], 1).reshape(16, 600)
    ids = torch.cat([case["anchor_ids"][:, None], tokens], 1).flatten()
    verified = backend.call(
        "verify_chain",
        ["target_logits", "input_ids", "cu_rows", "seeds", "positions", "max_drafts"],
        {
            "target_logits": target,
            "input_ids": ids,
            "cu_rows": torch.arange(0, 17, 4, dtype=torch.int32),
            "seeds": case["seeds"],
            "positions": case["positions"],
            "max_drafts": 3,
            "vocab_size": 600,
            "draft_logits": logits,
            "draft_temperature": case["temperature"],
            "temperature": case["temperature"],
        },
    )
    assert verified[1].tolist() == [3] * 4 and verified[2].tolist() == [0] * 4
    assert_same(verified[0][:, :3].contiguous(), tokens)


VERIFY = ["target_logits", "input_ids", "cu_rows", "seeds", "positions", "max_drafts"]


def chain_case(case, tokens, logits, generator, lengths):
    """Arguments of verify_chain for the first drafts of each request, its target near the drafter; lengths: rows
    of each."""
    vocab, drafts = case["vocab_size"], tokens.shape[1]
    ids = torch.cat([case["anchor_ids"][:, None], tokens], 1)
    near = torch.full((len(lengths), drafts + 1, vocab), -4.0)
    columns = torch.arange(logits.shape[2] - 3)  # of random_case, less its padding
    targets = columns + case["d2t"] if "d2t" in case else columns
    near[:, :drafts, targets] = logits[:, :, columns]
    near = near + torch.randn(near.shape, generator=generator)
    return {
        "target_logits": torch.cat([*[near[b, :n] for b, n in enumerate(lengths)], near[0, :1]]),
        "input_ids": torch.cat([*[ids[b, :n] for b, n in enumerate(lengths)], ids[:1, 0]]),
        "cu_rows": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "seeds": case["seeds"],
        "positions": case["positions"],
        "max_drafts": drafts,
        "vocab_size": vocab,
        "draft_temperature": case["temperature"],
        "temperature": case["temperature"],
    }


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("columns", [None, 530])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_verify_chain_recomputes_q(backend, method, columns, weights):
    """From w1, w2 and the base logits, bit for bit as from the logits that were returned: ragged requests, drafts that
    are placeholders or no ids, requests whose row of base_logits is another one or none."""
    g = seeded(27)
    case = oracle.random_case(
        g, batch=6, drafts=3, vocab=600, columns=columns, confidence=False, weights=weights
    )
    tokens, _, _, _, logits = run(backend, case)
    tokens = tokens.clone()
    tokens[1, 2], tokens[2, 1], tokens[3, 0] = -1, 600, 2**40
    chain = chain_case(case, tokens, logits, g, [4, 4, 4, 4, 2, 1]) | {
        "method": method,
        "num_logprobs": 2,
    }
    if columns is not None:
        chain["d2t"] = case["d2t"]
    by_law = chain | {"markov": [case["w1"], case["w2"], case["base_logits"]]}
    if backend.device.type == "cuda":
        by_law["markov"] = [t.to(backend.device) for t in by_law["markov"]]
    wanted = backend.call("verify_chain", VERIFY, chain | {"draft_logits": logits})
    assert 0 < int(wanted[1].sum()) < 12
    for mine, theirs in zip(backend.call("verify_chain", VERIFY, by_law), wanted, strict=True):
        assert_same(mine, theirs)
    # Rows of base_logits in another order; the last two requests are one-hot.
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    rows = torch.empty(6, dtype=torch.int32)
    rows[order] = torch.arange(6, dtype=torch.int32)
    rows[4], rows[5] = -1, 77
    wanted = backend.call(
        "verify_chain", VERIFY, chain | {"draft_logits": logits[order], "draft_rows": rows}
    )
    by_law["markov"][2] = case["base_logits"][order].to(backend.device)
    by_law["draft_rows"] = rows
    for mine, theirs in zip(backend.call("verify_chain", VERIFY, by_law), wanted, strict=True):
        assert_same(mine, theirs)


def test_verify_chain_names_what_is_wrong_with_markov(backend):
    g = seeded(28)
    case = oracle.random_case(g, batch=2, drafts=3, confidence=False)
    tokens, _, _, _, logits = run(backend, case)
    chain = chain_case(case, tokens, logits, g, [4, 4])
    good = [case["w1"], case["w2"], case["base_logits"]]
    bad = [
        ({}, good[:2], r"verify_chain: markov: wanted \(w1, w2, base_logits\), got 2"),
        ({}, [good[0][:49], *good[1:]], r"markov\[0\] \(w1\): wanted at least 50 \(vocab_size\)"),
        ({}, [good[0], good[1][:, 1:], good[2]], r"markov\[1\] \(w2\): wanted size 8 \(r of w1\)"),
        (
            {},
            [*good[:2], good[2][:, 1:]],
            r"markov\[2\] \(base_logits\): wanted size 3 \(max_drafts\)",
        ),
        ({}, [*good[:2], good[2][:1]], r"markov\[2\] \(base_logits\): wanted at least 2"),
        ({}, [good[0].int(), *good[1:]], r"markov\[0\] \(w1\): wanted dtype"),
        ({"draft_logits": torch.zeros(2, 3, 50)}, good, "markov: wanted none beside draft_logits"),
    ]
    for change, markov, message in bad:
        markov = [t.to(backend.device) for t in markov]
        with pytest.raises(RuntimeError, match=message):
            backend.call("verify_chain", VERIFY, chain | change | {"markov": markov})


# --- Arguments --------------------------------------------------------------------------------------
def test_errors_name_op_argument_wanted_got(backend):
    plain = oracle.random_case(seeded(25))
    gated = oracle.random_case(seeded(25), head="gated")
    rnn = oracle.random_case(seeded(25), head="rnn")
    bad = [
        (plain, {"base_logits": plain["base_logits"].double()}, r"markov_draft: base_logits: wanted dtype .*got float64"),
        (plain, {"base_logits": plain["base_logits"][0]}, r"base_logits: wanted shape \[B, G, V'\]"),
        (plain, {"base_logits": plain["base_logits"][:, :, :49]}, r"base_logits: wanted at least 50 \(vocab_size\)"),
        (plain, {"anchor_ids": plain["anchor_ids"].float()}, r"anchor_ids: wanted dtype int32 or int64"),
        (plain, {"anchor_ids": plain["anchor_ids"][1:]}, r"anchor_ids: wanted size 3"),
        (plain, {"w1": plain["w1"][:49]}, r"w1: wanted at least 50 \(vocab_size\)"),
        (plain, {"w1": plain["w1"].t().contiguous().t()}, r"w1: wanted stride 1 in the last"),
        (plain, {"w2": plain["w2"][:, :-1]}, r"w2: wanted size 8 \(r of w1\)"),
        (plain, {"w2": plain["w2"][:49]}, r"w2: wanted at least 50 \(vocab_size\)"),
        (plain, {"w2": plain["w2"].int()}, r"w2: wanted dtype"),
        (plain, {"seeds": plain["seeds"].int()}, r"seeds: wanted dtype int64, got int32"),
        (plain, {"positions": plain["positions"][:1]}, r"positions: wanted size 3"),
        (plain, {"vocab_size": 0}, r"vocab_size: wanted a number from 1 to 2\^31 - 1, got 0"),
        (plain, {"head": "markov"}, r'head: wanted "vanilla", "gated" or "rnn", got "markov"'),
        (plain, {"hidden": plain["hidden"][:, 1:]}, r"hidden: wanted size 4 \(G of base_logits\)"),
        (plain, {"gate_weight": gated["gate_weight"]}, r'gate_weight: wanted none with head "vanilla", got a tensor'),
        (plain, {"joint_bias": rnn["joint_bias"]}, r'joint_bias: wanted none with head "vanilla", got a tensor'),
        (plain, {"sts_temperature": torch.ones(3)}, r"sts_temperature: wanted size 4 \(G of base_logits\)"),
        (plain, {"temperature": torch.ones(2)}, r"temperature: wanted size 3"),
        (plain, {"temperature": torch.ones(3).double()}, r"temperature: wanted dtype float32"),
        (plain, {"d2t": torch.zeros(60, dtype=torch.int64)}, r"base_logits: wanted at least 60 \(length of d2t\)"),
        (plain, {"d2t": torch.zeros(5, dtype=torch.int32)}, r"d2t: wanted dtype int64, got int32"),
        (plain, {"confidence_weight": torch.zeros(19)}, r"confidence_weight: wanted size 20 \(d of hidden \+ r of w1\) or d alone, got"),
        (gated, {"hidden": None, "confidence_weight": None}, r'hidden: wanted a tensor with head "gated", got None'),
        (gated, {"gate_weight": None}, r'gate_weight: wanted a tensor with head "gated", got None'),
        (gated, {"gate_bias": None}, r'gate_bias: wanted a tensor with head "gated", got None'),
        (gated, {"gate_weight": gated["gate_weight"][:, 1:]}, r"gate_weight: wanted size 20"),
        (rnn, {"joint_weight": rnn["joint_weight"][1:]}, r"joint_weight: wanted size 24"),
        (rnn, {"joint_bias": rnn["joint_bias"][1:]}, r"joint_bias: wanted size 24"),
    ]  # fmt: skip
    for case, change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.call("markov_draft", POSITIONAL, case | change)


@pytest.mark.parametrize("head", HEADS)
def test_opcheck_and_compile(head):
    case = oracle.random_case(seeded(26), head=head)
    tensors = [case[name] for name in POSITIONAL]
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    torch.library.opcheck(torch.ops.specdec.markov_draft.default, tensors, options)
    wanted = torch.ops.specdec.markov_draft(*tensors, **options)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(*tensors, **options):
            return torch.ops.specdec.markov_draft(*tensors, **options)

        for mine, theirs in zip(step(*tensors, **options), wanted, strict=True):
            assert_same(mine, theirs)


def test_verify_chain_with_markov_traces():
    g = seeded(29)
    case = oracle.random_case(g, batch=2, drafts=3, confidence=False)
    tokens, _, _, _, logits = run(backends.get("cpu"), case)
    chain = chain_case(case, tokens, logits, g, [4, 3])
    tensors = [chain.pop(name) for name in VERIFY]
    markov = (case["w1"], case["w2"], case["base_logits"])
    torch.library.opcheck(
        torch.ops.specdec.verify_chain.default, tensors, chain | {"markov": list(markov)}
    )
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensors, markov):
        return specdec_ext.verify_chain(*tensors, **chain, markov=markov)

    wanted = specdec_ext.verify_chain(*tensors, **chain, draft_logits=logits)
    for mine, theirs in zip(step(tensors, markov), wanted, strict=True):
        assert_same(mine, theirs)
    meta = [t.to("meta") if torch.is_tensor(t) else t for t in tensors]
    with pytest.raises(RuntimeError, match="markov: wanted the device of target_logits, got cpu"):
        on_meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in chain.items()}
        torch.ops.specdec.verify_chain(*meta, **on_meta, markov=list(markov))


# --- Fuzz -------------------------------------------------------------------------------------------
ODD = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-40, 0.0, -0.0, 1e4, -1e4]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    """Odd numbers anywhere: tokens in the vocabulary or -1, numbers of a law where there is one, and the request
    before a broken one as if it were alone."""
    backend = backends.get(backend_name)
    g = seeded(data.draw(st.integers(0, 2**20)))
    vocab = data.draw(st.sampled_from([1, 2, 9, 40, 520]))
    case = oracle.random_case(
        g,
        batch=data.draw(st.integers(1, 4)),
        drafts=data.draw(st.integers(1, 4)),
        vocab=vocab,
        rank=data.draw(st.sampled_from([0, 1, 5, 32])),
        head=data.draw(st.sampled_from(HEADS)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        columns=data.draw(st.sampled_from([None, max(1, vocab - 1)])),
    )
    for name in ("base_logits", "w1", "w2", "hidden", "temperature", "sts_temperature"):
        if name in case and case[name].numel() and data.draw(st.integers(0, 3)) == 0:
            flat = case[name].view(-1)
            flat[data.draw(st.integers(0, flat.numel() - 1))] = data.draw(st.sampled_from(ODD))
    case["anchor_ids"][-1] = data.draw(st.sampled_from([0, vocab - 1, vocab, -1, 2**40]))
    case["seeds"][0] = data.draw(st.sampled_from([0, -1, 2**63 - 1, -(2**63)]))
    case["positions"][0] = data.draw(st.sampled_from([0, 2**32 + 1, -1, 2**63 - 1, -(2**63)]))
    if "d2t" in case:
        case["d2t"][0] = data.draw(st.sampled_from([0, -1, 2**63 - 1, -(2**63)]))
    tokens, logprob, lse, confidence, logits = run(backend, case)
    assert ((tokens >= -1) & (tokens < vocab)).all()
    ended = (tokens < 0).int().cummax(1).values.bool() if tokens.numel() else tokens.bool()
    assert (tokens[ended] == -1).all()
    for numbers in (logprob, lse, confidence):
        assert (numbers[ended] == 0).all()
    assert (logprob <= LAW_ERROR).all()
    names = ["base_logits", "anchor_ids", "seeds", "positions", "temperature", "hidden"]
    alone = run(backend, case | {n: case[n][:1] for n in names if n in case})
    for mine, theirs in zip(alone, (tokens, logprob, lse, confidence, logits), strict=True):
        assert_same(mine.nan_to_num(nan=7.0)[0], theirs.nan_to_num(nan=7.0)[0])


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
