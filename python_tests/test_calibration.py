"""Calibration, cost tables and budgets on the host."""

import itertools
import json
import pathlib
import time

import numpy as np
import pytest
import torch
from compare import LAW_ERROR, assert_formula

import specdec_ext
from specdec_ext import StepTable

BUDGETS = json.loads(
    (pathlib.Path(__file__).parent / "cases" / "dspark_verify_budget.json").read_text()
)["cases"]


def overconfident(seed, temperatures, blocks=60000):
    """(logits, accepted, chances): drafts accepted with sigmoid(logit / T_k), and all lost behind the first
    rejection, as verification leaves them."""
    g = np.random.default_rng(seed)
    places = len(temperatures)
    true_logits = g.normal(1.0, 1.2, (blocks, places))
    chances = 1.0 / (1.0 + np.exp(-true_logits))
    accepted = g.random((blocks, places)) < chances
    return true_logits * np.asarray(temperatures), np.cumprod(accepted, 1).astype(bool), chances


# --- Temperatures ---------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_sts_calibrates_an_overconfident_head(seed):
    """The error of the survivals falls from 5 % or more to 1 % or less, also on blocks not fitted to; the order
    of the requests at a place stays."""
    temperatures = [2.5, 2.0, 3.0, 1.8, 2.2]
    logits, accepted, _ = overconfident(seed, temperatures)
    fitted = specdec_ext.fit_sts(logits, accepted)
    assert fitted.ece_before >= 0.05 and fitted.ece_after <= 0.01
    others, happened, chances = overconfident(seed + 100, temperatures)
    survival = np.cumprod(fitted.confidence(others), 1)
    for k in range(5):
        error = specdec_ext.calibration_error(survival[:, k], happened[:, k])
        assert error <= 0.01, f"place {k}: {error}"
        # Sorting by the logit sorts by the confidence.
        assert (np.diff(fitted.confidence(others)[np.argsort(others[:, k]), k]) >= 0).all()
    assert np.abs(survival - np.cumprod(chances, 1)).mean() < 0.02


def test_sts_goes_left_to_right():
    """Each temperature is the best one given those before it, by trying the grid again."""
    logits, accepted, _ = overconfident(7, [2.0, 0.5, 3.0], blocks=3000)
    grid = np.array([0.5, 1.0, 2.0, 4.0])
    fitted = specdec_ext.fit_sts(logits, accepted, grid=grid).temperatures

    def error(temperatures):
        k = len(temperatures)
        c = 1.0 / (1.0 + np.exp(-logits[:, :k] / np.asarray(temperatures)))
        return specdec_ext.calibration_error(np.prod(c, 1), np.prod(accepted[:, :k], 1))

    for k in range(3):
        errors = [error([*fitted[:k], t]) for t in grid]
        assert error(fitted[: k + 1]) == min(errors)
        assert len(set(errors)) == 4, "the grid must matter"


def test_sts_of_a_calibrated_head_is_nearly_one():
    logits, accepted, _ = overconfident(3, [1.0] * 3)
    assert np.abs(np.log(specdec_ext.fit_sts(logits, accepted).temperatures)).max() < 0.3
    same = np.zeros((4, 2))  # logit 0 is 1/2 at every temperature: the tie goes to 1
    assert_formula(specdec_ext.fit_sts(same, same).temperatures.tolist(), [1.0, 1.0])


def test_calibration_error_by_hand():
    predicted, happened = [0.1, 0.1, 0.9, 0.9], [0, 1, 1, 1]
    assert_formula(specdec_ext.calibration_error(predicted, happened), 0.25)  # .8 and .2 of 4
    assert specdec_ext.calibration_error([1.0, 0.0], [1, 0]) == 0.0
    assert specdec_ext.calibration_error([], []) == 0.0
    # A bin's errors may cancel, those of two bins do not.
    assert specdec_ext.calibration_error([0.5, 0.5], [0, 1]) == 0.0
    assert_formula(specdec_ext.calibration_error([0.2, 0.8], [1, 0]), 0.8)


def test_files_go_round(tmp_path):
    logits, accepted, _ = overconfident(1, [2.0, 2.0], blocks=500)
    fitted = specdec_ext.fit_sts(logits, accepted, dataset="chat")
    specdec_ext.save_sts(fitted, tmp_path / "sts.json")
    fields = json.loads((tmp_path / "sts.json").read_text())
    assert set(fields) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    again = specdec_ext.load_sts(tmp_path / "sts.json")
    assert (again.temperatures == fitted.temperatures).all()
    assert (again.dataset, again.num_samples) == ("chat", 500)
    assert (again.ece_before, again.ece_after) == (fitted.ece_before, fitted.ece_after)
    (tmp_path / "short.json").write_text('{"temperatures": [1.5]}')
    assert specdec_ext.load_sts(tmp_path / "short.json").temperatures.tolist() == [1.5]
    for bad in (
        "{}",
        '{"temperatures": [1, 0]}',
        '{"temperatures": [[1]]}',
        '{"temperatures": [NaN]}',
    ):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError, match="temperatures: wanted positive numbers"):
            specdec_ext.load_sts(tmp_path / "bad.json")


# --- Tables ---------------------------------------------------------------------------------------
def test_table_interpolates_and_goes_round(tmp_path):
    table = StepTable([2, 4, 8], [10.0, 8.0, 4.0])
    assert table([1, 2, 3, 4, 6, 8, 99]).tolist() == [10.0, 10.0, 9.0, 8.0, 6.0, 4.0, 4.0]
    steps = table.steps(9)
    assert steps.dtype == np.float32 and steps.tolist() == [10, 10, 10, 9, 8, 7, 6, 5, 4, 4]
    table.save(tmp_path / "table.json")
    fields = json.loads((tmp_path / "table.json").read_text())
    assert fields["max_batch_tokens"] == 8
    again = StepTable.load(tmp_path / "table.json")
    assert (again.steps(20) == table.steps(20)).all()
    assert StepTable([1], [1.0]).flat and not table.flat
    (tmp_path / "bad.json").write_text('{"sample_batch_tokens": [1]}')
    with pytest.raises(ValueError, match="wanted sample_steps_per_sec"):
        StepTable.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "rows, steps, message",
    [
        ([], [], "rows: wanted ascending sizes"),
        ([2, 2], [1.0, 1.0], "rows: wanted ascending sizes"),
        ([[1]], [[1.0]], "rows: wanted ascending sizes"),
        ([1, 2], [1.0], r"steps_per_second: wanted 2 values"),
        ([1, 2], [1.0, 0.0], "steps_per_second: wanted positive numbers"),
        ([1, 2], [1.0, float("nan")], "steps_per_second: wanted positive numbers"),
    ],
)
def test_bad_tables(rows, steps, message):
    with pytest.raises(ValueError, match=message):
        StepTable(rows, steps)


def test_profile_steps_times_each_size(monkeypatch):
    """A pass of n rows that takes n seconds of a clock that the pass itself moves."""
    now, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def fn(rows):
        calls.append(rows)
        now[0] += rows

    table = specdec_ext.profile_steps(fn, [4, 2, 2], repeats=3, warmup=1)
    assert calls == [2] * 4 + [4] * 4
    assert table.rows.tolist() == [2, 4] and table.steps_per_second.tolist() == [0.5, 0.25]
    for sizes, repeats in (([], 3), ([1], 0)):
        with pytest.raises(ValueError, match="wanted at least one of each"):
            specdec_ext.profile_steps(fn, sizes, repeats=repeats)


# --- Budgets --------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", BUDGETS, ids=[f"{c['engine']}-{i}" for i, c in enumerate(BUDGETS)])
def test_published_budgets(case):
    options = {}
    if case["engine"] == "sglang":
        survival = np.array(case["survival"])
        confidences = survival / np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], 1)
        table = StepTable(case["batch_tokens"], case["steps_per_sec"])
    else:
        confidences = np.array(case["confidence"])
        costs = np.array(case["verify_cost"]) + case["draft_cost"][len(confidences)]
        table = StepTable(range(len(costs)), 1.0 / costs)
        options["max_rows"] = case.get("max_total_logits")
    budget = specdec_ext.best_budget(confidences, table, **options)
    if "expected_budget" in case:
        assert budget == case["expected_budget"]
    else:
        assert budget <= case["expected_max_budget"] and budget > 0


@pytest.mark.parametrize("seed", range(20))
def test_budget_over_a_cliff_is_the_best_of_all(seed):
    g = np.random.default_rng(seed)
    table = StepTable(range(1, 9), [1, 1, 1, 0.5, 0.45, 0.44, 0.43, 0.42])
    confidences = g.uniform(0.45, 0.95, (3, 7))
    survival = np.cumprod(confidences, 1)

    def theta(plan):
        tau = 3 + sum(survival[b, :n].sum() for b, n in enumerate(plan))
        return float(tau * table(3 + sum(plan)))

    best = max(theta(plan) for plan in itertools.product(range(8), repeat=3))
    order = np.sort(survival.ravel())[::-1]
    k = specdec_ext.best_budget(confidences, table)
    assert_formula((3 + order[:k].sum()) * float(table(3 + k)), best)
    # As the scheduler of the next round grants it.
    plan = specdec_ext.schedule_prefix(
        torch.from_numpy(confidences).float(),
        torch.ones(1),
        budget=torch.tensor([k], dtype=torch.int32),
    )[0]
    assert_formula(theta(plan.tolist()), best, error=LAW_ERROR)


def test_I04_planner_goes_over_stairs():
    """The best of all numbers, the first one of equal ones; a flat table is told apart."""
    survival = np.array([0.9, 0.8, 0.3, 0.2, 0.1])
    confidences = (survival / np.array([1.0, *survival[:-1]]))[None]
    for costs, budget in (
        ([10, 14, 14, 20, 20.5, 21], 2),
        ([10, 20, 20, 20, 20, 20], 5),
        ([10] * 6, 5),
    ):
        table = StepTable(range(1, 7), 1.0 / np.array(costs))
        assert specdec_ext.best_budget(confidences, table) == budget
        assert table.flat == (len(set(costs)) == 1)
    tie = StepTable([1, 2], [1.0, 0.5])  # one draft doubles tokens and halves passes
    assert specdec_ext.best_budget([[1.0]], tie) == 0


def test_expected_speedup():
    table = StepTable([1, 2, 3], [1.0, 0.8, 0.1])
    assert_formula(specdec_ext.expected_speedup([[0.5, 0.5]], table), 1.5 * 0.8)
    assert specdec_ext.expected_speedup([[0.1, 0.9]], table) == 1.0
    assert specdec_ext.expected_speedup([[float("nan"), 0.9]], table) == 1.0
    g = np.random.default_rng(0)
    confidences = g.uniform(0, 1, (4, 6)).astype(np.float32)
    table = StepTable([4, 28], [1.0, 0.3])
    plan = specdec_ext.schedule_prefix(
        torch.from_numpy(confidences), torch.from_numpy(table.steps(28))
    )[0].tolist()
    tau = 4 + sum(np.cumprod(confidences, 1)[b, :n].sum() for b, n in enumerate(plan))
    wanted = tau * float(table(4 + sum(plan))) / 4
    assert_formula(specdec_ext.expected_speedup(confidences, table), wanted, error=LAW_ERROR)
    with pytest.raises(ValueError, match="at least one request"):
        specdec_ext.expected_speedup(np.zeros((0, 3)), table)


@pytest.mark.parametrize(
    "logits, accepted, options, message",
    [
        (np.zeros(3), np.zeros(3), {}, r"logits: wanted shape \[N, G\]"),
        (np.zeros((3, 2)), np.zeros((3, 1)), {}, "accepted: wanted the shape of logits"),
        (np.zeros((0, 2)), np.zeros((0, 2)), {}, "at least one block"),
        (np.full((1, 1), np.nan), np.zeros((1, 1)), {}, "finite numbers"),
        (np.zeros((1, 1)), np.zeros((1, 1)), {"grid": [0.0]}, "grid: wanted positive"),
    ],
)
def test_bad_samples(logits, accepted, options, message):
    with pytest.raises(ValueError, match=message):
        specdec_ext.fit_sts(logits, accepted, **options)
