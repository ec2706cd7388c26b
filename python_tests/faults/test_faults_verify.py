"""Faults seen in public verifiers, samplers and their controls, by id: trees, seeds, vocabulary ranges,
draft vocabularies, grammar masks, penalties."""

import numpy as np
import pytest
import torch
import trees
from chains import logits_of, repeated, run
from compare import (
    FORMULA_ERROR,
    LAW_ERROR,
    PUBLISHED_ERROR,
    assert_close,
    assert_rate,
    assert_same,
)
from enumeration import Context, Job
from oracles.choices import Every
from oracles.verify import Verification

from specdec_ext._philox import ACCEPT, uniform

NAN = float("nan")
ALMOST_ONE = 1.0 - 2.0**-24


def many(backend):
    return 48 if backend.emulated else 100000


def frequencies(tokens, vocab):
    return np.bincount(tokens.numpy(), minlength=vocab) / len(tokens)


def assert_law(tokens, law):
    assert_rate(frequencies(tokens, len(law)), law, len(tokens), "law")


# --- Chains -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_A08_q_is_the_law_that_was_drawn_from(backend):
    """Drafts drawn under top_k = 2: with draft_controls q is (4/7, 3/7, 0, 0) and the law is p's; raw q
    would emit (.571, .429)."""
    count = many(backend)
    p, raw_q = [0.5, 0.5, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]
    drafts = np.random.default_rng(1).choice(2, size=count, p=[4 / 7, 3 / 7])
    case = repeated([p, p], [0], np.arange(count), q=[raw_q])
    case["input_ids"][1::2] = torch.from_numpy(drafts)
    case["top_k"] = torch.full((count,), 2, dtype=torch.int32)
    out = run(backend, {**case, "draft_controls": True})
    assert_law(out[0][:, 0], p)
    assert_rate(float(out[1].float().mean()), 13 / 14, count, "acceptance")
    wrong = frequencies(run(backend, case)[0][:, 0], 4)
    assert_rate(wrong[0], 4 / 7, count, "raw q is another law")


def test_A14_q_is_used(backend):
    """Acceptance is the sum of minima, .9; a verifier that ignores q accepts .41."""
    count = many(backend)
    p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    drafts = np.random.default_rng(2).choice(3, size=count, p=q)
    case = repeated([p, p], [0], np.arange(count), q=[q])
    case["input_ids"][1::2] = torch.from_numpy(drafts)
    assert_rate(float(run(backend, case)[1].float().mean()), 0.9, count, "acceptance")
    one_hot = {**case, "draft_is_one_hot": torch.ones(count, dtype=torch.bool)}
    assert_rate(float(run(backend, one_hot)[1].float().mean()), 0.41, count, "acceptance")


def test_A15_block_drafts_by_argmax_or_by_chance_are_both_exact():
    """A block of independent marginals against a chain whose second token depends on the first: both
    proposals give the law of p; the one-hot mode is chosen per request."""
    for one_hot in (True, False):
        for seed in range(5):
            options = {"one_hot": one_hot, "siblings": "deterministic" if one_hot else "sampled"}
            job = Job(Context(3, seed), [-1, 0, 1], **options)
            marginals = [job.context.draft([]), job.context.draft([0])]
            job.context.draft = lambda tokens, columns=None, m=marginals: m[len(tokens)]
            joint, _ = job.emitted()
            assert np.abs(joint - job.plain_law()).max() < FORMULA_ERROR


def test_A20_ids_are_monotone_in_the_coin(backend):
    """10,000 sorted coins on 4097 ids: never backwards, and within one id of the float64 answer."""
    count = 16 if backend.emulated else 10000
    g = torch.Generator().manual_seed(4)
    row = torch.randn(4097, generator=g)
    seeds = torch.arange(count)
    u = np.array([uniform(s, 0, 0, 4) for s in range(count)])
    order = np.argsort(u)
    out = backend.ops.sample(
        row.repeat(count, 1).to(backend.device),
        seeds.to(backend.device),
        torch.zeros_like(seeds).to(backend.device),
        vocab_size=4097,
    )[0].cpu()
    ids = out.numpy()[order]
    assert (np.diff(ids) >= 0).all()
    exact = np.searchsorted(np.cumsum(torch.softmax(row.double(), 0).numpy()), u[order], "right")
    assert (np.abs(ids - exact) <= 1).all()


def test_A21_unlikely_ids_stay_unlikely(backend):
    """p(1) = 2.1e-9 comes out at most once in all these draws, p = e^-100 never."""
    count = many(backend)
    for gap, most in ((20.0, 1), (100.0, 0)):
        logits = torch.tensor([[0.0, -gap]]).repeat(count, 1).to(backend.device)
        seeds = torch.arange(count).to(backend.device)
        out = backend.ops.sample(logits, seeds, torch.zeros_like(seeds), vocab_size=2)
        assert int(out[0].sum()) <= most


def test_A23_arguments_say_that_they_are_logits(backend):
    """Probabilities are refused by their names: no argument takes them."""
    for op in ("verify_chain", "verify_tree", "sample"):
        schema = str(getattr(backend.ops, op).default._schema)
        assert "logits" in schema and "probs" not in schema.replace("logprobs", "")


# --- Trees ------------------------------------------------------------------------------------------
def test_B01_deterministic_siblings_are_exact(backend):
    count = many(backend)
    p = [[0.5, 0.3, 0.2]] * 3
    out = trees.run(backend, trees.repeated(p, [-1, 0, 0], [0, 0, 1], np.arange(count)))
    assert_law(out[0][:, 0], p[0])
    # Nothing is left beside the children: one of them is accepted, also by the largest coin.
    seeds = list(range(10)) + [23386201]
    assert uniform(23386201, 0, 1, ACCEPT) == ALMOST_ONE
    out = trees.run(backend, trees.repeated([[0.5, 0.5, 0.0]] * 3, [-1, 0, 0], [0, 0, 1], seeds))
    assert (out[2] == 1).all()
    # p of the child is 0: coin 0 must not accept it.
    assert uniform(17976797, 0, 1, ACCEPT) == 0.0
    out = trees.run(backend, trees.repeated([[0.0, 0.6, 0.4]] * 2, [-1, 0], [0, 0], [17976797]))
    assert int(out[2][0]) == 0 and int(out[0][0, 0]) in (1, 2)


def test_B01_numbers_of_a_public_tree_test():
    """tree_sampling_exactness_trtllm_numbers.json: recursive rejection is exact for 1, 2 and 3 children
    drawn without replacement, target-only for a set chosen without chance."""
    target = np.array([0.0, 0.3, 0.15, 0.05, 0.5])
    q = np.array([0.0, 0.35, 0.35, 0.3, 0.0])
    for count in (1, 2, 3):
        job = Job(Context(5, 0), [-1] + [0] * count, siblings="sampled")
        with np.errstate(divide="ignore"):
            x, y = np.log(target).astype(np.float32), np.log(q).astype(np.float32)
        job.context.target = lambda tokens, x=x: x
        job.context.draft = lambda tokens, columns=None, y=y: y
        joint, _ = job.emitted()
        assert np.abs(joint.sum(1) - target).sum() / 2 < LAW_ERROR, count


@pytest.mark.parametrize("count, distance", [(2, 0.284), (3, 0.432)])
def test_B01_an_uncorrected_sibling_test_is_not_exact(count, distance):
    """The published fault itself: every sibling against the unmodified ratio, one correction at the end.
    The enumeration sees its total variation, so it would see such a fault in our rules."""
    target = np.array([0.0, 0.3, 0.15, 0.05, 0.5])
    q = np.array([0.0, 0.35, 0.35, 0.3, 0.0])

    class Faulty(Verification):
        def test(self, path, status, state, children):
            (child, *others), out = children, []
            token = self.tokens[child]
            for w, yes in self.choices.accept(q[token], target[token], child):
                if yes:
                    more = self.deeper(1.0, path, child, status, self.recursive)
                elif others:
                    more = self.test(path, status, state, others)
                else:
                    more = self.from_residual(path, status, state.p, np.maximum(target - q, 0.0))
                out += [(w * v, o) for v, o in more]
            return out

    job = Job(Context(5, 0), [-1] + [0] * count, siblings="sampled")
    with np.errstate(divide="ignore"):
        x, y = np.log(target).astype(np.float32), np.log(q).astype(np.float32)
    law = np.zeros(5)
    for w, tokens in _draws(q, count):
        verification = Faulty(
            job.request,
            [0, *tokens],
            job.children,
            lambda u: x,
            lambda u: y,
            Every(),
            siblings="sampled",
        )
        for v, outcome in verification.walk():
            nodes = outcome.path
            first = ([0, *tokens][nodes[1]]) if len(nodes) > 1 else outcome.token
            law[first] += w * v
    assert abs(np.abs(law - target).sum() / 2 - distance) <= PUBLISHED_ERROR


def _draws(q, count):
    import itertools

    for picks in itertools.permutations(np.nonzero(q)[0].tolist(), count):
        w, left = 1.0, 1.0
        for t in picks:
            w, left = w * q[t] / left, left - q[t]
        yield w, list(picks)


def test_B03_a_node_is_judged_by_its_parents_row(backend):
    rows = torch.zeros(4, 10)
    for u, best in enumerate([5, 1, 6, 7]):
        rows[u, best] = 9.0
    case = trees.repeated(torch.softmax(rows, -1).tolist(), [-1, 0, 0, 2], [9, 4, 5, 6], [3])
    case["temperature"] = torch.zeros(1)
    tokens, path, num_accepted, *_ = trees.run(backend, case)
    assert path[0].tolist() == [0, 2, 3, -1] and int(num_accepted[0]) == 2
    assert tokens[0].tolist() == [5, 6, 7, -1]


def test_B04_one_layout_per_argument(backend):
    case = trees.repeated([[0.5, 0.5]] * 3, [-1, 0, 1], [0, 0, 0], [1, 2])
    for bad in (torch.full((6,), 0.7), torch.full((1,), 0.7)):
        with pytest.raises(RuntimeError, match=r"verify_tree: temperature: wanted size 2"):
            trees.run(backend, {**case, "temperature": bad})
    with pytest.raises(RuntimeError, match=r"sample: temperature: wanted size 6"):
        backend.ops.sample(
            case["target_logits"].to(backend.device),
            torch.arange(6).to(backend.device),
            torch.arange(6).to(backend.device),
            vocab_size=2,
            temperature=torch.full((2,), 0.7).to(backend.device),
        )


# --- Seeds ------------------------------------------------------------------------------------------
def test_C02_a_request_without_drafts_is_itself(backend):
    """Its numbers do not depend on whether its neighbours had drafts, in any of three rounds."""
    g = torch.Generator().manual_seed(2)
    for position in (5, 9, 14):
        logits = torch.randn(4, 50, generator=g)
        both = {
            "target_logits": logits,
            "input_ids": torch.tensor([1, 2, 3, 4]),
            "cu_rows": torch.tensor([0, 1, 4], dtype=torch.int32),
            "seeds": torch.tensor([1, 2]),
            "positions": torch.tensor([position, 3]),
            "max_drafts": 2,
            "vocab_size": 50,
        }
        alone = {
            **both,
            "target_logits": logits[:1],
            "input_ids": torch.tensor([1]),
            "cu_rows": torch.tensor([0, 1], dtype=torch.int32),
            "seeds": torch.tensor([1]),
            "positions": torch.tensor([position]),
        }
        for mine, theirs in zip(run(backend, alone), run(backend, both), strict=True):
            assert_same(mine, theirs[:1])


def test_C06_no_generator_arguments(backend):
    for op in ("verify_chain", "verify_tree", "sample"):
        assert "Generator" not in str(getattr(backend.ops, op).default._schema)


# --- Ids and vocabularies -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_D02_padded_columns_are_no_tokens(backend, dtype):
    """Real logits in [-5, -1], pads 0: only ids below vocab_size, whatever the controls, and the pads
    change no probability."""
    g = torch.Generator().manual_seed(3)
    rows = 6 if backend.emulated else 40
    logits = (-1 - 4 * torch.rand(rows, 8, generator=g)).to(dtype)
    logits[:, 6:] = 0.0
    seeds, positions = torch.arange(rows), torch.arange(rows)
    on = backend.device
    for options in (
        {"temperature": torch.zeros(rows)},
        {"top_k": torch.full((rows,), 3, dtype=torch.int32)},
        {"top_p": torch.full((rows,), 0.7)},
        {},
    ):
        moved = {k: v.to(on) for k, v in options.items()}
        given = (seeds.to(on), positions.to(on))
        padded = backend.ops.sample(logits.to(on), *given, vocab_size=6, num_logprobs=8, **moved)
        exact = backend.ops.sample(
            logits[:, :6].contiguous().to(on), *given, vocab_size=6, num_logprobs=8, **moved
        )
        assert int(padded[0].max()) < 6 and int(padded[4].max()) < 6
        for mine, theirs in zip(padded, exact, strict=True):
            assert_same(mine.cpu(), theirs.cpu())


def _reduced(backend, d2t, is_offset, drafts, q, p, **options):
    count = 8
    case = repeated([p, p], drafts, np.arange(count))
    case["draft_logits"] = logits_of([q]).repeat(count, 1, 1)
    case["d2t"], case["d2t_is_offset"] = torch.tensor(d2t), is_offset
    return run(backend, {**case, **options})


def test_D03_d2t_holds_offsets_or_absolute_ids(backend):
    """Offsets [0, 2, 4] of three draft ids are the target ids 0, 3, 6: q(3) = 1 exactly."""
    p = [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for d2t, is_offset in (([0, 2, 4], True), ([0, 3, 6], False)):
        out = _reduced(backend, d2t, is_offset, [3], [0.0, 1.0, 0.0], p)
        assert (out[1] == 1).all() and (out[0][:, 0] == 3).all()
    # The residual excludes the mapped id, not the draft column's own number.
    p = [0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    out = _reduced(backend, [0, 2, 4], True, [6], [0.0, 0.5, 0.5], p)
    assert (out[1] == 0).all() and set(out[0][:, 0].tolist()) == {1}


def test_D05_draft_columns_past_the_map_are_ignored(backend):
    p = [0.5, 0.5, 0.0, 0.0]
    wide = repeated([p, p], [0], np.arange(8))
    wide["draft_logits"] = torch.tensor([[[0.0, 0.0, 0.0, 50.0]]]).repeat(8, 1, 1)
    wide["d2t"] = torch.tensor([0, 0, 0])
    exact = {**wide, "draft_logits": wide["draft_logits"][..., :3].contiguous()}
    for mine, theirs in zip(run(backend, wide), run(backend, exact), strict=True):
        assert_same(mine, theirs)
    with pytest.raises(RuntimeError, match="draft_logits: wanted at least 3"):
        run(backend, {**wide, "draft_logits": wide["draft_logits"][..., :2].contiguous()})
    bare = {k: v for k, v in wide.items() if k != "draft_logits"}
    with pytest.raises(RuntimeError, match="d2t: wanted draft_logits with it"):
        run(backend, bare)


# --- Bookkeeping ----------------------------------------------------------------------------------------
def test_J04_every_request_has_a_next_token(backend):
    """Placeholders and foreign drafts never come out, and no count is negative."""
    p = [[0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 3
    for drafts, status in (([-1, -1], 0), ([9, -1], 4), ([-7, 2], 4)):
        out = run(backend, repeated(p, drafts, [0, 1]))
        assert (out[1] == 0).all() and (out[0][:, 0] == 4).all() and (out[2] == status).all()


def test_J06_counts_and_tokens_say_the_same(backend):
    """Emitted tokens are num_accepted + 1, what follows is padding: a stop token inside the accepted run
    can be found token by token."""
    p = np.eye(10)[[5, 2, 7, 8]].tolist()
    out = run(backend, repeated(p, [5, 2, 7], [0]))
    assert out[0][0].tolist() == [5, 2, 7, 8] and int(out[1][0]) == 3
    out = run(backend, repeated(p, [5, 3, 7], [0]))
    assert out[0][0].tolist() == [5, 2, -1, -1] and int(out[1][0]) == 1


# --- Controls -----------------------------------------------------------------------------------------
def test_K01_mask_rows_of_ragged_requests(backend):
    """Requests with 2, 0 and 1 drafts, masks of the first and the last only, through explicit rows."""
    vocab = 40
    cu_rows = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    masks = torch.zeros(5, 2, dtype=torch.int32)
    for i, word in enumerate([1 << 3, 1 << 5, 1 << 7, 1 << 9, 1 << 11]):
        masks[i, 0] = word
    case = {
        "target_logits": torch.zeros(6, vocab),
        "input_ids": torch.tensor([0, 3, 5, 0, 0, 9]),
        "cu_rows": cu_rows,
        "seeds": torch.tensor([1, 2, 3]),
        "positions": torch.tensor([4, 5, 6]),
        "max_drafts": 2,
        "vocab_size": vocab,
        "token_bitmask": masks,
        "bitmask_rows": torch.tensor([0, 1, 2, -1, 3, 4], dtype=torch.int32),
    }
    tokens, num_accepted, status, *_ = run(backend, case)
    assert tokens[0].tolist() == [3, 5, 7] and tokens[2].tolist() == [9, 11, -1]
    assert num_accepted.tolist() == [2, 0, 1] and status.tolist() == [0, 0, 0]
    free = {k: v for k, v in case.items() if k not in ("token_bitmask", "bitmask_rows")}
    for mine, theirs in zip(run(backend, case), run(backend, free), strict=True):
        assert_same(mine[1:2], theirs[1:2], "the unconstrained request")
    with pytest.raises(RuntimeError, match=r"bitmask_rows: wanted size 6 \(R of the logits\)"):
        run(backend, {**case, "bitmask_rows": case["bitmask_rows"][:5]})
    with pytest.raises(
        RuntimeError, match=r"token_bitmask: wanted size 6 .*bitmask_rows is absent"
    ):
        run(backend, {k: v for k, v in case.items() if k != "bitmask_rows"})
    # A row outside the bitmask fails closed: nothing is allowed, the fallback is flagged.
    outside = {**case, "bitmask_rows": torch.tensor([5, 1, 2, -1, 3, 4], dtype=torch.int32)}
    out = run(backend, outside)
    assert int(out[2][0]) == 8 and int(out[1][0]) == 0


def test_K03_child_of_a_stop_node_under_a_mask(backend):
    """A node behind a stop token has no grammar state: its row allows nothing, and no walk gets there
    unless the stop token itself was accepted; then the request ends flagged."""
    vocab = 8
    masks = torch.tensor([[1 << 2 | 1 << 3], [0], [0]], dtype=torch.int32)
    rows = np.full((3, vocab), 1.0 / vocab)
    case = trees.repeated(rows.tolist(), [-1, 0, 1], [0, 2, 4], np.arange(16))
    case["token_bitmask"] = masks.repeat(16, 1)
    tokens, path, num_accepted, status, *_ = trees.run(backend, case)
    assert set(tokens[:, 0].tolist()) == {2, 3}
    assert ((num_accepted == 1) == (status == 8)).all() and int(num_accepted.max()) == 1


def test_K04_penalties_count_the_drafts_before_the_row(backend):
    """frequency_penalty 1, id 3 counted once, drafts [3, 3, 2]: id 3 loses 1, 2, 3, 3 in rows 0..3."""
    vocab, expected = 5, [(1, 0), (2, 0), (3, 0), (3, 1)]
    counts = torch.zeros(1, vocab, dtype=torch.int32)
    counts[0, 3] = 1
    # Greedy acceptance of the given drafts: a bias makes them the argmax whatever the penalty.
    logits = torch.zeros(4, vocab)
    logits[0, 3] = logits[1, 3] = logits[2, 2] = 20.0
    case = {
        "target_logits": logits,
        "input_ids": torch.tensor([3, 3, 3, 2]),
        "cu_rows": torch.tensor([0, 4], dtype=torch.int32),
        "seeds": torch.tensor([1]),
        "positions": torch.tensor([0]),
        "max_drafts": 3,
        "vocab_size": vocab,
        "temperature": torch.zeros(1),
        "frequency_penalty": torch.ones(1),
        "token_counts": counts,
        "num_logprobs": vocab,
        "logprobs_mode": "processed",
    }
    out = run(backend, case)
    assert int(out[1][0]) == 3
    for j, (of_three, of_two) in enumerate(expected):
        ids, values = out[4][0, j].tolist(), out[5][0, j].tolist()
        logprob = dict(zip(ids, values, strict=True))
        free = logprob[0]  # an id without penalty
        got = torch.tensor([logprob[3] - free, logprob[2] - free])
        wanted = [float(logits[j, 3]) - of_three, float(logits[j, 2]) - of_two]
        assert_close(got, torch.tensor(wanted), what=f"row {j}", magnitude=32.0)
    # In a tree the drafts on the path count, not those beside it.
    case["parents"] = torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
    case["input_ids"] = torch.tensor([3, 3, 1, 3])
    case["target_logits"] = torch.zeros(4, vocab)
    case["target_logits"][0, 3] = case["target_logits"][1, 3] = 20.0
    case["max_depth"] = case.pop("max_drafts")
    out = trees.run(backend, case)
    assert out[1][0].tolist() == [0, 1, 3, -1]
    last = dict(zip(out[5][0, 2].tolist(), out[6][0, 2].tolist(), strict=True))
    got = torch.tensor([last[3] - last[0], last[1] - last[0]])
    assert_close(got, torch.tensor([-3.0, 0.0]), what="the node on the path", magnitude=32.0)


def test_K06_no_argument_is_written(backend):
    """Every op leaves its inputs alone, also where it filters them."""
    for children, method in (("sampled", "traversal"), ("deterministic", "token")):
        case = trees.random_case(4, 60, 6, seed=8, children=children, method=method)
        before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
        trees.run(backend, case)
        for name, value in before.items():
            assert_same(case[name], value, name)
