"""Host side of DSpark: calibrated confidences and what a verification pass costs. NumPy in and out.

Sources: DSpark (arXiv 2607.05147), section 3.2; the files are those of SGLang's DSpark options.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

_BINS = 15
_GRID = np.exp(np.linspace(np.log(0.1), np.log(10.0), 201))  # 1 is in its middle


def _matrix(name: str, value: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(value, dtype=dtype)
    if array.ndim != 2:
        raise ValueError(f"{name}: wanted shape [N, G], got {list(array.shape)}")
    return array


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int = _BINS) -> float:
    """Expected calibration error: how far the mean of a bin lies from what happened in it, on average.

    Args:
        predicted: ``[N]`` probabilities, binned by equal widths of [0, 1].
        happened: ``[N]``, 0 or 1.
        bins: their number.

    Returns:
        Mean over all N of ``|mean predicted - mean happened|`` of the bin; 0 for N = 0.
    """
    predicted, happened = np.asarray(predicted, np.float64), np.asarray(happened, np.float64)
    if predicted.shape != happened.shape or predicted.ndim != 1:
        raise ValueError(
            f"calibration_error: wanted two arrays [N], got shapes {list(predicted.shape)} and "
            f"{list(happened.shape)}"
        )
    if predicted.size == 0:
        return 0.0
    place = np.clip((predicted * bins).astype(np.int64), 0, bins - 1)
    gap = np.bincount(place, predicted - happened, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


@dataclass(frozen=True)
class Calibration:
    """Temperatures of a confidence head, and how well calibrated its survivals are with them.

    Attributes:
        temperatures: float64 ``[G]``; what ``markov_draft`` takes as ``sts_temperature``.
        ece_before: largest error over the places of the survivals at temperature 1.
        ece_after: with the temperatures.
        num_samples: blocks that they were fitted to.
        dataset: a name, for the file.
    """

    temperatures: np.ndarray
    ece_before: float
    ece_after: float
    num_samples: int
    dataset: str = ""

    def confidence(self, logits: np.ndarray) -> np.ndarray:
        """``sigmoid(logits / temperatures)``, ``[N, G]``."""
        return _sigmoid(_matrix("logits", logits, np.float64) / self.temperatures)


def _survival_errors(confidence: np.ndarray, accepted: np.ndarray) -> list[float]:
    survival, happened = np.cumprod(confidence, 1), np.cumprod(accepted, 1)
    return [calibration_error(survival[:, k], happened[:, k]) for k in range(accepted.shape[1])]


def fit_sts(
    logits: np.ndarray,
    accepted: np.ndarray,
    *,
    grid: np.ndarray | None = None,
    dataset: str = "",
) -> Calibration:
    """Sequential temperature scaling of a confidence head, place by place.

    For k = 1..G in order, T_k is the number of the grid with the least calibration error of the survival
    ``prod_{i <= k} sigmoid(logit_i / T_i)`` against "drafts 1..k were all accepted", with the
    temperatures before it fixed; of equal ones that nearest to 1.

    Args:
        logits: ``[N, G]``, of the confidence head before the sigmoid, of N blocks.
        accepted: ``[N, G]`` bool: draft k was accepted. Entries behind a block's first rejection do not
            count, as the product of them is 0 from there on.
        grid: temperatures to try; None: 201 from 0.1 to 10, evenly spaced in their logarithm.
        dataset: a name to keep with the result.

    Raises:
        ValueError: shapes that do not match, no block, a temperature that is not positive.
    """
    logits, accepted = (
        _matrix("logits", logits, np.float64),
        _matrix("accepted", accepted, np.float64),
    )
    if logits.shape != accepted.shape:
        raise ValueError(
            f"accepted: wanted the shape of logits {list(logits.shape)}, got {list(accepted.shape)}"
        )
    if logits.shape[0] == 0:
        raise ValueError("logits: wanted at least one block, got none")
    if not np.isfinite(logits).all():
        raise ValueError("logits: wanted finite numbers, got NaN or infinities")
    grid = _GRID if grid is None else np.asarray(grid, np.float64)
    if grid.ndim != 1 or grid.size == 0 or not (grid > 0).all():
        raise ValueError("grid: wanted positive temperatures [n], n >= 1")
    tried = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    happened = np.cumprod(accepted, 1)
    before, temperatures = np.ones(logits.shape[0]), []
    for k in range(logits.shape[1]):
        errors = [
            calibration_error(before * _sigmoid(logits[:, k] / t), happened[:, k]) for t in tried
        ]
        temperatures.append(tried[int(np.argmin(errors))])
        before = before * _sigmoid(logits[:, k] / temperatures[-1])
    fitted = np.array(temperatures)
    return Calibration(
        fitted,
        max(_survival_errors(_sigmoid(logits), accepted), default=0.0),
        max(_survival_errors(_sigmoid(logits / fitted), accepted), default=0.0),
        logits.shape[0],
        dataset,
    )


def save_sts(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a JSON object: temperatures, dataset, num_samples, ece_before, ece_after."""
    fields = {
        "temperatures": [float(t) for t in calibration.temperatures],
        "dataset": calibration.dataset,
        "num_samples": calibration.num_samples,
        "ece_before": calibration.ece_before,
        "ece_after": calibration.ece_after,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(fields, file, indent=1)


def load_sts(path: str | os.PathLike[str]) -> Calibration:
    """Read what save_sts wrote; all but the temperatures may be missing.

    Raises:
        ValueError: no temperatures, or one that is not a positive number.
    """
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    temperatures = np.asarray(fields.get("temperatures", ()), np.float64)
    if temperatures.ndim != 1 or temperatures.size == 0 or not (temperatures > 0).all():
        raise ValueError(f"{path}: temperatures: wanted positive numbers [G], got {temperatures}")
    return Calibration(
        temperatures,
        float(fields.get("ece_before", np.nan)),
        float(fields.get("ece_after", np.nan)),
        int(fields.get("num_samples", 0)),
        str(fields.get("dataset", "")),
    )


class StepTable:
    """How many passes an engine makes in a second, by the number of rows of a pass.

    Linear between the sizes measured, constant outside of them. In a file: SGLang's
    ``sample_batch_tokens``, ``sample_steps_per_sec`` and ``max_batch_tokens``.

    Args:
        rows: sizes, ascending, at least one.
        steps_per_second: passes per second, positive, one per size.

    Raises:
        ValueError: no sizes, not ascending, another number of values, or values that are not positive.
    """

    def __init__(self, rows: Sequence[int], steps_per_second: Sequence[float]) -> None:
        self.rows = np.asarray(rows, np.int64)
        self.steps_per_second = np.asarray(steps_per_second, np.float64)
        if self.rows.ndim != 1 or self.rows.size == 0 or (np.diff(self.rows) <= 0).any():
            raise ValueError(f"rows: wanted ascending sizes [n], n >= 1, got {rows}")
        if self.steps_per_second.shape != self.rows.shape:
            raise ValueError(
                f"steps_per_second: wanted {self.rows.size} values (one per size), "
                f"got shape {list(self.steps_per_second.shape)}"
            )
        good = np.isfinite(self.steps_per_second) & (self.steps_per_second > 0)
        if not good.all():
            raise ValueError(f"steps_per_second: wanted positive numbers, got {steps_per_second}")

    def __call__(self, rows: Any) -> np.ndarray:
        """Passes per second with so many rows, float64 of the shape of `rows`."""
        return np.interp(rows, self.rows, self.steps_per_second)

    def steps(self, max_rows: int) -> np.ndarray:
        """float32 ``[max_rows + 1]``: what ``schedule_prefix`` takes, after ``torch.from_numpy``."""
        return self(np.arange(max_rows + 1)).astype(np.float32)

    @property
    def flat(self) -> bool:
        """Whether rows cost nothing: then every draft pays, and no schedule has a meaning."""
        return bool((self.steps_per_second == self.steps_per_second[0]).all())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        fields = {
            "sample_batch_tokens": self.rows.tolist(),
            "sample_steps_per_sec": self.steps_per_second.tolist(),
            "max_batch_tokens": int(self.rows[-1]),
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(fields, file, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepTable:
        """Read what save wrote.

        Raises:
            ValueError: a field is missing, or the table is none.
        """
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
        for name in ("sample_batch_tokens", "sample_steps_per_sec"):
            if name not in fields:
                raise ValueError(f"{path}: wanted {name}, got {sorted(fields)}")
        return cls(fields["sample_batch_tokens"], fields["sample_steps_per_sec"])


def profile_steps(
    fn: Callable[[int], Any], sizes: Sequence[int], *, repeats: int = 5, warmup: int = 2
) -> StepTable:
    """Time a verification pass by its number of rows.

    Args:
        fn: ``fn(rows)`` makes one pass and returns when it is done (on a GPU: with a synchronise).
        sizes: numbers of rows to time; each is timed `repeats` times and has the median.
        repeats, warmup: calls that count, and calls before them that do not.

    Raises:
        ValueError: no size, or fewer than one repeat.
    """
    sizes = sorted({int(n) for n in sizes})
    if not sizes or repeats < 1:
        raise ValueError(f"sizes, repeats: wanted at least one of each, got {sizes} and {repeats}")
    steps = []
    for rows in sizes:
        for _ in range(warmup):
            fn(rows)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            fn(rows)
            times.append(time.perf_counter() - begin)
        steps.append(1.0 / max(float(np.median(times)), 1e-9))
    return StepTable(sizes, steps)


def _survivals(confidences: Any) -> np.ndarray:
    c = _matrix("confidences", confidences, np.float64)
    return np.cumprod(np.clip(np.nan_to_num(c, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0), 1)


def _throughputs(confidences: Any, table: StepTable) -> tuple[np.ndarray, np.ndarray]:
    """Survivals in the order of admission, and expected tokens per second with the first 0.. of them."""
    survival = _survivals(confidences)
    batch = survival.shape[0]
    order = np.sort(survival[survival > 0.0])[::-1]
    tau = batch + np.concatenate([[0.0], np.cumsum(order)])
    return order, tau * table(batch + np.arange(tau.size))


def best_budget(
    confidences: np.ndarray,
    table: StepTable,
    *,
    survival_eps: float = 1e-6,
    max_rows: int | None = None,
) -> int:
    """How many drafts of the batch are worth verifying, over all prefixes of the order of admission.

    For ``schedule_prefix(budget=)`` of a LATER round: with confidences of the same round the output loses
    its law (docs/dspark.md). Of equal ones the smallest.

    Args:
        confidences: ``[B, G]``, of an earlier round.
        table: what passes cost. A flat one says that everything is worth it.
        survival_eps: drafts with less are never worth it.
        max_rows: most rows of a pass, the requests' own included.
    """
    order, theta = _throughputs(confidences, table)
    worth = int((order >= survival_eps).sum())
    if max_rows is not None:
        worth = min(worth, max(max_rows - np.shape(confidences)[0], 0))
    return int(np.argmax(theta[: worth + 1]))


def expected_speedup(confidences: np.ndarray, table: StepTable) -> float:
    """Expected tokens per second with Algorithm 1 over those without drafts; at least 1.

    Args:
        confidences: ``[B, G]``, calibrated; B at least 1.
        table: what passes cost.

    Raises:
        ValueError: no request, or another shape.
    """
    _, theta = _throughputs(confidences, table)
    if np.shape(confidences)[0] == 0:
        raise ValueError("confidences: wanted at least one request, got none")
    admitted = 0
    while admitted + 1 < theta.size and theta[admitted + 1] > theta[admitted]:
        admitted += 1
    return float(theta[admitted] / theta[0])
