"""The law of a whole round - draft, schedule, verify - by enumeration: two requests, two drafts each, whose
confidences depend on the drafts before. It must be the target's, for both requests together."""

import itertools

import numpy as np
import pytest
import torch
from compare import FORMULA_ERROR
from oracles import schedule_prefix as oracle

VOCAB, DRAFTS, LENGTH = 2, 2, 3


class Request:
    """Random laws p and q after every prefix, and confidences after every prefix of drafts."""

    def __init__(self, generator):
        prefixes = [
            prefix for n in range(LENGTH) for prefix in itertools.product(range(VOCAB), repeat=n)
        ]
        self.p = {prefix: generator.dirichlet([0.7] * VOCAB) for prefix in prefixes}
        self.q = {prefix: generator.dirichlet([0.7] * VOCAB) for prefix in prefixes}
        # After one first draft the second is sure, after the other it is hopeless.
        sure = int(generator.integers(VOCAB))
        self.c = {prefix: np.float32(0.97 if prefix == (sure,) else 0.05) for prefix in prefixes}
        self.c[()] = np.float32(generator.choice([0.7, 0.8, 0.9]))

    def drafts(self):
        """(probability, drafts)."""
        for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
            yield np.prod([self.q[drafts[:j]][drafts[j]] for j in range(DRAFTS)]), drafts

    def confidences(self, drafts):
        return [self.c[drafts[:j]] for j in range(DRAFTS)]

    def continued(self, out, prefix, weight):
        """Plain sampling from a prefix on."""
        if len(prefix) == LENGTH:
            out[prefix] += weight
            return
        for y in range(VOCAB):
            self.continued(out, (*prefix, y), weight * self.p[prefix][y])

    def emitted(self, drafts, verified):
        """Law of LENGTH tokens when the first drafts are verified."""
        out, weight = np.zeros([VOCAB] * LENGTH), 1.0
        for j in range(verified):
            p, q, x = self.p[drafts[:j]], self.q[drafts[:j]], drafts[j]
            accept = min(1.0, p[x] / q[x])
            rest = np.maximum(p - q, 0.0)
            for y in range(VOCAB):
                if accept < 1.0:
                    self.continued(
                        out, (*drafts[:j], y), weight * (1.0 - accept) * rest[y] / rest.sum()
                    )
            weight *= accept
        self.continued(out, drafts[:verified], weight)
        return out


def round_law(requests, plan):
    """Joint law of what both requests emit; and which plans there were."""
    joint, plans = 0.0, set()
    for (w0, x0), (w1, x1) in itertools.product(*[list(r.drafts()) for r in requests]):
        confidence = torch.tensor(
            [r.confidences(x) for r, x in zip(requests, (x0, x1), strict=True)]
        )
        n0, n1 = plan(confidence)
        plans.add((n0, n1))
        joint = joint + w0 * w1 * np.multiply.outer(
            requests[0].emitted(x0, n0), requests[1].emitted(x1, n1)
        )
    return joint, plans


def target_law(requests):
    laws = []
    for r in requests:
        out = np.zeros([VOCAB] * LENGTH)
        r.continued(out, (), 1.0)
        laws.append(out)
    return np.multiply.outer(*laws)


TABLES = [
    [1.0, 1.0, 1.0, 0.8, 0.6, 0.5, 0.45],
    [1.0, 1.0, 1.0, 0.65, 0.53, 0.48, 0.44],
    [1.0, 1.0, 1.0, 0.75, 0.7, 0.4, 0.39],
]


@pytest.mark.parametrize("mode", ["early stop", *range(5)])
def test_law_of_a_round_is_the_targets(backend, mode):
    seen = set()
    for seed, table in enumerate(TABLES):
        requests = [Request(np.random.default_rng([seed, b])) for b in range(2)]
        steps = torch.tensor(table)
        options = {}
        if mode != "early stop":
            options["budget"] = torch.tensor([mode], dtype=torch.int32)

        def plan(confidence, steps=steps, options=options):
            case = {"confidence": confidence, "steps_per_second": steps} | options
            return backend.call("schedule_prefix", ["confidence", "steps_per_second"], case)[
                0
            ].tolist()

        joint, plans = round_law(requests, plan)
        assert np.abs(joint - target_law(requests)).max() < FORMULA_ERROR
        seen |= plans
    # Plans must depend on the drafts for the law to be at stake.
    assert len(seen) >= (1 if mode in (0, 4) else 2)


def test_the_best_plan_of_all_has_another_law():
    """What early stop is for: the same round with the best prefix of the order is off by percents."""
    worst = 0.0
    for seed, table in enumerate(TABLES):
        requests = [Request(np.random.default_rng([seed, b])) for b in range(2)]

        def plan(confidence, table=table):
            return oracle.schedule_prefix(confidence, torch.tensor(table), early_stop=False)[
                0
            ].tolist()

        joint, _ = round_law(requests, plan)
        worst = max(worst, np.abs(joint - target_law(requests)).max())
    assert worst > 1e-3
