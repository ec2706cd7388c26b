"""schedule_prefix: plans against the oracle, Algorithm 1 against every plan there is, on every backend."""

import functools
import itertools
import json
import math
import pathlib

import backends
import pytest
import torch
from compare import assert_formula, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import schedule_prefix as oracle
from tree_cases import soil

POSITIONAL = ["confidence", "steps_per_second"]
CASES = pathlib.Path(__file__).parent / "cases"


def run(backend, case):
    batch = case["confidence"].shape[0]
    soil(batch, batch + 1)
    return backend.call("schedule_prefix", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle; returns the op's results."""
    out = run(backend, case)
    for name, mine, wanted in zip(oracle.NAMES, out, oracle.schedule_prefix(**case), strict=True):
        assert_same(mine, wanted, name)
    return out


def case_of(confidence, table=(1.0,), **options):
    options = {
        k: torch.tensor([v], dtype=torch.int32) if k == "budget" else v for k, v in options.items()
    }
    return {
        "confidence": torch.tensor(confidence, dtype=torch.float32),
        "steps_per_second": torch.tensor(table, dtype=torch.float32),
    } | options


def confidences(survival):
    """Confidences with these survivals."""
    out = []
    for line in survival:
        before = [1.0, *line[:-1]]
        out.append([s / b if b > 0 else 0.0 for s, b in zip(line, before, strict=True)])
    return out


# --- Plans ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [False, True], ids=["early stop", "budget"])
@pytest.mark.parametrize(
    "batch, drafts", [(1, 1), (1, 7), (4, 3), (5, 7), (13, 16), (64, 15), (3, 90)]
)
def test_matches_oracle(backend, batch, drafts, budget):
    g = torch.Generator().manual_seed(batch * 100 + drafts)
    for _ in range(6):
        check(backend, oracle.random_case(g, batch, drafts, budget))


@pytest.mark.parametrize("batch, drafts", [(4096, 1), (1, 4096), (256, 15), (64, 64), (585, 7)])
@pytest.mark.parametrize("budget", [False, True], ids=["early stop", "budget"])
def test_largest_sizes(backend, batch, drafts, budget):
    g = torch.Generator().manual_seed(batch)
    case = oracle.random_case(g, batch, drafts, budget)
    check(backend, case)
    if budget:
        check(backend, case | {"budget": torch.tensor([2**31 - 1], dtype=torch.int32)})
    else:
        check(backend, case | {"steps_per_second": torch.ones(1)})


def test_early_stop_finds_the_best_plan_where_throughput_has_one_peak(backend):
    """Where steps_per_second makes theta rise and then fall along the order, no plan of all beats Algorithm 1."""
    values = [0.0, 0.3, 0.5, 0.9, 1.0]
    tables = [
        [1.0] * 8,
        [1.0 / (3 + n) for n in range(8)],
        [1.0, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2],
    ]
    peaks = 0
    step = 1 if backend.name == "cpu" else 31
    for flat in list(itertools.product(values, repeat=4))[::step]:
        confidence = torch.tensor(flat).view(2, 2)
        for table in tables:
            case = {"confidence": confidence, "steps_per_second": torch.tensor(table)}
            num_drafts = check(backend, case)[0]
            everything = oracle.schedule_prefix(**case, early_stop=False)[0]
            if torch.equal(everything, num_drafts):
                peaks += 1
                best = oracle.best_by_trying(**case)
                mine = oracle.value(**case, num_drafts=num_drafts)
                assert_formula(mine, best)
    assert peaks > 1500 // step


def test_a_plan_never_looks_ahead(backend):
    """A confidence behind the first draft that is left out changes no request's plan."""
    g = torch.Generator().manual_seed(3)
    for trial in range(40):
        case = oracle.random_case(g, batch=3, drafts=5, odd=False)
        case["confidence"] = case["confidence"].clamp(min=0.05)
        if trial % 2:
            case["budget"] = torch.tensor([trial % 11], dtype=torch.int32)
        num_drafts, cu_rows = run(backend, case)
        later = case["confidence"].clone()
        for b in range(3):
            # Confidence n decides on draft n, the first one left out; those behind it may be anything,
            # as long as they are of drafts that come after it.
            n = int(num_drafts[b]) + 1
            later[b, n:] = torch.rand(later[b, n:].shape, generator=g)
        for mine, wanted in zip(
            run(backend, case | {"confidence": later}), (num_drafts, cu_rows), strict=True
        ):
            assert_same(mine, wanted)


def test_papers_counterexample(backend):
    """One request, two drafts, and a second confidence that depends on the first draft. Draft 0 is kept
    by verification for sure, so verifying it only when it is drafted moves mass to it."""
    p, q = (0.7, 0.3), (0.5, 0.5)
    table = [1.0, 1.0, 0.5, 0.45]  # theta: 1; 1.8 * 0.5 = 0.9; (1 + 0.8 + 0.72) * 0.45 = 1.134

    def first_token(plan):
        law = [0.0, 0.0]
        for x, second in enumerate((0.9, 0.0)):
            verified = int(plan(**case_of([[0.8, second]], table))[0]) > 0
            kept = min(1.0, p[x] / q[x]) if verified else 0.0
            # The residual of p - q is all at 0; a token that is not verified comes from p.
            other = (1.0, 0.0) if verified else p
            law = [law[y] + q[x] * (kept * (y == x) + (1.0 - kept) * other[y]) for y in range(2)]
        return law

    assert_formula(first_token(lambda **case: run(backend, case)), [0.7, 0.3])
    best_of_all = functools.partial(oracle.schedule_prefix, early_stop=False)
    assert_formula(first_token(best_of_all), [0.85, 0.15])


# --- The published cases ----------------------------------------------------------------------------
PREFIX = json.loads((CASES / "dspark_prefix_schedule_sglang.json").read_text())["cases"]
BUDGET = json.loads((CASES / "dspark_verify_budget.json").read_text())["cases"]


@pytest.mark.parametrize("published", PREFIX, ids=[c["name"] for c in PREFIX])
def test_published_plans(backend, published):
    case = case_of(
        confidences(published["survival"]),
        budget=published["budget"],
        min_drafts=max(published["min_verify_len"], 1) - 1,
    )
    if published["max_verify_len"]:
        case["max_drafts"] = published["max_verify_len"] - 1
    out = run(backend, case)
    assert [1 + n for n in out[0].tolist()] == published["expected_verify_lens"]
    assert out[1].diff().tolist() == published["expected_verify_lens"]


# --- Modes and bounds -------------------------------------------------------------------------------
def test_ties_go_by_place_then_request(backend):
    case = case_of([[0.8, 1.0, 1.0], [0.8, 1.0, 1.0]])
    plans = [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [3, 3]]
    for budget, plan in enumerate(plans):
        given_budget = torch.tensor([budget], dtype=torch.int32)
        assert run(backend, case | {"budget": given_budget})[0].tolist() == plan


def test_survival_zero_is_never_admitted(backend):
    tiny = 2.0**-149
    case = case_of([[0.0, 1.0], [math.nan, 1.0], [tiny, 0.5], [-3.0, 1.0], [7.0, 1.0]], budget=99)
    assert run(backend, case)[0].tolist() == [0, 0, 1, 0, 2]  # tiny / 2 rounds to 0


def test_floor_is_outside_the_budget(backend):
    """Granted first, whatever it costs or survives; candidates start behind it."""
    low = [[0.1, 0.1, 0.1], [0.0, 0.0, 0.0], [0.9, 0.9, 0.9]]
    for budget, plan in ((0, [1, 1, 1]), (1, [1, 1, 2]), (3, [2, 1, 3])):
        assert run(backend, case_of(low, budget=budget, min_drafts=1))[0].tolist() == plan
    assert run(backend, case_of(low, budget=9, min_drafts=5))[0].tolist() == [3, 3, 3]
    assert run(backend, case_of(low, budget=9, min_drafts=5, max_drafts=2))[0].tolist() == [2, 2, 2]
    cliff = [1.0, 1.0, 1.0, 1.0, 1.0, 0.1]
    # Six rows are the floor, at tau = 3 + 0.1 + 0 + 0.9; the table is flat from five rows on.
    assert check(backend, case_of(low, cliff, min_drafts=1))[0].tolist() == [3, 1, 3]


def test_inactive_requests_have_no_rows(backend):
    active = torch.tensor([False, True, False, True])
    confidence = [[1.0, 1.0], [0.9, 0.2], [math.nan, 1.0], [0.8, 0.8]]
    out = check(backend, case_of(confidence, budget=2, active=active))
    assert out[0].tolist() == [0, 1, 0, 1] and out[1].tolist() == [0, 0, 2, 2, 4]
    out = check(backend, case_of(confidence, active=torch.zeros(4, dtype=torch.bool)))
    assert out[0].tolist() == [0] * 4 and out[1].tolist() == [0] * 5


def test_table_beyond_its_end(backend):
    """Its last entry counts: a short table is flat, and every draft pays."""
    confidence = [[0.9, 0.9], [0.1, 0.1]]
    assert check(backend, case_of(confidence, [5.0]))[0].tolist() == [2, 2]
    assert check(backend, case_of(confidence, [5.0, 5.0, 5.0, 2.0]))[0].tolist() == [0, 0]


def test_odd_tables(backend):
    """No number of the table is a way out: the comparison fails, and admission ends."""
    for odd in (math.nan, math.inf, -math.inf, -1.0, 0.0):
        for at in range(5):
            table = [1.0] * 5
            table[at] = odd
            check(backend, case_of([[0.9, 0.9], [0.8, 0.8]], table))


@pytest.mark.parametrize("batch, drafts", [(0, 3), (3, 0), (0, 0), (9000, 0)])
@pytest.mark.parametrize("budget", [False, True])
def test_sizes(backend, batch, drafts, budget):
    case = case_of([[]], budget=1) if budget else case_of([[]])
    out = check(backend, case | {"confidence": torch.zeros(batch, drafts)})
    assert out[1].tolist() == list(range(batch + 1))


def test_batch_order_only_breaks_ties(backend):
    """Without ties the plan of a request does not depend on its place in the batch, nor on padding."""
    g = torch.Generator().manual_seed(5)
    case = {
        "confidence": torch.rand(9, 6, generator=g) * 0.5 + 0.5,
        "steps_per_second": torch.linspace(1.0, 0.4, 40),
    }
    wanted = run(backend, case)[0]
    order = torch.randperm(9, generator=g)
    assert_same(run(backend, case | {"confidence": case["confidence"][order]})[0], wanted[order])
    padded = torch.cat([case["confidence"], torch.ones(4, 6)])
    out = run(backend, case | {"confidence": padded, "active": torch.arange(13) < 9})
    assert_same(out[0], torch.cat([wanted, torch.zeros(4, dtype=torch.int32)]))
    wide = torch.full((9, 11), math.nan, device=backend.device)
    wide[:, 3:9] = case["confidence"]
    assert_same(run(backend, case | {"confidence": wide[:, 3:9]})[0], wanted)


def test_feeds_verify_chain(backend):
    """cu_rows goes straight into verification: every active request gets a token."""
    g = torch.Generator().manual_seed(6)
    case = oracle.random_case(g, batch=6, drafts=4) | {"active": torch.arange(6) != 2}
    on = backend.device
    case = {k: v.to(on) if torch.is_tensor(v) else v for k, v in case.items()}
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    num_drafts, cu_rows = backend.ops.schedule_prefix(*[case[n] for n in POSITIONAL], **options)
    rows = 6 * 5  # graph padding behind cu_rows[-1]
    tokens, num_accepted, status, *_ = backend.ops.verify_chain(
        torch.randn(rows, 20, generator=g).to(on),
        torch.randint(0, 20, (rows,), generator=g).to(on),
        cu_rows,
        torch.arange(6).to(on),
        torch.arange(6).to(on),
        4,
        vocab_size=20,
    )
    assert status.tolist() == [0] * 6
    assert ((tokens[:, 0] >= 0) == case["active"]).all()
    assert (num_accepted <= num_drafts).all()


def test_arguments_are_not_written(backend):
    case = oracle.random_case(torch.Generator().manual_seed(7), budget=True)
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


def test_errors_name_op_argument_wanted_got(backend):
    case = case_of([[0.5, 0.5]] * 3, budget=1, active=torch.ones(3, dtype=torch.bool))
    bad = [
        ({"confidence": case["confidence"].double()}, r"schedule_prefix: confidence: wanted dtype float32, got float64"),
        ({"confidence": case["confidence"][0]}, r"confidence: wanted shape \[B, G\], got \[2\]"),
        ({"confidence": case["confidence"].t().contiguous().t()}, r"confidence: wanted stride 1 in the last"),
        ({"confidence": torch.zeros(4097, 1)}, r"confidence: wanted at most 4096 elements, got shape \[4097, 1\]"),
        ({"steps_per_second": torch.ones(2).double()}, r"steps_per_second: wanted dtype float32"),
        ({"steps_per_second": torch.ones(4)[::2]}, r"steps_per_second: wanted a contiguous tensor"),
        ({"steps_per_second": torch.ones(0), "budget": None}, r"steps_per_second: wanted .*1.*as budget is absent"),
        ({"budget": torch.tensor([1])}, r"budget: wanted dtype int32, got int64"),
        ({"budget": torch.ones(2).int()}, r"budget: wanted size 1"),
        ({"active": torch.ones(2, dtype=torch.bool)}, r"active: wanted size 3 \(B of confidence\)"),
        ({"active": torch.ones(3)}, r"active: wanted dtype bool, got float32"),
        ({"min_drafts": -1}, r"min_drafts: wanted a number from 0 up, got -1"),
        ({"max_drafts": -2}, r"max_drafts: wanted a number from 0 up, got -2"),
    ]  # fmt: skip
    for change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | change)


def test_opcheck_and_compile():
    g = torch.Generator().manual_seed(8)
    for budget in (False, True):
        case = oracle.random_case(g, budget=budget) | {"max_drafts": 4}
        tensors = [case[name] for name in POSITIONAL]
        options = {k: v for k, v in case.items() if k not in POSITIONAL}
        torch.library.opcheck(torch.ops.specdec.schedule_prefix.default, tensors, options)
        wanted = oracle.schedule_prefix(**case)
        for dynamic in (False, True):
            torch._dynamo.reset()

            @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
            def step(*tensors, **options):
                return torch.ops.specdec.schedule_prefix(*tensors, **options)

            for mine, theirs in zip(step(*tensors, **options), wanted, strict=True):
                assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
ODD = [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0, 1.0, 2.0, 1e-40, 2.0**-149, 3e38]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    number = st.one_of(
        st.sampled_from([0.5, 0.7, 0.9]), st.sampled_from(ODD), st.floats(0, 1, width=32)
    )
    batch, drafts = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))

    def numbers(count, least=0):
        values = data.draw(st.lists(number, min_size=max(count, least), max_size=max(count, least)))
        return torch.tensor(values, dtype=torch.float32)

    case = {
        "confidence": numbers(batch * drafts).view(batch, drafts),
        "steps_per_second": numbers(data.draw(st.integers(1, 50))),
        "min_drafts": data.draw(st.sampled_from([0, 0, 1, 2, 2**40])),
        "max_drafts": data.draw(st.sampled_from([None, 0, 1, 3, 2**62])),
    }
    if data.draw(st.booleans()):
        case["budget"] = torch.tensor(
            [data.draw(st.integers(-(2**31), 2**31 - 1))], dtype=torch.int32
        )
    if data.draw(st.booleans()):
        flags = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
        case["active"] = torch.tensor(flags, dtype=torch.bool)
    backend = backends.get(backend_name)
    check(backend, case)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
