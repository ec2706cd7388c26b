"""schedule_prefix, slowly and obviously: one candidate at a time, and the best plan by trying them all."""

import itertools

import numpy as np
import torch

NAMES = ["num_drafts", "cu_rows"]


def survivals(confidence):
    """[B, G] lists of float32 products, left to right."""
    out = []
    for row in confidence.float().numpy():
        survival, line = np.float32(1.0), []
        for c in row:
            c = np.float32(0.0) if np.isnan(c) else np.clip(c, np.float32(0.0), np.float32(1.0))
            survival = np.float32(survival * c)
            line.append(float(survival))
        out.append(line)
    return out


def steps(table, rows):
    return table[min(rows, len(table) - 1)]


def candidates(survival, first, last, active):
    """(request, place) in the order of admission."""
    some = [
        (-survival[b][j], j, b)
        for b in range(len(survival))
        if active[b]
        for j in range(first, last)
        if survival[b][j] > 0.0
    ]
    return [(b, j) for _, j, b in sorted(some)]


def schedule_prefix(
    confidence, steps_per_second, *, budget=None, min_drafts=0, max_drafts=None, active=None,
    early_stop=True,
):  # fmt: skip
    """early_stop=False looks for the best of all prefixes of the order instead: what Algorithm 1 must not do."""
    batch, drafts = confidence.shape
    most = drafts if max_drafts is None else min(max_drafts, drafts)
    floor = min(min_drafts, most)
    on = [True] * batch if active is None else active.tolist()
    survival, table = survivals(confidence), steps_per_second.double().tolist()
    num = [floor if on[b] else 0 for b in range(batch)]
    order = candidates(survival, floor, most, on)
    if budget is not None:
        admitted = order[: max(int(budget), 0)]
    else:
        tau = sum(on) + sum(survival[b][j] for b in range(batch) if on[b] for j in range(floor))
        rows = sum(on) * (1 + floor)
        best, admitted, seen = tau * steps(table, rows) if order else 0.0, [], []
        for b, j in order:
            tau, rows = tau + survival[b][j], rows + 1
            seen.append((b, j))
            theta = tau * steps(table, rows)
            if theta > best:
                best, admitted = theta, list(seen)
            elif early_stop:
                break
    for b, _ in admitted:
        num[b] += 1
    ends = itertools.accumulate(1 + num[b] if on[b] else 0 for b in range(batch))
    return torch.tensor(num, dtype=torch.int32), torch.tensor([0, *ends], dtype=torch.int32)


def best_by_trying(confidence, steps_per_second):
    """The largest tau * steps_per_second over all plans, by trying every one of them."""
    survival, table = survivals(confidence), steps_per_second.double().tolist()
    batch, drafts = confidence.shape
    best = 0.0
    for plan in itertools.product(range(drafts + 1), repeat=batch):
        tau = batch + sum(sum(survival[b][:n]) for b, n in enumerate(plan))
        best = max(best, tau * steps(table, batch + sum(plan)))
    return best


def value(confidence, steps_per_second, num_drafts):
    survival, table = survivals(confidence), steps_per_second.double().tolist()
    tau = sum(1 + sum(survival[b][:n]) for b, n in enumerate(num_drafts.tolist()))
    return tau * steps(table, len(num_drafts) + int(num_drafts.sum()))


def random_case(generator, batch=5, drafts=7, budget=False, odd=True):
    """Arguments by name: ties, zeros, ones, and with `odd` NaN and numbers outside [0, 1]."""

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    confidence = 0.3 + 0.7 * rand(batch, drafts)
    kind = torch.randint(0, 12, (batch, drafts), generator=generator)
    for k, number in enumerate([0.5, 1.0, 0.0, *([float("nan"), 1.5, -0.5] if odd else [])]):
        confidence[kind == k] = number
    table = rand(batch * (drafts + 1) // 2 + 1).sort(descending=True).values + 0.3
    case = {"confidence": confidence, "steps_per_second": table}
    if budget:
        most = max(batch * drafts, 1)
        case["budget"] = torch.randint(-2, most + 2, (1,), generator=generator).int()
    case["min_drafts"] = int(torch.randint(0, 3, (1,), generator=generator))
    if rand(1) < 0.5:
        case["max_drafts"] = int(torch.randint(0, drafts + 2, (1,), generator=generator))
    if rand(1) < 0.5:
        case["active"] = rand(batch) < 0.7
    return case
