"""expand_tree: candidates, scores and winners against the oracle, and their bits, on every backend."""

import math

import backends
import pytest
import torch
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import results_by_isa
from oracles import expand_tree as oracle
from tree_cases import soil

POSITIONAL = ["logits", "parent_scores", "topk"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = math.nan, math.inf


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def run(backend, case):
    batch, nodes, topk = *case["logits"].shape[:2], case["topk"]
    soil(batch * topk, 2 * batch * topk, batch * nodes * topk, 2 * batch * nodes * topk)
    return backend.call("expand_tree", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle: tokens exact, scores close, winners exact for the op's own scores."""
    out = run(backend, case)
    tokens, slot, scores, candidate_tokens, candidate_scores, index = out
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    wanted, wanted_scores = oracle.candidates(*[case[n] for n in POSITIONAL], **options)
    assert_same(candidate_tokens, wanted, "candidate_tokens")
    finite = case["logits"].float()[torch.isfinite(case["logits"])]
    parents = case["parent_scores"][torch.isfinite(case["parent_scores"])]
    magnitude = 4.0 + sum(float(t.abs().max()) if t.numel() else 0.0 for t in (finite, parents))
    assert_close(candidate_scores, wanted_scores, what="candidate_scores", magnitude=magnitude)
    again = oracle.winners(candidate_tokens, candidate_scores, case["topk"])
    for name, mine, theirs in zip(
        ("tokens", "parent_slot", "scores", "candidate_index"), (tokens, slot, scores, index), again,
        strict=True,
    ):  # fmt: skip
        assert_same(mine, theirs, name)
    return out


# --- Against the oracle -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "vocab, topk", [(1, 1), (7, 3), (50, 10), (255, 32), (2049, 8), (4500, 17)]
)
def test_matches_oracle(backend, dtype, vocab, topk):
    """4500 is not whole vectors, and its rows are not aligned."""
    g = seeded(vocab)
    check(backend, oracle.random_case(g, 2, 3, topk, vocab, dtype))
    check(backend, oracle.random_case(g, 1, 1, topk, vocab, dtype, scale=0.1))


@pytest.mark.parametrize(
    "batch, nodes, topk", [(1, 1, 32), (3, 9, 1), (1, 40, 10), (17, 2, 5), (2, 17, 32)]
)
def test_frontiers(backend, batch, nodes, topk):
    check(backend, oracle.random_case(seeded(nodes), batch, nodes, topk, 70))


@pytest.mark.parametrize("batch, nodes", [(0, 3), (0, 0), (3, 0)])
def test_empty(backend, batch, nodes):
    out = check(backend, oracle.random_case(seeded(1), batch, nodes, 4))
    if batch:
        assert (out[0] == -1).all() and (out[1] == -1).all() and (out[2] == -INF).all()
        assert (out[5] == -1).all()


def test_rows_of_several_parts(backend):
    """Rows longer than what one block of CUDA reads; the first tokens lie on both sides."""
    case = oracle.random_case(seeded(2), 1, 2, 6, 34000, torch.bfloat16)
    case["logits"][0, 0, [3, 16383, 16384, 33999]] = 40.0
    out = check(backend, case)
    assert out[3][0, :4].tolist() == [3, 16383, 16384, 33999]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eagle_sizes(backend, dtype):
    """Ten nodes at EAGLE-3's reduced vocabulary of 32000."""
    if backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("long rows are in test_rows_of_several_parts")
    check(backend, oracle.random_case(seeded(3), 1, 10, 10, 32000, dtype, scale=2.0))


# --- Ties -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab", [40, 600, 5000])
def test_equal_logits_go_by_column(backend, vocab):
    """A flat row: its first columns. More ties than any list holds."""
    case = oracle.random_case(seeded(4), 1, 2, 8, vocab) | {"logits": torch.zeros(1, 2, vocab)}
    case["logits"][0, 1, : vocab // 2] = -0.0  # the same number as 0
    case["parent_scores"] = torch.zeros(1, 2)
    out = check(backend, case)
    assert out[3].tolist() == [[*range(8), *range(8)]]
    assert out[5].tolist() == [list(range(8))]  # equal scores: the first places


def test_ties_at_the_bound(backend):
    """More columns of one value than are wanted, behind some larger ones, spread over tiles."""
    g = seeded(5)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((2, 1, 4500), -1.0)
        for b in range(2):
            logits[b, 0, torch.randperm(4500, generator=g)[:1200]] = 2.0
            logits[b, 0, torch.randperm(4500, generator=g)[:3]] = 5.0
        case = oracle.random_case(g, 2, 1, 20, 4500)
        check(backend, case | {"logits": logits.to(dtype)})


def test_one_thread_holds_the_top(backend):
    """Neighbouring columns and columns 256 apart: what a thread of CUDA holds."""
    for places in (torch.arange(64), torch.arange(7) * 256 + 3, 5 + torch.arange(40)):
        case = oracle.random_case(seeded(6), 1, 1, 32, 2100)
        case["logits"][0, 0, places] = 20.0 + torch.arange(len(places)) % 5
        check(backend, case)


def test_equal_scores_go_by_place(backend):
    case = oracle.random_case(seeded(7), 2, 3, 5, 60)
    case["logits"][:] = case["logits"][:1, :1]  # every row the same
    case["parent_scores"][:] = -1.0
    out = check(backend, case)
    assert out[5][0].tolist() == [0, 5, 10, 1, 6]


# --- Bad data ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bad_rows_are_dead(backend, value, dtype):
    case = oracle.random_case(seeded(8), 2, 3, 4, 300, dtype)
    case["logits"][0, 1, 299] = value
    out = check(backend, case)
    assert (out[3][0, 4:8] == -1).all() and (out[4][0, 4:8] == -INF).all()
    assert not (out[1][0] == 1).any()
    case["logits"][0, :, 7] = value
    out = check(backend, case)  # a request without any candidate: the first places, dead
    assert out[0][0].tolist() == [-1] * 4 and out[5][0].tolist() == [0, 1, 2, 3]
    assert (out[0][1] >= 0).all()


def test_dead_parents(backend):
    """-inf and NaN; their rows are not looked at, so that they may hold anything."""
    case = oracle.random_case(seeded(9), 1, 4, 6, 80)
    case["parent_scores"][0] = torch.tensor([-INF, -1.0, NAN, -NAN])
    case["logits"][0, [0, 2, 3]] = NAN
    out = check(backend, case)
    assert (out[1] == 1).all()
    case["parent_scores"][0, 1] = -INF
    assert (check(backend, case)[0] == -1).all()


def test_extreme_numbers(backend):
    """Finite everywhere: gaps beyond float32, and scores that leave it."""
    case = oracle.random_case(seeded(10), 1, 3, 4, 20)
    case["logits"][0, 0] = -3e38
    case["logits"][0, 0, 5] = 3e38
    case["logits"][0, 1, 3:] = -INF
    out = run(backend, case)
    assert out[3][0, 0] == 5 and out[4][0, 0] == case["parent_scores"][0, 0]
    assert (out[3][0, 1:4] == -1).all()  # log-probabilities below float32
    assert (out[3][0, 4:7] >= 0).all() and out[3][0, 7] == -1  # three ids of probability above 0
    case["parent_scores"][0] = torch.tensor([INF, -3.4e38, 0.0])
    out = run(backend, case)
    assert out[4][0, 0] == INF and not torch.isnan(out[4]).any()


def test_more_than_there_are(backend):
    """topk beyond the vocabulary, and beyond the ids of finite logit."""
    case = oracle.random_case(seeded(11), 2, 2, 9, 5)
    case["logits"][0, 0, 1:] = -INF
    out = check(backend, case)
    assert out[3][0, :9].tolist() == [0] + [-1] * 8 and out[4][0, 0] == case["parent_scores"][0, 0]
    assert out[0][0].tolist()[6:] == [-1] * 3


# --- Reduced vocabularies -----------------------------------------------------------------------------
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("columns", [30, 2500])
def test_d2t(backend, offset, columns):
    g = seeded(12)
    case = oracle.random_case(g, 2, 3, 7, columns)
    case |= {
        "vocab_size": 3 * columns,
        "d2t": oracle.random_d2t(g, columns, 3 * columns, offset),
        "d2t_is_offset": offset,
    }
    out = check(backend, case)
    assert out[0].max() >= columns
    wide = torch.cat([case["logits"], torch.full((2, 3, 5), NAN)], 2)
    for mine, theirs in zip(run(backend, case | {"logits": wide}), out, strict=True):
        assert_same(mine, theirs)  # columns behind the map are not there


@pytest.mark.parametrize("columns", [40, 3000])
def test_columns_without_a_target_id_never_come_out(backend, columns):
    g = seeded(13)
    case = oracle.random_case(g, 1, 2, 6, columns) | {"vocab_size": columns}
    d2t = oracle.random_d2t(g, columns, columns, offset=False)
    best = case["logits"][0, 0].argsort(descending=True)
    d2t[best[:4]] = torch.tensor([-1, columns, -(2**63), 2**63 - 1])
    out = check(backend, case | {"d2t": d2t, "d2t_is_offset": False})
    assert out[3][0, 0] == d2t[best[4]]
    none = torch.full((columns,), columns)
    assert (check(backend, case | {"d2t": none})[0] == -1).all()
    almost = none.clone()
    almost[3:5] = -3
    assert check(backend, case | {"d2t": almost})[3][0].sort().values.tolist()[-4:] == [0, 0, 1, 1]


def test_vocab_below_the_width(backend):
    case = oracle.random_case(seeded(14), 2, 2, 5, 90) | {"vocab_size": 61}
    wanted = check(backend, case)
    case["logits"][:, :, 61:] = NAN
    for mine, theirs in zip(run(backend, case), wanted, strict=True):
        assert_same(mine, theirs)


# --- Bits -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(backend, dtype):
    """Every backend and instruction set, aligned rows and others: one result, bit for bit."""
    cpu = backends.get("cpu")
    for vocab in (1, 33, 300, 2048, 5001):
        case = oracle.random_case(seeded(vocab), 2, 3, 6, vocab, dtype)
        odd = torch.zeros(2, 3, vocab + 3, dtype=dtype)[:, :, 1 : 1 + vocab]
        odd.copy_(case["logits"])
        wanted = run(cpu, case)
        for logits in (case["logits"], odd):
            for mine, theirs in zip(run(backend, case | {"logits": logits}), wanted, strict=True):
                assert_same(mine, theirs)


def test_batch_threads_and_strides_change_nothing(backend):
    case = oracle.random_case(seeded(15), 5, 4, 6, 3000, torch.bfloat16)
    wanted = run(backend, case)
    order = [3, 1, 4]
    taken = case | {k: case[k][order] for k in ("logits", "parent_scores")}
    for mine, theirs in zip(run(backend, taken), wanted, strict=True):
        assert_same(mine, theirs[order])
    alone = case | {k: case[k][2:3, 1:2] for k in ("logits", "parent_scores")}
    assert_same(run(backend, alone)[4], wanted[4][2:3, 6:12])
    spread = torch.zeros(5, 4, 3, 3000, dtype=torch.bfloat16)
    spread[:, :, 1] = case["logits"]
    scores = torch.zeros(4, 5, 2)
    scores[:, :, 1] = case["parent_scores"].t()
    strided = case | {"logits": spread[:, :, 1], "parent_scores": scores[:, :, 1].t()}
    for mine, theirs in zip(run(backend, strided), wanted, strict=True):
        assert_same(mine, theirs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for mine, theirs in zip(run(backend, case), wanted, strict=True):
            assert_same(mine, theirs)
    finally:
        torch.set_num_threads(threads)


def test_cpu_instruction_sets_agree():
    saved = results_by_isa("isa_expand_tree")
    for isa, results in saved.items():
        for name, tensor in results.items():
            assert_same(tensor, saved["baseline"][name], f"{isa}: {name}")


# --- Arguments ----------------------------------------------------------------------------------------
def test_arguments_are_not_written(backend):
    case = oracle.random_case(seeded(16))
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


def test_errors_name_op_argument_wanted_got(backend):
    case = oracle.random_case(seeded(17), 2, 3, 4, 50)
    bad = [
        ({"logits": case["logits"].double()}, r"expand_tree: logits: wanted dtype float32 or float16 or bfloat16, got float64"),
        ({"logits": case["logits"][0]}, r"logits: wanted shape \[B, F, V'\], got \[3, 50\]"),
        ({"logits": torch.zeros(2, 3, 100)[:, :, ::2]}, r"logits: wanted stride 1 in the last"),
        ({"vocab_size": 51}, r"logits: wanted at least 51 \(vocab_size\)"),
        ({"vocab_size": 0}, r"vocab_size: wanted a number from 1 to 2\^31 - 1, got 0"),
        ({"topk": 0}, r"topk: wanted a number from 1 to 32, got 0"),
        ({"topk": 33}, r"topk: wanted a number from 1 to 32, got 33"),
        ({"parent_scores": torch.zeros(2, 3).double()}, r"parent_scores: wanted dtype float32"),
        ({"parent_scores": torch.zeros(2, 4)}, r"parent_scores: wanted size 3 \(F of logits\)"),
        ({"parent_scores": torch.zeros(3, 3)}, r"parent_scores: wanted size 2 \(B of logits\)"),
        ({"parent_scores": torch.zeros(6)}, r"parent_scores: wanted shape \[B, F\]"),
        ({"d2t": torch.zeros(51, dtype=torch.int64)}, r"logits: wanted at least 51 \(length of d2t\)"),
        ({"d2t": torch.zeros(50, dtype=torch.int32)}, r"d2t: wanted dtype int64, got int32"),
        ({"d2t": torch.zeros(100, dtype=torch.int64)[::2]}, r"d2t: wanted a contiguous tensor"),
    ]  # fmt: skip
    for change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | change)


def test_opcheck_and_compile():
    case = oracle.random_case(seeded(18), 2, 3, 4, 50)
    tensors = [case["logits"], case["parent_scores"], 4]
    options = {"vocab_size": 50, "d2t": torch.zeros(50, dtype=torch.int64)}
    torch.library.opcheck(torch.ops.specdec.expand_tree.default, tensors, options)
    wanted = torch.ops.specdec.expand_tree(*tensors, **options)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(logits, scores, topk, **options):
            return torch.ops.specdec.expand_tree(logits, scores, topk, **options)

        for mine, theirs in zip(step(*tensors, **options), wanted, strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
ODD = [NAN, INF, -INF, -INF, 0.0, -0.0, 1e-40, 3e38, -3e38]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    """Ids and places of anything: never a crash, never an id outside, the oracle's tokens where it has them."""
    backend = backends.get(backend_name)
    number = st.one_of(
        st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from(ODD), st.floats(-9, 9, width=32)
    )
    batch, nodes, vocab = (data.draw(st.integers(0, n)) for n in (3, 3, 12))
    vocab += 1

    def numbers(*shape):
        count = math.prod(shape)
        return torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count))).view(shape)

    case = {
        "logits": numbers(batch, nodes, vocab).to(data.draw(st.sampled_from(DTYPES))),
        "parent_scores": numbers(batch, nodes).float(),
        "topk": data.draw(st.integers(1, 32)),
        "vocab_size": vocab,
    }
    if data.draw(st.booleans()):
        entry = st.one_of(st.integers(-3, 15), st.sampled_from([2**63 - 1, -(2**63)]))
        case["d2t"] = torch.tensor(data.draw(st.lists(entry, min_size=vocab, max_size=vocab)))
        case["d2t_is_offset"] = data.draw(st.booleans())
    out = run(backend, case)
    assert (out[0] < vocab).all() and ((out[0] >= 0) == (out[2] > -INF)).all()
    assert not torch.isnan(out[4]).any() and ((out[3] >= 0) == (out[4] > -INF)).all()
    wanted = run(backends.get("cpu"), case)
    for name, mine, theirs in zip(oracle.NAMES, out, wanted, strict=True):
        assert_same(mine, theirs, name)
    large = case["logits"].float().abs().nan_to_num(0, 0, 0) > 1e30
    if not large.any() and not (case["parent_scores"].abs() > 1e30).any():
        check(backend, case)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
