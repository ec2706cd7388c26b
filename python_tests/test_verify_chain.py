"""verify_chain: decisions, padding, status and invariance against the oracle, on every backend.

The law of the emitted tokens is in test_chain_law.py, public faults in faults/test_faults_chain.py.
"""

import json
import pathlib

import chains
import pytest
import torch
from chains import assert_equal, check, random_case, run, take
from compare import assert_same

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = pathlib.Path(__file__).parent / "cases"
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 5, 17, 300, 4096, 4099, 9000])
def test_matches_oracle(backend, dtype, vocab):
    batch = 6 if backend.emulated else 40
    check(backend, random_case(batch, vocab, 3, seed=vocab, dtype=dtype))


@pytest.mark.parametrize("draft_dtype", DTYPES)
def test_draft_logits_of_another_type(backend, draft_dtype):
    for dtype in DTYPES:
        check(backend, random_case(6, 500, 2, seed=1, dtype=dtype, draft_dtype=draft_dtype))


@pytest.mark.parametrize("max_drafts", [0, 1, 7, 15])
def test_numbers_of_drafts(backend, max_drafts):
    check(backend, random_case(5 if backend.emulated else 30, 50, max_drafts, seed=max_drafts))


def test_a_block_with_several_tiles_of_a_residual(backend):
    """Of 512 requests each has one block; all but one have no rows, so that this stays quick."""
    p, q = torch.zeros(2, 8193), torch.zeros(1, 8193)
    p[0, 5], q[0, 5] = -20.0, 20.0  # rejected, and the residual lies in all three tiles
    check(
        backend,
        {
            "target_logits": p,
            "input_ids": torch.tensor([0, 5]),
            "cu_rows": torch.tensor([0] + [2] * 512, dtype=torch.int32),
            "seeds": torch.arange(512),
            "positions": torch.zeros(512, dtype=torch.int64),
            "max_drafts": 1,
            "vocab_size": 8193,
            "draft_logits": q.expand(512, 1, -1),
        },
    )


@pytest.mark.parametrize("draft_row", [5, 6, 7, 2**31 - 1, -1, -(2**31)])
def test_draft_rows_outside_draft_logits_are_one_hot(backend, draft_row):
    """5 is the last of six rows, 6 the first that is not there."""
    case = random_case(12, 40, 3, seed=21)
    case.pop("draft_is_one_hot", None)
    case["draft_logits"] = case["draft_logits"][:6].clone()
    case["draft_rows"] = torch.full((12,), draft_row, dtype=torch.int32)
    out = run(backend, case)
    one_hot = {k: v for k, v in case.items() if not k.startswith("draft_")}
    if draft_row == 5:
        last = case | {"draft_logits": case["draft_logits"][5:].expand(12, 3, -1).contiguous()}
        last["draft_rows"] = None
        assert_equal(out, run(backend, last))
        assert out[0].tolist() != run(backend, one_hot)[0].tolist()
    else:
        assert_equal(out, run(backend, one_hot))


def test_large_vocabulary(backend):
    case = random_case(2 if backend.emulated else 12, 151936, 2, seed=3, dtype=torch.bfloat16)
    check(backend, case)


def test_thousands_of_decisions(backend):
    """Every accept, residual, bonus and fallback branch, often: given its numbers, each is exact."""
    batch = 100 if backend.emulated else 1500
    for vocab, scale in [(3, 0.7), (5, 2.0), (20, 5.0)]:
        out = check(backend, random_case(batch, vocab, 3, seed=vocab + 1, scale=scale))
        accepted = torch.bincount(out[1], minlength=4)
        assert (accepted >= batch // 50).all(), "the case does not reach every number of accepts"


def test_one_hot_drafts_in_every_way_of_saying_so(backend):
    """No draft_logits, draft_rows -1, the flag and a greedy draft temperature: bitwise one thing."""
    case = random_case(30, 40, 3, seed=5)
    rest = {k: v for k, v in case.items() if not k.startswith("draft_")}
    wanted = check(backend, rest)
    batch = 30
    logits = case["draft_logits"]
    ways = {
        "draft_rows": {"draft_rows": torch.full((batch,), -1, dtype=torch.int32)},
        "foreign rows": {"draft_rows": torch.full((batch,), 2**30, dtype=torch.int32)},
        "flag": {"draft_is_one_hot": torch.ones(batch, dtype=torch.bool)},
        "temperature": {"draft_temperature": torch.full((batch,), 9e-6)},
    }
    for way, options in ways.items():
        assert_equal(run(backend, {**rest, "draft_logits": logits, **options}), wanted, way)
    poisoned = torch.full_like(logits, NAN)  # and q is not even read
    assert_equal(run(backend, {**rest, "draft_logits": poisoned, **ways["flag"]}), wanted)


def test_greedy_requests_never_read_q(backend):
    case = random_case(20, 40, 3, seed=6)
    case["temperature"] = torch.zeros(20)
    wanted = check(backend, case)
    assert_equal(
        run(backend, {**case, "draft_logits": torch.full_like(case["draft_logits"], NAN)}), wanted
    )
    assert_equal(run(backend, {**case, "temperature": torch.full((20,), NAN)}), wanted, "at NaN")


def test_sampled_drafts_equal_to_the_target_are_all_accepted(backend):
    """Equal logits give bitwise equal p and q, so u * q < p for every u in [0, 1)."""
    for dtype in DTYPES:
        case = random_case(60, 300, 3, seed=7, dtype=dtype)
        rows = 4
        case["cu_rows"] = torch.arange(61, dtype=torch.int32) * rows
        g = torch.Generator().manual_seed(1)
        case["target_logits"] = (torch.randn(60 * rows, 300, generator=g) * 3).to(dtype)
        case["draft_logits"] = case["target_logits"].reshape(60, rows, 300)[:, :3].contiguous()
        case["input_ids"] = torch.randint(0, 300, (60 * rows,), generator=g)
        case["temperature"] = case["draft_temperature"] = torch.rand(60, generator=g) + 0.3
        case["draft_rows"] = case["draft_is_one_hot"] = None
        out = run(backend, case)
        assert (out[1] == 3).all() and (out[2] == 0).all()


def test_long_chains_are_accepted_to_the_end(backend):
    """More drafts than rows are judged at a time, on a vocabulary of two tiles."""
    drafts, vocab = 19, 5000
    g = torch.Generator().manual_seed(3)
    best = torch.randint(0, vocab, (2, drafts + 1), generator=g)
    target = torch.zeros(2, drafts + 1, vocab).scatter_(2, best[..., None], 40.0)
    ids = torch.cat([torch.zeros(2, 1, dtype=torch.int64), best[:, :drafts]], 1)
    ids[1, 17] = (ids[1, 17] + 1) % vocab  # the second request rejects its draft 17
    case = {
        "target_logits": target.reshape(-1, vocab),
        "input_ids": ids.reshape(-1),
        "cu_rows": torch.tensor([0, drafts + 1, 2 * (drafts + 1)], dtype=torch.int32),
        "seeds": torch.tensor([5, 6]),
        "positions": torch.tensor([7, 8]),
        "max_drafts": drafts,
        "vocab_size": vocab,
    }
    tokens, accepted, status, *_ = run(backend, case)
    assert accepted.tolist() == [19, 16] and status.tolist() == [0, 0]
    assert tokens[0].tolist() == best[0].tolist()
    assert tokens[1].tolist() == best[1, :17].tolist() + [-1, -1, -1]


# --- Status -----------------------------------------------------------------------------------------
def test_status_speaks_of_what_was_reached(backend):
    """One-hot rows decide everything; the bad data lies before, at and behind the first rejection."""
    vocab, anchor = 6, 0
    row = {v: torch.where(torch.arange(vocab) == v, 0.0, -INF) for v in range(vocab)}
    nan = torch.full((vocab,), NAN)
    dead = torch.full((vocab,), -INF)
    one_nan = torch.tensor([1.0, NAN, 7.0, -INF, 7.0, 0.0])
    inf = torch.tensor([1.0, INF, 7.0, 2.0, 7.0, 0.0])
    # target rows, drafts, q rows (None: like the target) -> tokens, accepted, status
    table = [
        ([row[1], row[2], row[3]], [1, 2], None, [1, 2, 3], 2, 0),
        ([row[1], nan, row[3]], [1, 2], None, [1, 0, -1], 1, 1),
        ([one_nan, row[2], row[3]], [1, 2], None, [2, -1, -1], 0, 1),
        (
            [inf, row[2], row[3]],
            [2, 2],
            None,
            [2, -1, -1],
            0,
            1,
        ),  # ends even where the draft equals it
        ([row[1], row[2], dead], [1, 2], None, [1, 2, 0], 2, 1),
        ([row[1], row[2], nan], [1, 3], [row[1], row[3]], [1, 2, -1], 1, 0),  # behind the rejection
        ([row[1], row[2], row[3]], [1, 2], [nan, row[2]], [1, -1, -1], 0, 2),
        ([row[1], row[2], row[3]], [1, 2], [row[1], one_nan], [1, 2, -1], 1, 2),
        ([row[1], row[2], row[3]], [1, 2], [row[1], inf], [1, 2, -1], 1, 2),
        ([row[1], row[2], row[3]], [1, 2], [dead, row[2]], [1, -1, -1], 0, 2),
        ([row[1], row[2], row[3]], [4, 2], [row[4], nan], [1, -1, -1], 0, 0),
        ([row[1], row[2], row[3]], [1, -1], None, [1, 2, -1], 1, 0),
        ([row[1], row[2], row[3]], [1, vocab], None, [1, 2, -1], 1, 4),
        ([row[1], row[2], row[3]], [-2, 2], None, [1, -1, -1], 0, 4),
        ([row[1], row[2], row[3]], [2**31 - 1, 2], None, [1, -1, -1], 0, 4),
        ([row[1], row[2], row[3]], [3, vocab], [row[3], row[2]], [1, -1, -1], 0, 0),
        ([nan, row[2], row[3]], [vocab, 2], None, [0, -1, -1], 0, 1),  # the row comes first
        ([row[1], row[2], row[3]], [1, vocab], [row[1], nan], [1, 2, -1], 1, 4),  # then the id
    ]
    batch = len(table)
    for dtype in (torch.int64, torch.int32):
        for greedy in (False, True):
            case = {
                "target_logits": torch.cat([torch.stack(t[0]) for t in table]),
                "input_ids": torch.tensor([[anchor, *t[1]] for t in table]).flatten().to(dtype),
                "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * 3,
                "seeds": torch.arange(batch),
                "positions": torch.arange(batch),
                "max_drafts": 2,
                "vocab_size": vocab,
                "draft_logits": torch.stack(
                    [torch.stack(t[2] or [row[min(max(d, 0), 5)] for d in t[1]]) for t in table]
                ),
            }
            if greedy:
                case["temperature"] = torch.zeros(batch)
            tokens, accepted, status, *_ = check(backend, case)
            for b, (_, drafts, q, wanted, count, bits) in enumerate(table):
                if greedy and bits == 2:
                    continue  # greedy requests do not look at q: compared by check() alone
                assert (tokens[b].tolist(), int(accepted[b]), int(status[b])) == (
                    wanted,
                    count,
                    bits,
                ), f"case {b} (drafts {drafts}, q {q is not None}, greedy {greedy})"


def test_bad_requests_leave_their_neighbours_alone(backend):
    batch = 6 if backend.emulated else 20
    case = random_case(batch, 4100, 3, seed=8)
    wanted = run(backend, case)
    cu = case["cu_rows"].tolist()
    target, draft = case["target_logits"].clone(), case["draft_logits"].clone()
    for b in range(0, batch, 2):
        target[cu[b] : cu[b + 1]] = NAN
        if case["draft_rows"][b] >= 0:
            draft[case["draft_rows"][b]] = NAN
    out = run(backend, {**case, "target_logits": target, "draft_logits": draft})
    assert_equal([t[1::2] for t in out], [t[1::2] for t in wanted])
    assert (out[2][::2] == (case["cu_rows"].diff() > 0).int()[::2]).all()


# --- Raggedness and padding -------------------------------------------------------------------------
def test_drafts_that_end_in_placeholders_are_absent(backend):
    """Trailing -1 drafts: bitwise the request without those rows, whatever the rows hold."""
    vocab, batch = 30, 40
    case = random_case(batch, vocab, 3, seed=9)
    case["cu_rows"] = torch.arange(batch + 1, dtype=torch.int32) * 4
    g = torch.Generator().manual_seed(3)
    target = torch.randn(batch, 4, vocab, generator=g)
    ids = torch.randint(0, vocab, (batch, 4), generator=g)
    kept = torch.randint(1, 5, (batch,), generator=g)
    short_rows = [(b, j) for b in range(batch) for j in range(int(kept[b]))]
    for b in range(batch):
        ids[b, kept[b] :] = -1
        target[b, kept[b] :] = NAN
    case["input_ids"], case["target_logits"] = ids.flatten(), target.flatten(0, 1)
    short = {
        **case,
        "input_ids": torch.stack([ids[b, j] for b, j in short_rows]),
        "target_logits": torch.stack([target[b, j] for b, j in short_rows]),
        "cu_rows": torch.cat([torch.zeros(1), kept.cumsum(0)]).int(),
    }
    assert_equal(run(backend, case), check(backend, short))


def test_rows_past_max_drafts_and_past_the_batch_are_not_read(backend):
    vocab = 20
    case = random_case(8, vocab, 2, seed=10)
    case["cu_rows"] = torch.arange(9, dtype=torch.int32) * 6
    g = torch.Generator().manual_seed(3)
    case["target_logits"] = torch.randn(60, vocab, generator=g)
    case["input_ids"] = torch.randint(0, vocab, (60,), generator=g)
    wanted = check(backend, case)
    poisoned = case["target_logits"].reshape(10, 6, vocab).clone()
    poisoned[:, 3:] = NAN
    poisoned[8:] = NAN
    ids = case["input_ids"].reshape(10, 6).clone()
    ids[:, 3:] = 2**40
    case["target_logits"], case["input_ids"] = poisoned.flatten(0, 1), ids.flatten()
    assert_equal(run(backend, case), wanted)


def test_wrong_cu_rows_stay_inside(backend):
    case = random_case(5, 20, 2, seed=11)
    case["input_ids"], case["target_logits"] = case["input_ids"][:9], case["target_logits"][:9]
    for cu in (
        [-5, 2, 3, 3, 100, 2**31 - 1],
        [9, 9, 9, 9, 9, 9],
        [20, 30, 40, 50, 60, 70],
        [8, 2, 9, 1, 5, 0],
    ):
        check(backend, {**case, "cu_rows": torch.tensor(cu, dtype=torch.int32)})


def test_empty(backend):
    case = random_case(3, 20, 2, seed=12)
    none = {
        **case,
        "target_logits": torch.empty_strided((0, 20), (5, 3)),
        "input_ids": case["input_ids"][:0],
        "cu_rows": torch.zeros(4, dtype=torch.int32),
    }
    out = check(backend, none)
    assert (out[0] == -1).all()
    nobody = take(case, [])
    assert check(backend, nobody)[0].shape == (0, 3)
    no_drafts = {**case, "max_drafts": 0, "draft_logits": case["draft_logits"][:, :0]}
    assert check(backend, no_drafts)[0].shape == (3, 1)


# --- Layout -----------------------------------------------------------------------------------------
def test_strides_widths_and_types(backend):
    """Row strides, columns past vocab_size, int32 ids and positions: bitwise the dense call."""
    vocab, on = 300, backend.device
    for dtype in DTYPES:
        case = random_case(6, vocab, 2, seed=13, dtype=dtype)
        case["positions"] = case["positions"] % 2**30
        foreign = (case["input_ids"] > 2**31 - 1).nonzero()[:, 0]
        case["input_ids"][foreign] = vocab + 5
        wanted = check(backend, case)
        strided = dict(case)
        rows = case["target_logits"].shape[0]
        wide = torch.full((2 * rows, vocab + 45), NAN, dtype=dtype, device=on)
        strided["target_logits"] = wide[::2, 3 : 3 + vocab + 20]
        strided["target_logits"][:, :vocab] = case["target_logits"].to(on)
        wide = torch.full((4, 9, vocab + 33), NAN, dtype=dtype, device=on)
        strided["draft_logits"] = wide[::2, ::1][:, :7, 1 : 1 + vocab + 9].transpose(0, 1)
        strided["draft_logits"][..., :vocab] = case["draft_logits"].to(on)
        strided["input_ids"] = case["input_ids"].int()
        strided["positions"] = case["positions"].int()
        ids = torch.full((2 * rows,), -3, dtype=torch.int32, device=on)[::2]
        ids.copy_(strided["input_ids"])
        strided["input_ids"] = ids
        got = run(backend, strided)
        assert got[0].dtype == torch.int32
        got[0], got[4] = got[0].long(), got[4].long()
        assert_equal(got, wanted)


# --- Invariance -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_invariance(backend, dtype):
    """Alone, in any order, with padding and at any thread count: the same bits."""
    batch, vocab = (4, 4200) if backend.emulated else (9, 20000)
    case = random_case(batch, vocab, 3, seed=14, dtype=dtype)
    whole = run(backend, case)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(1)).tolist()
    assert_equal(run(backend, take(case, order)), [t[order] for t in whole], "permuted")
    padded = dict(case)
    pad = torch.full((3, vocab), NAN, dtype=dtype)
    padded["target_logits"] = torch.cat([case["target_logits"], pad])
    padded["input_ids"] = torch.cat([case["input_ids"], torch.tensor([7, -1, 2**40])])
    assert_equal(run(backend, padded), whole, "with rows behind")
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert_equal(run(backend, case), whole, f"with {n} threads")
            for b in range(batch):
                one = [t[b : b + 1] for t in whole]
                assert_equal(
                    run(backend, take(case, [b])), one, f"of request {b} alone, {n} threads"
                )
    finally:
        torch.set_num_threads(threads)


def test_more_room_for_drafts_changes_nothing(backend):
    """max_drafts is capacity: with more of it the same tokens come, then -1."""
    case = random_case(12, 40, 3, seed=15)
    case["cu_rows"] = (torch.arange(13) * 4).int()
    g = torch.Generator().manual_seed(3)
    case["target_logits"] = torch.randn(48, 40, generator=g)
    case["input_ids"] = torch.randint(0, 40, (48,), generator=g)
    wanted = run(backend, case)
    wider = torch.full((13, 5, 40), NAN)
    wider[:, :3] = case["draft_logits"]
    out = run(backend, {**case, "max_drafts": 5, "draft_logits": wider})
    assert_same(out[0][:, :4], wanted[0])
    assert (out[0][:, 4:] == -1).all()
    assert_same(out[1], wanted[1])


def test_bonus_of_a_request_without_drafts_is_the_same_law_as_sample(backend):
    """Greedy: verify_chain with one row, and sample, agree token for token."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(20, 5000, generator=g).bfloat16()
    seeds, zeros = torch.arange(20), torch.zeros(20)
    case = {
        "target_logits": logits,
        "input_ids": torch.zeros(20, dtype=torch.int64),
        "cu_rows": torch.arange(21, dtype=torch.int32),
        "seeds": seeds,
        "positions": seeds,
        "max_drafts": 0,
        "vocab_size": 5000,
        "temperature": zeros,
    }
    on = backend.device
    sampled = backend.ops.sample(
        logits.to(on), seeds.to(on), seeds.to(on), vocab_size=5000, temperature=zeros.to(on)
    )
    assert_same(run(backend, case)[0][:, 0], sampled[0].cpu())


# --- Cases of other libraries -----------------------------------------------------------------------
def greedy_case(drafts, argmax, bonus, vocab=10):
    rows = [[*a, b] for a, b in zip(argmax, bonus, strict=True)]
    flat = torch.tensor([i for row in rows for i in row])
    return {
        "target_logits": torch.nn.functional.one_hot(flat, vocab).float() * 5,
        "input_ids": torch.tensor([i for d in drafts for i in [0, *d]], dtype=torch.int32),
        "cu_rows": torch.tensor([0] + [len(r) for r in rows]).cumsum(0).int(),
        "seeds": torch.zeros(len(rows), dtype=torch.int64),
        "positions": torch.zeros(len(rows), dtype=torch.int64),
        "max_drafts": max(len(d) for d in drafts),
        "vocab_size": vocab,
        "temperature": torch.zeros(len(rows)),
    }


@pytest.mark.parametrize(
    "case",
    json.loads((CASES / "chain_greedy_vllm.json").read_text())["cases"],
    ids=lambda c: c["name"],
)
def test_chain_greedy_vllm(backend, case):
    out = check(
        backend, greedy_case(case["draft_tokens"], case["target_argmax"], case["bonus_token"])
    )
    assert out[0].tolist() == case["expected"]


def test_chain_flashinfer(backend):
    cases = json.loads((CASES / "chain_flashinfer.json").read_text())["cases"]
    case = next(c for c in cases if c["name"] == "docstring")
    n = 20 if backend.emulated else 500
    arguments = (case["target_probs"][0], case["draft_tokens"][0], range(n), case["draft_probs"][0])
    tokens, accepted, status, *_ = check(backend, chains.repeated(*arguments))
    assert (tokens == torch.tensor(case["expected_tokens"][0])).all()
    assert (accepted == case["expected_emitted"][0]).all() and (status == 0).all()


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
def test_chain_flashinfer_one_hot_target(backend, drafts):
    """A target that is one-hot on the drafts accepts all of them and ends with its bonus id."""
    vocab, n = 111, 5 if backend.emulated else 50
    ids = [(7 * i + 3) % vocab for i in range(drafts + 1)]
    p = torch.nn.functional.one_hot(torch.tensor(ids), vocab).double().numpy()
    for q in (None, torch.full((drafts, vocab), 1.0 / vocab).numpy()):
        out = check(backend, chains.repeated(p, ids[:-1], range(n), q))
        assert (out[0] == torch.tensor(ids)).all() and (out[1] == drafts).all()


@pytest.mark.parametrize("vocab, batch", [(111, 1), (111, 99), (32000, 1), (111, 989), (128256, 3)])
def test_chain_flashinfer_shapes(backend, vocab, batch):
    if backend.emulated:
        batch = min(batch, 3)
    for drafts in (1, 3, 5, 7) if vocab == 111 else (3,):
        case = random_case(batch, vocab, drafts, seed=drafts)
        tokens, accepted, *_ = check(backend, case)
        active = case["cu_rows"].diff() > 0
        assert ((tokens >= 0).sum(1) == torch.where(active, accepted + 1, 0)).all()


def test_chain_statistical_vllm_fly_case(backend):
    """Rows of several lengths in one call, deterministic by one-hot targets."""
    fly = json.loads((CASES / "chain_statistical_vllm.json").read_text())["fly_case"]
    drafts, vocab = fly["draft_tokens"], fly["vocab"]
    rows = fly["num_rows"]
    # Request 0 accepts everything, the others reject (or do not have) their first draft.
    argmax = [[*drafts, 8]] + [[9] * n for n in rows[1:]]
    ids = [[0, *drafts[: n - 1]] for n in rows]
    ids[5][1] = -1
    case = greedy_case(
        [i[1:] for i in ids], [a[:-1] for a in argmax], [a[-1] for a in argmax], vocab
    )
    case["target_logits"] = torch.where(case["target_logits"] > 0, 0.0, -INF)
    for temperature in (torch.zeros(len(rows)), torch.ones(len(rows))):
        case["temperature"] = temperature
        tokens, accepted, status, *_ = check(backend, case)
        assert (accepted + 1).tolist() == fly["expected_num_sampled"]
        assert tokens[0].tolist() == fly["expected_row0"]
        assert (status == 0).all()


# --- Errors, fakes ----------------------------------------------------------------------------------
def test_errors_name_op_argument_wanted_got(backend):
    case = random_case(3, 20, 2, seed=16)
    rows = case["target_logits"].shape[0]
    bad = [
        (
            "method",
            "greedy",
            r'verify_chain: method: wanted "token", .* or "typical", got "greedy"',
        ),
        ("target_logits", case["target_logits"][0], r"target_logits: wanted shape \[R, >= vocab"),
        (
            "target_logits",
            case["target_logits"].double(),
            r"target_logits: wanted dtype float32 or",
        ),
        ("vocab_size", 21, r"target_logits: wanted at least 21 \(vocab_size\)"),
        ("vocab_size", 0, r"vocab_size: wanted a number from 1 .* got 0"),
        (
            "input_ids",
            case["input_ids"][1:],
            rf"input_ids: wanted size {rows} \(R of target_logits\)",
        ),
        ("input_ids", case["input_ids"].float(), r"input_ids: wanted dtype int32 or int64"),
        ("cu_rows", case["cu_rows"].long(), r"cu_rows: wanted dtype int32, got int64"),
        ("cu_rows", case["cu_rows"][:0], r"cu_rows: wanted at least 1"),
        ("seeds", case["seeds"].int(), r"seeds: wanted dtype int64, got int32"),
        ("seeds", case["seeds"][:2], r"seeds: wanted size 3 \(B of cu_rows\)"),
        ("positions", case["positions"].float(), r"positions: wanted dtype int32 or int64"),
        ("max_drafts", -1, r"max_drafts: wanted a number from 0 to .*, got -1"),
        ("max_drafts", 3, r"draft_logits: wanted size 3 \(max_drafts\)"),
        ("draft_logits", case["draft_logits"][..., :19], r"draft_logits: wanted at least 20"),
        (
            "draft_logits",
            case["draft_logits"][:, :1],
            r"draft_logits: wanted size 2 \(max_drafts\)",
        ),
        (
            "draft_logits",
            case["draft_logits"].mT,
            r"draft_logits: wanted at least 20 .*dimension 2",
        ),
        ("draft_rows", case["draft_rows"].long(), r"draft_rows: wanted dtype int32"),
        ("draft_rows", case["draft_rows"][:1], r"draft_rows: wanted size 3"),
        ("draft_temperature", case["draft_temperature"].half(), r"draft_temperature: wanted dtype"),
        (
            "draft_is_one_hot",
            case["draft_is_one_hot"].int(),
            r"draft_is_one_hot: wanted dtype bool",
        ),
        ("temperature", case["temperature"][:1], r"temperature: wanted size 3 \(B of cu_rows\)"),
    ]
    for name, value, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, {**case, name: value})
    few = {**case, "draft_rows": None, "draft_logits": case["draft_logits"][:2]}
    with pytest.raises(
        RuntimeError, match=r"draft_logits: wanted at least 3 .*draft_rows is absent"
    ):
        run(backend, few)


def test_opcheck_and_compile():
    op = torch.ops.specdec.verify_chain.default
    for ids in (torch.int64, torch.int32):
        case = random_case(4, 50, 3, seed=17)
        case["input_ids"] = case["input_ids"].clamp(-1, 49).to(ids)
        positional = [case.pop(name) for name in chains.POSITIONAL]
        torch.library.opcheck(op, positional, case)
    torch.library.opcheck(op, positional, {"vocab_size": 50})

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(target, ids, cu_rows, seeds, positions, draft):
        tokens, accepted, *_ = torch.ops.specdec.verify_chain(
            target * 1.0,
            ids,
            cu_rows,
            seeds,
            positions,
            draft.shape[1],
            vocab_size=50,
            draft_logits=draft,
        )
        return tokens + 1, accepted

    for batch in (4, 3):
        case = random_case(batch, 50, 3, seed=18)
        arguments = [case[name] for name in chains.POSITIONAL[:-1]] + [case["draft_logits"]]
        wanted = op(*arguments[:-1], 3, vocab_size=50, draft_logits=arguments[-1])
        tokens, accepted = step(*arguments)
        assert_same(tokens, wanted[0] + 1)
        assert_same(accepted, wanted[1])

    class Module(torch.nn.Module):
        def forward(self, target, ids, cu_rows, seeds, positions, draft):
            return torch.ops.specdec.verify_chain(
                target, ids, cu_rows, seeds, positions, 3, vocab_size=50, draft_logits=draft
            )[:2]

    tokens, accepted = torch.export.export(Module(), tuple(arguments)).module()(*arguments)
    assert_same(tokens, wanted[0])
    assert_same(accepted, wanted[1])
