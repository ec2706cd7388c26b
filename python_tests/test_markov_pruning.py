"""markov_draft with a table of w2: the tokens and confidences of the call without one, bit for bit."""

import os

import backends
import pruned_drafts
import pytest
import torch
from compare import BOUND_SLACK, assert_formula, assert_same
from oracles import markov_draft as oracle
from pruned_drafts import POSITIONAL, pruned, random_case, run

import specdec_ext
from specdec_ext.prune import _turned

HEADS = ["vanilla", "gated", "rnn"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def assert_equal(mine, theirs, what=""):
    for name, one, other in zip(("tokens", "confidence"), mine, theirs, strict=True):
        assert_same(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0), f"{name} {what}")


# --- Dense and pruned -------------------------------------------------------------------------------
COUNTS = {"cpu": 300, "emu": 150, "cuda": 300}
FUZZED = int(os.environ.get("SPECDEC_FUZZ_DRAFTS", "0"))  # `make fuzz`


def test_same_tokens_with_a_table(backend):
    """Over heads, types, ranks, odd vocabularies and maps; ties, rows that differ by less than a step of their codes,
    flat rows that prune nothing, NaN and infinities anywhere, requests that sample."""
    plain = backends.get("cpu") if backend.emulated else backend
    for seed in range(FUZZED or COUNTS.get(backend.name, 24)):
        case = random_case(seed, big=backend.name in COUNTS)
        assert_equal(pruned(backend, case), run(plain, case), f"case {seed}")


def test_ended_requests_beside_others(backend):
    """Blocks look at all requests at once; those without an anchor have no codes."""
    case = oracle.random_case(seeded(4), 4, 3, vocab=600, rank=32, confidence=False)
    case["temperature"][:] = 0.0
    case["anchor_ids"][[0, 2]] = -1
    assert_equal(pruned(backend, case), run(backend, case))


@pytest.mark.parametrize("count", [0, 1, 100])
def test_same_tokens_where_the_largest_lie_close(backend, count):
    """Candidates within a rounding of each other in all chunks: those that bounds leave are many, or all."""
    for seed in range(10 if backend.name in COUNTS else 2):
        g = seeded(seed)
        case = oracle.random_case(
            g, 2, 2, vocab=1300, rank=64, confidence=False, weights=torch.bfloat16
        )
        case["temperature"][:] = 0.0
        near = torch.randint(0, 1300, (count,), generator=g)
        case["base_logits"][:, :, near] = 40.0 + torch.rand(count, generator=g) * 1e-3
        assert_equal(pruned(backend, case), run(backend, case), f"case {seed}")


def exact_row(codes, scale, rest):
    """The float32 row whose turned form is codes * scale + rest, but for rounding."""
    width = codes.shape[-1]
    turn = specdec_ext.prepare_markov(torch.zeros(1, width)).turn
    matrix = _turned(torch.eye(width), turn).T  # turned = matrix @ row
    return ((codes * scale + rest) @ matrix).float()


@pytest.mark.parametrize("lost_by", ["row", "vector"])
def test_bounds_hold_where_rounding_loses_most(backend, lost_by):
    """Two columns whose codes say the one and whose products say the other: what rounding lost of the rows (or of the
    vector) lies along the other factor, as far as 0.45 steps in every place let it."""
    wrong = 0
    for seed in range(40 if backend.name in COUNTS else 6):
        g, width = seeded(seed), 64
        q = torch.randint(-100, 101, (width,), generator=g).double()
        p = torch.randint(-100, 101, (width,), generator=g).double()
        q[0], p[1] = 127.0, 127.0
        scale = 2.0**-7
        zero = torch.zeros(width).double()
        if lost_by == "row":
            rest = 0.45 * scale * p.sign()
            rest[0] = 0.0
            rows, vector = [(q, -rest), (q, rest)], (p, zero)
        else:
            rest = 0.45 * scale * q.sign()
            rest[1] = 0.0
            rows, vector = [(-q, zero), (q, zero)], (p, rest)
        y = exact_row(vector[0], scale, vector[1])
        w2 = torch.stack([exact_row(codes, scale, left) for codes, left in rows])
        # The codes alone see `coded`; U puts the wrong column ahead by 0.9 of what they do not see.
        coded = [float(codes @ vector[0]) * scale**2 for codes, _ in rows]
        truth = (w2.double() @ y.double()).tolist()
        unseen = (truth[1] - coded[1]) - (truth[0] - coded[0])
        base = torch.tensor([coded[1] - coded[0] + 0.9 * unseen, 0.0])
        # Far apart, among columns that cannot win: most tiles must go, or all of them are computed.
        vocab = 200
        ends, apart = [0, vocab - 1], torch.full((1, 1, vocab), -1e30)
        apart[0, 0, ends] = base.float()
        far = torch.zeros(vocab, width)
        far[ends] = w2
        case = {
            "base_logits": apart,
            "anchor_ids": torch.zeros(1, dtype=torch.int64),
            "w1": y.repeat(vocab, 1),
            "w2": far,
            "seeds": torch.zeros(1, dtype=torch.int64),
            "positions": torch.zeros(1, dtype=torch.int64),
            "vocab_size": vocab,
            "temperature": torch.zeros(1),
        }
        dense = run(backend, case)
        assert dense[0].tolist() == [[vocab - 1]]
        wrong += coded[0] + float(base[0]) > coded[1]
        assert_equal(pruned(backend, case), dense, f"case {seed}")
    assert wrong  # by their codes alone, the first one would have won


def test_alone_in_any_batch(backend):
    case = oracle.random_case(seeded(3), batch=11, vocab=1100, rank=40, weights=torch.bfloat16)
    case["temperature"][:] = 0.0
    case["prepared"] = specdec_ext.prepare_markov(case["w2"])
    together = run(backend, case)
    names = ["base_logits", "anchor_ids", "seeds", "positions", "temperature", "hidden"]
    for b in (0, 5, 10):
        alone = run(backend, case | {name: case[name][b : b + 1] for name in names})
        assert_equal([t[0] for t in alone], [t[b] for t in together])
    warm = case["temperature"].clone()
    warm[3] = 1.0  # the whole step is dense then
    for mine, theirs in zip(run(backend, case | {"temperature": warm}), together, strict=True):
        keep = [b for b in range(11) if b != 3]
        assert_same(mine[keep], theirs[keep])


def test_a_table_of_more_rows_or_of_rows_elsewhere(backend):
    """w2 may have more rows than there are columns, at any distance; codes need not be aligned."""
    case = oracle.random_case(seeded(4), batch=2, vocab=530, rank=36)
    case["temperature"][:] = 0.0
    wanted = run(backend, case)
    wide = torch.full((600, 41), float("nan"))
    wide[:530, 2:38] = case["w2"]
    case["w2"] = wide.to(backend.device)[:, 2:38]
    assert_equal(pruned(backend, case), wanted)
    table = specdec_ext.prepare_markov(case["w2"])
    moved = torch.empty(table.codes.numel() + 1, dtype=torch.int8)[1:].view(table.codes.shape)
    moved.copy_(table.codes)
    assert_equal(run(backend, case | {"prepared": (moved, *table[1:])}), wanted)


def test_numbers_are_there_only_if_asked_for(backend):
    """Without log-probabilities the tokens stay, of requests that sample too; with them a table changes nothing."""
    case = oracle.random_case(seeded(5), batch=5, vocab=700, return_logits=True)
    wanted = backend.call("markov_draft", POSITIONAL, case)
    assert_equal(run(backend, case), (wanted[0], wanted[3]))
    table = [t.to(backend.device) for t in specdec_ext.prepare_markov(case["w2"])]
    for mine, theirs in zip(
        backend.call("markov_draft", POSITIONAL, case | {"prepared": table}), wanted, strict=True
    ):
        assert_same(mine, theirs)
    some = backend.call(
        "markov_draft", POSITIONAL, case | {"prepared": table, "return_logprobs": False}
    )
    assert_same(some[0], wanted[0])
    assert_same(some[4], wanted[4])
    assert some[1].shape == some[2].shape == (0,)


# --- The table --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [1, 4, 30, 96, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_table_bounds_every_product(rank, dtype):
    g = seeded(rank)
    w2 = (torch.randn(75, rank, generator=g) * torch.rand(75, 1, generator=g) ** 8 * 10).to(dtype)
    w2[3] = 0.0
    codes, rows, turn = specdec_ext.prepare_markov(w2)
    width = (rank + 3) // 4 * 4
    assert codes.shape == (5, width // 4, 16, 4) and rows.shape == (5, 3, 16)
    assert turn.shape == (width,) and codes.min() >= -127
    codes = codes.transpose(1, 2).reshape(80, width)[:75].double()
    scale, lost, left = rows.transpose(1, 2).reshape(80, 3)[:75].double().unbind(1)
    assert (rows.transpose(1, 2).reshape(80, 3)[75:] == 0).all()
    turned = _turned(w2, turn)
    # Orthogonal, and the norms are those of the rows.
    sizes = w2.double().norm(dim=1)
    assert_formula(turned.norm(dim=1), sizes)
    y = torch.randn(50, rank, generator=g)
    largest = sizes.max() * y.norm(dim=1).max()
    products = turned @ _turned(y, turn).T
    assert_formula(products / largest, w2.double() @ y.double().T / largest)
    kept = codes * scale[:, None]
    assert ((turned - kept).norm(dim=1) <= lost).all() and (kept.norm(dim=1) <= left).all()
    # And no more than float32 sums need.
    assert (lost <= (turned - kept).norm(dim=1) + BOUND_SLACK * (1.0 + left)).all()


def test_rows_that_are_not_numbers_are_never_left_out():
    w2 = torch.ones(20, 8)
    w2[2, 3], w2[5, 1], w2[7] = float("nan"), float("inf"), 1e20
    codes, rows, _ = specdec_ext.prepare_markov(w2)
    lost = rows.transpose(1, 2).reshape(32, 3)[:, 1]
    assert torch.isinf(lost).nonzero()[:, 0].tolist() == [2, 5, 7]
    assert torch.isfinite(rows[:, ::2]).all()


def test_a_table_does_not_depend_on_where_rows_lie():
    w2 = torch.randn(100, 33, generator=seeded(6))
    wide = torch.zeros(100, 50)
    wide[:, 4:37] = w2
    for mine, theirs in zip(
        specdec_ext.prepare_markov(wide[:, 4:37]), specdec_ext.prepare_markov(w2), strict=True
    ):
        assert_same(mine, theirs)
    for mine, theirs in zip(
        specdec_ext.prepare_markov(w2[:48]), specdec_ext.prepare_markov(w2), strict=True
    ):
        assert_same(mine, theirs[: len(mine)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_table_does_not_depend_on_defaults(dtype):
    """Engines load weights under a default dtype and device of their own."""
    w2 = torch.randn(40, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    wanted = specdec_ext.prepare_markov(w2)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            made = specdec_ext.prepare_markov(w2)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(made, wanted, strict=True):
        assert_same(a, b)
    parameter = torch.nn.Parameter(w2)
    for a, b in zip(specdec_ext.prepare_markov(parameter), wanted, strict=True):
        assert not a.requires_grad
        assert_same(a, b)


@pytest.mark.parametrize("columns, rank", [(0, 8), (5, 0), (0, 0)])
def test_tables_of_nothing(columns, rank):
    codes, rows, turn = specdec_ext.prepare_markov(torch.zeros(columns, rank))
    assert codes.shape == ((columns + 15) // 16, (rank + 3) // 4, 16, 4)
    assert len(rows) == len(codes) and len(turn) == (rank + 3) // 4 * 4


# --- Arguments --------------------------------------------------------------------------------------
def test_errors_name_op_argument_wanted_got(backend):
    case = oracle.random_case(seeded(7))
    codes, rows, turn = specdec_ext.prepare_markov(case["w2"])
    bad = [
        ((codes, rows), r"markov_draft: prepared: wanted \(codes, rows, turn\) of prepare_markov, got 2"),
        ((codes[1:], rows, turn), r"prepared\[0\] \(codes\): wanted size 4 \(rows of w2 / 16\)"),
        ((codes[:, 1:], rows, turn), r"prepared\[0\] \(codes\): wanted size 2 \(r of w2 / 4\)"),
        ((codes.int(), rows, turn), r"prepared\[0\] \(codes\): wanted dtype int8, got int32"),
        ((codes, rows[1:], turn), r"prepared\[1\] \(rows\): wanted size 4 \(rows of w2 / 16\)"),
        ((codes, rows.double(), turn), r"prepared\[1\] \(rows\): wanted dtype float32, got float64"),
        ((codes, rows[:, :2], turn), r"prepared\[1\] \(rows\): wanted size 3"),
        ((codes, rows, turn[1:]), r"prepared\[2\] \(turn\): wanted size 8 \(r of w2"),
        ((codes.transpose(0, 1).contiguous().transpose(0, 1), rows, turn), r"prepared\[0\] \(codes\): wanted"),
    ]  # fmt: skip
    for prepared, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | {"prepared": prepared})
    for w2, message in (
        (torch.zeros(3), r"prepare_markov: w2: wanted shape"),
        (torch.zeros(3, 1025), r"r <= 1024, got \[3, 1025\]"),
        (torch.zeros(3, 4).double(), r"wanted dtype .*got float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            specdec_ext.prepare_markov(w2)


@pytest.mark.parametrize("head", HEADS)
def test_opcheck_and_compile(head):
    case = oracle.random_case(seeded(8), head=head, return_logits=False)
    case["temperature"][:] = 0.0
    tensors = [case.pop(name) for name in POSITIONAL]
    table = specdec_ext.prepare_markov(tensors[3])
    options = case | {"prepared": list(table), "return_logprobs": False}
    torch.library.opcheck(torch.ops.specdec.markov_draft.default, tensors, options)
    wanted = specdec_ext.markov_draft(*tensors, **case, return_logprobs=False)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(tensors, table, case):
        return specdec_ext.markov_draft(*tensors, **case, prepared=table, return_logprobs=False)

    for mine, theirs in zip(step(tensors, table, case), wanted, strict=True):
        assert_same(mine, theirs)
    with pytest.raises(RuntimeError, match="prepared: wanted the device of base_logits, got cpu"):
        meta = [t.to("meta") for t in tensors]
        on_meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in case.items()}
        torch.ops.specdec.markov_draft(*meta, **on_meta, prepared=list(table))


def test_kinds_of_cases_are_all_drawn():
    assert len(set(pruned_drafts.KINDS)) > 10
