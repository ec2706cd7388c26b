"""specdec_ext.compat.flashinfer: published cases, the peer's semantics row by row, the exact law, callers."""

import itertools
import json
import pathlib

import backends
import numpy as np
import pytest
import torch
from compare import (
    DECISION_BAND,
    assert_close,
    assert_decisions,
    assert_formula,
    assert_rate,
    assert_same,
)
from compat_callers import DEVICES, on, parameters, use_backend, with_import_changed, with_peer
from oracles import compat_flashinfer as oracle
from oracles.choices import Coins, Every

from specdec_ext.compat import flashinfer

CASES = pathlib.Path(__file__).parent / "cases"
STREAM = "deterministic=True generator=None check_nan=False seed=None offset=None"
SIGNATURES = {
    "top_k_renorm_probs": "probs top_k is_deterministic=False",
    "top_p_renorm_probs": "probs top_p is_deterministic=False",
    "sampling_from_logits": f"logits indices=None {STREAM}",
    "top_k_top_p_sampling_from_logits": "logits top_k top_p indices=None "
    f"filter_apply_order='top_k_first' {STREAM} top_k_max=None",
    "chain_speculative_sampling": "draft_probs draft_token_ids target_probs "
    "maybe_output_accepted_token_num=None maybe_output_emitted_draft_token_num=None "
    "deterministic=True generator=None seed=None offset=None",
    "merge_state": "v_a s_a v_b s_b",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_peers(name):
    assert parameters(getattr(flashinfer, name)) == SIGNATURES[name].split()
    assert parameters(getattr(oracle, name)) == SIGNATURES[name].split()


class On:
    """The module under test on a backend: CPU tensors in and out."""

    def __init__(self, backend, monkeypatch):
        use_backend(monkeypatch, backend)
        self.backend = backend

    def __getattr__(self, name):
        def call(**arguments):
            out = getattr(flashinfer, name)(**on(self.backend, arguments))
            return [t.cpu() for t in out] if isinstance(out, tuple) else out.cpu()

        return call


@pytest.fixture(params=DEVICES)
def compat(request, monkeypatch):
    return On(backends.get(request.param), monkeypatch)


@pytest.fixture
def everywhere(backend, monkeypatch):
    return On(backend, monkeypatch)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def probabilities(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed)).mul(2).softmax(-1)


# --- Chains -----------------------------------------------------------------------------------------
PUBLISHED = {
    c["name"]: c for c in json.loads((CASES / "chain_flashinfer.json").read_text())["cases"]
}


@pytest.mark.parametrize("seed", [None, 0, 1, 2**63 + 5])
def test_case_of_the_documentation(everywhere, seed):
    case = PUBLISHED["docstring"]
    tokens, accepted, emitted = everywhere.chain_speculative_sampling(
        draft_probs=torch.tensor(case["draft_probs"]),
        draft_token_ids=torch.tensor(case["draft_tokens"], dtype=torch.int32),
        target_probs=torch.tensor(case["target_probs"]),
        seed=seed,
        offset=seed,
    )
    assert tokens.tolist() == case["expected_tokens"] and tokens.dtype == torch.int32
    assert accepted.tolist() == case["expected_accepted"] and accepted.dtype == torch.int32
    assert emitted.tolist() == case["expected_emitted"] and emitted.dtype == torch.int32


@pytest.mark.parametrize(
    ("drafts", "vocab", "batch"), [(1, 111, 1), (3, 111, 9), (7, 32000, 3), (0, 111, 2)]
)
def test_case_of_one_hot_targets(compat, drafts, vocab, batch):
    ids = torch.randint(0, vocab, (batch, drafts + 1), generator=seeded(drafts))
    g = torch.Generator(compat.backend.device).manual_seed(1)
    target = torch.nn.functional.one_hot(ids, vocab).float()
    draft = probabilities(batch, drafts, vocab)
    tokens, accepted, emitted = compat.chain_speculative_sampling(
        draft_probs=draft, draft_token_ids=ids[:, :-1].int(), target_probs=target, generator=g
    )
    assert tokens.tolist() == ids.tolist()
    assert emitted.tolist() == accepted.tolist() == [drafts] * batch


@pytest.mark.parametrize(("drafts", "vocab", "batch"), [(1, 111, 99), (5, 111, 99), (3, 32000, 9)])
def test_case_of_shapes(compat, drafts, vocab, batch):
    draft, target = (
        probabilities(batch, drafts, vocab, seed=1),
        probabilities(batch, drafts + 1, vocab, seed=2),
    )
    ids = draft.flatten(0, 1).multinomial(1, generator=seeded(3)).view(batch, drafts)
    held = torch.full((batch,), 5, dtype=torch.int64), torch.full((batch,), 7, dtype=torch.int32)
    tokens, accepted, emitted = compat.chain_speculative_sampling(
        draft_probs=draft, draft_token_ids=ids, target_probs=target, seed=1, offset=2,
        maybe_output_accepted_token_num=held[0].clone(), maybe_output_emitted_draft_token_num=held[1].clone(),
    )  # fmt: skip
    assert accepted.dtype == torch.int64  # whatever integer the caller counts in
    accepted, emitted = accepted - 5, emitted - 7  # added to
    assert (emitted + 1).tolist() == (tokens != -1).sum(1).tolist()
    assert (accepted >= emitted).all() and (accepted <= drafts).all() and (tokens < vocab).all()
    for row, count, wanted in zip(tokens.tolist(), emitted.tolist(), ids.tolist(), strict=True):
        assert row[:count] == wanted[:count] and row[count] >= 0
        assert row[count + 1 :] == [-1] * (drafts - count)


def chain_case(batch, drafts, vocab, seed):
    draft, target = (
        probabilities(batch, drafts, vocab, seed=seed),
        probabilities(batch, drafts + 1, vocab, seed=seed + 1),
    )
    draft[1::3], target[2::5, :, ::2] = target[1::3, :-1], 0
    target /= target.sum(-1, keepdim=True)
    ids = draft.flatten(0, 1).multinomial(1, generator=seeded(seed)).view(batch, drafts)
    ids[4::7, -1] = -1
    return {
        "draft_probs": draft,
        "draft_token_ids": ids.int(),
        "target_probs": target,
        "seed": torch.randint(-(2**62), 2**62, (batch,), generator=seeded(seed)),
        "offset": torch.randint(0, 2**40, (batch,), generator=seeded(seed + 1)),
    }  # fmt: skip


def test_chains_given_their_random_numbers(compat):
    case = chain_case(120, 3, 9, 11)
    tokens, _, emitted = compat.chain_speculative_sampling(**case)
    got, allowed = [], []
    for b in range(120):
        choose = Coins(int(case["seed"][b]), int(case["offset"][b]), DECISION_BAND)
        p, q = (case[k][b].double().numpy() for k in ("target_probs", "draft_probs"))
        ids = case["draft_token_ids"][b].tolist()
        allowed.append([t for _, t in oracle.chain(p / p.sum(-1, keepdims=True), q, ids, choose)])
        got.append([t for t in tokens[b].tolist() if t != -1])
    assert_decisions(got, allowed)
    assert emitted.tolist() == [len(t) - 1 for t in got]
    assert {1, 2, 3, 4} <= {len(t) for t in got}


def test_exact_law_of_the_chain():
    """All drafts that the drafter may draw and all choices of the walk that the function is compared with."""
    vocab, drafts = 3, 2
    p, q = (probabilities(drafts + 1, vocab, seed=s).double().numpy() for s in (5, 6))
    p[1, 2], q[0, 1] = 0, 0
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    law = np.zeros((vocab,) * (drafts + 1))
    for ids in itertools.product(range(vocab), repeat=drafts):
        drawn = np.prod([q[j][x] for j, x in enumerate(ids)])
        for weight, tokens in oracle.chain(p, q, list(ids), Every()):
            rest = [p[j] for j in range(len(tokens), drafts + 1)]  # plain sampling goes on
            tail = np.ones(())
            for row in rest:
                tail = np.multiply.outer(tail, row)
            law[tuple(tokens)] += drawn * weight * tail
    assert_formula(law, p[0][:, None, None] * p[1][None, :, None] * p[2][None, None, :], "law")


def test_frequencies_and_the_diagnostic(compat):
    """Rows that share one seed are told apart: their drafts and tokens have the law together."""
    batch, vocab, drafts = 6000, 4, 2
    p, q = probabilities(drafts + 1, vocab, seed=21), probabilities(drafts, vocab, seed=22)
    ids = torch.stack(
        [q[j].multinomial(batch, True, generator=seeded(j)) for j in range(drafts)], 1
    )
    tokens, accepted, emitted = compat.chain_speculative_sampling(
        draft_probs=q.repeat(batch, 1, 1), draft_token_ids=ids.int(), target_probs=p.repeat(batch, 1, 1),
        seed=torch.tensor([77]), offset=torch.tensor([5]),
    )  # fmt: skip
    first = torch.bincount(tokens[:, 0].long(), minlength=vocab) / batch
    assert_rate(first.numpy(), p[0].numpy(), batch, "first token")
    second = tokens[tokens[:, 1] >= 0, 1].long()
    assert_rate(
        torch.bincount(second, minlength=vocab).numpy() / len(second),
        p[1].numpy(),
        len(second),
        "second",
    )
    each = np.minimum(p[:-1].numpy(), q.numpy()).sum(1)
    assert_rate(float((emitted >= 1).float().mean()), each[0], batch, "first draft")
    # The diagnostic counts the second draft on its own behind a rejected first one.
    behind = emitted == 0
    rate = float((accepted[behind] == 1).float().mean())
    assert_rate(rate, each[1], int(behind.sum()), "second draft on its own")
    assert (accepted[~behind] == emitted[~behind]).all()


def test_a_row_with_its_own_seed_does_not_depend_on_the_batch(everywhere):
    case = chain_case(7, 3, 50, 31)
    together = everywhere.chain_speculative_sampling(**case)
    for b in (0, 4, 6):
        alone = everywhere.chain_speculative_sampling(**{k: v[b : b + 1] for k, v in case.items()})
        for mine, whole in zip(alone, together, strict=True):
            assert mine[0].tolist() == whole[b].tolist()


def test_bad_data_stays_in_its_row(compat):
    case = chain_case(4, 3, 9, 41)
    wanted = compat.chain_speculative_sampling(**case)[0]
    case["target_probs"][0] = float("nan")
    case["draft_token_ids"][1] = 99
    case["target_probs"][2] = 0
    tokens, accepted, emitted = compat.chain_speculative_sampling(**case)
    assert tokens[3].tolist() == wanted[3].tolist()
    assert ((tokens >= -1) & (tokens < 9)).all() and (tokens[:, 0] >= 0).all()
    assert emitted[:3].tolist() == [0, 0, 0] and accepted[:3].tolist() == [0, 0, 0]


# --- Filters ----------------------------------------------------------------------------------------
def test_published_order_of_the_filters(compat):
    case = json.loads((CASES / "top_k_top_p_order.json").read_text())
    probs = torch.tensor([case["inputs"]["probs"]])
    k, p = case["inputs"]["top_k"], case["inputs"]["top_p"]
    both = compat.top_p_renorm_probs(probs=compat.top_k_renorm_probs(probs=probs, top_k=k), top_p=p)
    assert_close(both[0], torch.tensor(case["expected_top_k_then_top_p"]))
    for order, wanted in (
        ("top_k_first", case["expected_top_k_then_top_p"]),
        ("joint", case["expected_joint"]),
    ):
        assert_close(
            torch.from_numpy(oracle.law(probs.log()[0], k, p, order)).float(), torch.tensor(wanted)
        )
        tokens = compat.top_k_top_p_sampling_from_logits(
            logits=probs.log().repeat(4000, 1),
            top_k=k,
            top_p=p,
            filter_apply_order=order,
            seed=1,
            offset=0,
        )
        rate = torch.bincount(tokens.long(), minlength=9).numpy() / 4000
        assert_rate(rate, np.array(wanted), 4000, order)


def tied(batch, vocab, seed, dtype=torch.float32):
    """Probabilities in sixteenths of a few, so that many are equal."""
    x = torch.randint(0, 5, (batch, vocab), generator=seeded(seed)).float()
    x[:, 0] += 1
    return (x / x.sum(1, keepdim=True)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ["tied", "distinct"])
def test_renormalised_by_top_k(compat, make, dtype):
    probs = (tied if make == "tied" else probabilities)(40, 12, seed=3).to(dtype)
    per_row = torch.randint(-1, 14, (40,), generator=seeded(4), dtype=torch.int32)
    for k in (1, 3, 12, 0, per_row):
        out = compat.top_k_renorm_probs(probs=probs, top_k=k)
        wanted = oracle.top_k_renorm_probs(probs, k)
        assert ((out > 0) == (wanted > 0)).all() and out.dtype == dtype
        assert_close(out, wanted.double())


@pytest.mark.parametrize("make", ["tied", "distinct"])
def test_renormalised_by_top_p(compat, make):
    probs = (tied if make == "tied" else probabilities)(40, 12, seed=5)
    per_row = torch.rand(40, generator=seeded(6)) * 1.2
    for p in (0.0, 0.3, 0.9, 1.0, per_row):
        out = compat.top_p_renorm_probs(probs=probs, top_p=p)
        wanted = oracle.top_p_renorm_probs(probs, p)
        assert ((out > 0) == (wanted > 0)).all() and out.dtype == torch.float32
        assert_close(out, wanted.double())


def test_renormalising_leaves_its_input_alone(compat):
    probs = probabilities(3, 8)
    before = probs.clone()
    compat.top_p_renorm_probs(probs=probs, top_p=0.5)
    compat.top_k_renorm_probs(probs=probs, top_k=2)
    assert_same(probs, before)
    assert torch.isfinite(compat.top_p_renorm_probs(probs=torch.zeros(2, 5), top_p=0.5)).all()


# --- Sampling ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
@pytest.mark.parametrize("ties", [False, True])
def test_draws_given_their_random_numbers(compat, order, ties):
    rows, vocab, g = 60, 15, seeded(8)
    logits = torch.randn(20, vocab, generator=g) * 2
    if ties:
        logits = logits.round()
    indices = torch.randint(0, 20, (rows,), generator=g)
    top_k = torch.randint(0, 17, (20,), generator=g)
    top_p = torch.rand(20, generator=g) * 1.1
    case = {
        "logits": logits, "indices": indices, "top_k": top_k, "top_p": top_p, "filter_apply_order": order,
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=g), "offset": torch.arange(rows),
    }  # fmt: skip
    tokens = compat.top_k_top_p_sampling_from_logits(**case)
    assert tokens.dtype == torch.int64
    allowed = []
    for i, r in enumerate(indices.tolist()):
        law = oracle.law(logits[r], float(top_k[r]), float(top_p[r]), order)
        choose = Coins(int(case["seed"][i]), i, DECISION_BAND)
        allowed.append([t for _, t in choose.draw(law, oracle.SAMPLE, 0)])
    assert_decisions(tokens.tolist(), allowed)
    plain = compat.sampling_from_logits(
        logits=logits, seed=case["seed"][:20], offset=torch.arange(20)
    )
    wanted = oracle.sampling_from_logits(logits, seed=case["seed"][:20], offset=torch.arange(20))
    assert plain.dtype == torch.int32
    assert_decisions(plain.tolist(), [[t] for t in wanted.tolist()])


def test_where_random_numbers_come_from(compat):
    logits = torch.zeros(64, 1000)
    draw = compat.sampling_from_logits
    once = draw(logits=logits, seed=3, offset=4)
    assert (
        once.tolist()
        == draw(logits=logits, seed=torch.tensor([3]), offset=torch.tensor([4])).tolist()
    )
    assert once.tolist() != draw(logits=logits, seed=3, offset=5).tolist()
    assert len(set(once.tolist())) > 32  # rows that share a seed are independent
    same = torch.full((64,), 3)
    assert (
        len(set(draw(logits=logits, seed=same, offset=same).tolist())) == 1
    )  # rows with their own are keyed by it
    assert once[0] == draw(logits=logits[:1], seed=3, offset=4)[0]
    unsigned = torch.tensor([2**64 - 1] * 64, dtype=torch.uint64)
    signed = draw(logits=logits, seed=torch.full((64,), -1), offset=same)
    assert (
        draw(logits=logits, seed=unsigned, offset=torch.full((64,), 3, dtype=torch.uint64)).tolist()
        == signed.tolist()
    )
    torch.manual_seed(5)
    first, second = draw(logits=logits), draw(logits=logits)
    torch.manual_seed(5)
    assert first.tolist() == draw(logits=logits).tolist() != second.tolist()


def test_nan_rows(compat):
    logits = torch.randn(3, 8, generator=seeded(1))
    wanted = compat.top_k_top_p_sampling_from_logits(
        logits=logits, top_k=3, top_p=0.9, seed=1, offset=1
    )
    logits[1] = float("nan")
    logits[1, 5] = 1.0
    for order in ("top_k_first", "joint"):
        got = compat.top_k_top_p_sampling_from_logits(
            logits=logits, top_k=3, top_p=0.9, filter_apply_order=order, seed=1, offset=1
        )
        assert got[1] == 5 and (order == "joint" or got[[0, 2]].tolist() == wanted[[0, 2]].tolist())
    with pytest.raises(ValueError, match="logits: wanted no NaN"):
        compat.sampling_from_logits(logits=logits, check_nan=True)


# --- Merging ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_states(compat, dtype):
    g = seeded(9)
    v_a, v_b = (torch.randn(6, 3, 16, generator=g).to(dtype) for _ in range(2))
    s_a, s_b = (torch.randn(6, 3, generator=g) * 9 for _ in range(2))
    s_a[0] = s_b[1] = -torch.inf
    s_a[2] = s_b[2] = -torch.inf
    v, s = compat.merge_state(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    wanted_v, wanted_s = oracle.merge_state(v_a, s_a, v_b, s_b)
    assert v.dtype == dtype and s.dtype == torch.float32
    assert_close(v, wanted_v)
    assert_close(s, wanted_s)
    assert (v[2] == 0).all() and (v[0] == v_b[0]).all()


# --- Callers ----------------------------------------------------------------------------------------
CALLER = '''
from flashinfer.sampling import (
    chain_speculative_sampling, sampling_from_logits, top_k_renorm_probs,
    top_k_top_p_sampling_from_logits, top_p_renorm_probs,
)

def verify(draft_probs, draft_ids, logits, top_ks, top_ps, seed, offset):
    probs = top_k_renorm_probs(logits.softmax(-1).flatten(0, 1), top_ks)
    probs = top_p_renorm_probs(probs, top_ps).view_as(logits)
    tokens, _, emitted = chain_speculative_sampling(
        draft_probs, draft_ids, probs, seed=seed, offset=offset
    )
    plain = sampling_from_logits(logits[:, 0], seed=seed, offset=offset)
    rows = len(seed)
    filtered = top_k_top_p_sampling_from_logits(
        logits[:, 0], top_ks[:rows], top_ps[:rows], filter_apply_order="joint", seed=seed,
        offset=offset,
    )
    return tokens, emitted, plain, filtered
'''  # fmt: skip


def test_a_caller_with_the_import_changed(monkeypatch):
    g, case = seeded(17), chain_case(12, 2, 30, 51)
    logits = torch.randn(12, 3, 30, generator=g)
    args = (
        case["draft_probs"], case["draft_token_ids"], logits,
        torch.randint(1, 30, (36,), generator=g), torch.rand(36, generator=g), case["seed"], case["offset"],
    )  # fmt: skip
    path = "flashinfer.sampling"
    wanted = with_peer(monkeypatch, path, oracle, CALLER, "verify", *args)
    got = with_import_changed(CALLER, path, "specdec_ext.compat.flashinfer", "verify", *args)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert_same(mine, theirs, f"result {i}")


# --- No waiting for the device, graphs, bad arguments -----------------------------------------------
def calls():
    case = chain_case(4, 2, 9, 1)
    v, s = torch.randn(2, 3, 4), torch.randn(2, 3)
    logits, k, p = torch.randn(4, 9), torch.tensor([2, 3, 0, 9]), torch.rand(4)
    stream = {"seed": case["seed"], "offset": case["offset"]}
    return [
        ("chain_speculative_sampling", case),
        ("top_k_renorm_probs", {"probs": logits.softmax(1), "top_k": k}),
        ("top_p_renorm_probs", {"probs": logits.softmax(1), "top_p": p}),
        ("sampling_from_logits", {"logits": logits, **stream}),
        ("top_k_top_p_sampling_from_logits", {"logits": logits, "top_k": k, "top_p": p, **stream}),
        ("merge_state", {"v_a": v, "s_a": s, "v_b": v, "s_b": s}),
    ]


@pytest.mark.parametrize(
    ("name", "arguments"), calls(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_traces_without_a_value_on_the_host(name, arguments):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        getattr(flashinfer, name)(**{k: mode.from_tensor(v) for k, v in arguments.items()})


def test_compiles_as_one_graph():
    case = chain_case(4, 2, 9, 1)
    function = torch.compile(
        flashinfer.chain_speculative_sampling, fullgraph=True, backend="aot_eager"
    )
    for mine, theirs in zip(
        function(**case), flashinfer.chain_speculative_sampling(**case), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("chain_speculative_sampling", {"target_probs": torch.zeros(4, 2, 9)}, "target_probs: wanted size 3 (S + 1), got 2"),
        ("chain_speculative_sampling", {"draft_token_ids": torch.zeros(4, 2)}, "draft_token_ids: wanted dtype int32"),
        ("chain_speculative_sampling", {"seed": 3}, "seed, offset: wanted two tensors or two integers"),
        ("chain_speculative_sampling", {"seed": torch.zeros(3, dtype=torch.int64)}, "seed: wanted 1 or 4 elements, got 3"),
        ("chain_speculative_sampling", {"maybe_output_accepted_token_num": torch.zeros(4)}, "maybe_output_accepted_token_num: wanted dtype"),
        ("top_k_renorm_probs", {"top_k": torch.zeros(3, dtype=torch.int64)}, "top_k: wanted size 4 (rows), got 3"),
        ("top_p_renorm_probs", {"top_p": torch.zeros(4, dtype=torch.float64)}, "top_p: wanted dtype float32, got float64"),
        ("top_p_renorm_probs", {"probs": torch.zeros(4)}, "probs: wanted shape [B, V], got [4]"),
        ("sampling_from_logits", {"indices": torch.zeros(4)}, "indices: wanted dtype int32 or int64, got float32"),
        ("top_k_top_p_sampling_from_logits", {"filter_apply_order": "both"}, "filter_apply_order: wanted"),
        ("merge_state", {"v_b": torch.zeros(2, 3, 5)}, "v_b: wanted size 4 (D of v_a), got 5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name, change, words):
    with pytest.raises(RuntimeError) as error:
        getattr(flashinfer, name)(**dict(calls())[name] | change)
    assert str(error.value).startswith(f"specdec_ext.compat.flashinfer.{name}: ")
    assert words in str(error.value)
