"""The law of what sample and verify_chain emit.

Small vocabularies: exact enumeration. The op decides by comparing its random numbers, which are known,
with thresholds, so every threshold is measured on the op itself: among eight million seeds those are
taken whose number lies next to where the threshold should be, and the op must switch in between, to
within about 1e-7. The measured accept probabilities, residual and bonus laws are then put together over
all draft paths; the joint law of the next K + 1 tokens must be the target's to 1e-6.

Large vocabularies: chi-squared at fixed seeds.
"""

import functools
import itertools
import json
import pathlib

import chains
import numpy as np
import pytest
import torch
from compare import FORMULA_ERROR, LAW_ERROR
from oracles.sample import law

from specdec_ext._philox import ACCEPT, BONUS, DRAFT, RESIDUAL, SAMPLE, philox4x32

pytestmark = pytest.mark.slow

NUM_SEEDS = 1 << 23
BLOCK = 1 << 20
NEIGHBOURS = 12  # seeds tried on either side of a threshold
PROTOCOL = json.loads(
    (pathlib.Path(__file__).parent / "cases" / "chain_statistical_vllm.json").read_text()
)["statistical_protocol"]


def uniforms(seeds, index, purpose):
    """The numbers of seeds below 2**32 at position 0."""
    try:
        from specdec_ext._host import philox4x32 as block
    except ImportError:
        block = philox4x32
    counters = np.zeros((len(seeds), 4), dtype=np.uint32)
    counters[:, 1], counters[:, 3] = index, purpose
    keys = np.zeros((len(seeds), 2), dtype=np.uint32)
    keys[:, 0] = seeds
    return (np.asarray(block(counters, keys))[:, 0] >> 8) * 2.0**-24


class Threshold:
    """A number of `stream` (index, purpose) below which the op says yes: `expected` is where it should
    be, `path` are conditions (stream, low, high) on other numbers for the op to get there at all, and
    `reach` is the probability of these."""

    def __init__(self, stream, expected, path=()):
        self.stream, self.expected, self.path = stream, float(expected), list(path)
        self.reach = float(np.prod([high - low for _, low, high in self.path]))
        # Three times the neighbours wanted, on average.
        self.radius = 3.0 * NEIGHBOURS / (NUM_SEEDS * self.reach)

    def choose(self, seeds, u, others):
        """Keeps the nearest of some seeds, which are in the order of their numbers."""
        own = slice(*np.searchsorted(u, [self.expected - self.radius, self.expected + self.radius]))
        keep = np.ones(own.stop - own.start, dtype=bool)
        for stream, low, high in self.path:
            keep &= (low <= others[stream][own]) & (others[stream][own] < high)
        seeds, u = seeds[own][keep], u[own][keep]
        middle = np.searchsorted(u, self.expected)
        near = slice(max(middle - NEIGHBOURS, 0), middle + NEIGHBOURS)
        self.seeds, self.u = seeds[near], u[near]

    def measure(self, yes):
        """Threshold from the op's answers: they must be yes up to one place and no behind it."""
        yes = np.asarray(yes)
        count = int(yes.sum())
        name = f"threshold of {self.stream} expected at {self.expected}"
        assert yes[:count].all(), f"{name}: not monotone in the random number"
        low, high = (
            (self.u[count - 1] if count else 0.0),
            (self.u[count] if count < len(yes) else 1.0),
        )
        # Nothing found on one side is right only where there is nothing on that side.
        assert high - low < 4 * self.radius, f"{name}: the op switches outside {low}..{high}"
        return (low + high) / 2


def choose_seeds(thresholds):
    """One scan over all seeds per stream, for all of its thresholds."""
    by_stream = {}
    for t in thresholds:
        by_stream.setdefault(t.stream, []).append(t)
    for stream, some in by_stream.items():
        intervals = sorted((t.expected - t.radius, t.expected + t.radius) for t in some)
        edges = []  # of the union: inside between an even and an odd one
        for low, high in intervals:
            if edges and low <= edges[-1]:
                edges[-1] = max(edges[-1], high)
            else:
                edges += [low, high]
        kept = []
        for start in range(0, NUM_SEEDS, BLOCK):
            seeds = np.arange(start, start + BLOCK, dtype=np.uint32)
            u = uniforms(seeds, *stream)
            kept.append(seeds[np.searchsorted(edges, u) % 2 == 1])
        seeds = np.concatenate(kept)
        u = uniforms(seeds, *stream)
        order = np.argsort(u, kind="stable")
        seeds, u = seeds[order], u[order]
        others = {other for t in some for other, _, _ in t.path}
        others = {other: uniforms(seeds, *other) for other in others}
        for t in some:
            t.choose(seeds, u, others)


class Chain:
    """Random context-dependent laws p(. | prefix), q(. | prefix) and their verification."""

    def __init__(self, vocab, num_drafts, one_hot, temperature, draft_temperature, seed):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.num_drafts, self.one_hot = vocab, num_drafts, one_hot
        self.temperature, self.draft_temperature = temperature, draft_temperature
        self.prefixes = [
            s for n in range(num_drafts + 1) for s in itertools.product(range(vocab), repeat=n)
        ]
        self.x = {s: torch.randn(vocab, generator=g) for s in self.prefixes}
        self.y = {s: torch.randn(vocab, generator=g) * 0.7 for s in self.prefixes}
        self.p = {
            s: law(x.double().numpy(), float(np.float32(temperature))) for s, x in self.x.items()
        }
        self.q = {
            s: law(y.double().numpy(), float(np.float32(draft_temperature)))
            for s, y in self.y.items()
        }

    # --- What the formulas say ------------------------------------------------------------------
    def draft_law(self, s, x):
        return np.eye(self.vocab)[x] if self.one_hot else self.q[s]

    def accept(self, s, x):
        return min(1.0, self.p[s][x] / self.draft_law(s, x)[x])

    def residual(self, s, x):
        rest = np.maximum(self.p[s] - self.draft_law(s, x), 0.0)
        return rest / rest.sum()

    # --- What the op does -----------------------------------------------------------------------
    def path(self, drafts, accepted):
        """Conditions for the first `accepted` drafts to be accepted, away from the thresholds."""
        at_least = [self.accept(drafts[:i], drafts[i]) for i in range(accepted)]
        return [
            ((i + 1, ACCEPT), 0.0, a - 1e-5 if a < 1.0 else 1.0) for i, a in enumerate(at_least)
        ]

    def questions(self):
        """(key, drafts, threshold, answer(accepted, token)) of everything that is to be measured."""
        for s in self.prefixes:
            j = len(s)
            if j == self.num_drafts:
                yield from self.cdf(("bonus", s), s, self.p[s], (j, BONUS), self.path(s, j), j)
                continue
            seen = False
            for x in range(self.vocab):
                drafts = (*s, x) + (0,) * (self.num_drafts - j - 1)
                a = self.accept(s, x)
                own = (j + 1, ACCEPT)
                yield (
                    ("accept", s, x),
                    drafts,
                    Threshold(own, a, self.path(drafts, j)),
                    lambda accepted, token, j=j: accepted > j,
                )
                if a < 0.9 and (self.one_hot or not seen):
                    seen = True
                    path = [*self.path(drafts, j), (own, a + 1e-5, 1.0)]
                    key = ("residual", s, x if self.one_hot else None)
                    numbers = (j + 1, RESIDUAL)
                    yield from self.cdf(key, drafts, self.residual(s, x), numbers, path, j)
            assert self.one_hot or seen, "no draft of this row is rejected often enough to measure"

    def cdf(self, key, drafts, wanted, own, path, j):
        drafts = drafts + (0,) * (self.num_drafts - len(drafts))
        for v, edge in enumerate(np.cumsum(wanted)[:-1]):

            def answer(accepted, token, v=v):
                assert accepted == j
                return token <= v

            yield ((*key, v), drafts, Threshold(own, edge, path), answer)

    def measure(self, backend):
        """Measured thresholds by key, in one call of the op."""
        items = self.items
        seeds, ids, target, draft = [], [], [], []
        for _, drafts, threshold, _ in items:
            rows = torch.stack([self.x[drafts[:j]] for j in range(self.num_drafts + 1)])
            q_rows = torch.stack([self.y[drafts[:j]] for j in range(self.num_drafts)])
            n = len(threshold.seeds)
            seeds.append(torch.from_numpy(threshold.seeds.astype(np.int64)))
            ids.append(torch.tensor([0, *drafts]).repeat(n))
            target.append(rows.repeat(n, 1))
            draft.append(q_rows.repeat(n, 1, 1))
        batch = sum(len(s) for s in seeds)
        case = {
            "target_logits": torch.cat(target),
            "input_ids": torch.cat(ids),
            "cu_rows": (torch.arange(batch + 1) * (self.num_drafts + 1)).int(),
            "seeds": torch.cat(seeds),
            "positions": torch.zeros(batch, dtype=torch.int64),
            "max_drafts": self.num_drafts,
            "vocab_size": self.vocab,
            "temperature": torch.full((batch,), self.temperature),
        }
        if not self.one_hot:
            case["draft_logits"] = torch.cat(draft)
            case["draft_temperature"] = torch.full((batch,), self.draft_temperature)
        tokens, accepted, status, *_ = (t.numpy() for t in chains.run(backend, case))
        assert (status == 0).all()
        last = tokens[np.arange(batch), accepted]
        out, at = {}, 0
        for key, _, threshold, answer in items:
            n = len(threshold.seeds)
            answers = [answer(int(accepted[i]), int(last[i])) for i in range(at, at + n)]
            out[key] = threshold.measure(answers)
            at += n
        return out

    # --- Both put together ----------------------------------------------------------------------
    def target(self):
        """Joint law of the next num_drafts + 1 tokens."""
        out = np.ones((self.vocab,) * (self.num_drafts + 1))
        for s in itertools.product(range(self.vocab), repeat=self.num_drafts + 1):
            for j in range(self.num_drafts + 1):
                out[s] *= self.p[s[:j]][s[j]]
        return out

    def emitted(self, accept, residual, bonus):
        """Joint law of the emitted tokens, continued by the target, for every draft path; for drawn
        drafts averaged over the paths."""
        target = self.target()
        out = []
        for drafts in itertools.product(range(self.vocab), repeat=self.num_drafts):
            weight = np.prod([self.q[drafts[:j]][drafts[j]] for j in range(self.num_drafts)])
            result, reach = np.zeros_like(target), 1.0
            for j in range(self.num_drafts):
                s, x = drafts[:j], drafts[j]
                a = accept(s, x)
                if a < 1.0:
                    for v, mass in enumerate(residual(s, x)):
                        rest = target[(*s, v)]
                        result[(*s, v)] += reach * (1 - a) * mass * rest / rest.sum()
                reach *= a
            result[drafts] += reach * bonus(drafts)
            out.append(result if self.one_hot else weight * result)
        return out if self.one_hot else [np.sum(out, axis=0)]


def differences(measured, key, vocab):
    edges = np.array([0.0, *(measured[(*key, v)] for v in range(vocab - 1)), 1.0])
    return np.diff(edges)


CHAINS = {  # vocab, drafts, one-hot, temperature, draft temperature
    "drawn drafts V=5 K=3": (5, 3, False, 1.0, 1.0),
    "drawn drafts V=3 K=3": (3, 3, False, 0.7, 1.3),
    "drawn drafts V=2 K=1": (2, 1, False, 1.0, 0.5),
    "one-hot drafts V=4 K=2": (4, 2, True, 1.0, 1.0),
    "one-hot drafts V=5 K=1": (5, 1, True, 1.6, 1.0),
}


@functools.cache
def prepared_chains():
    """All chains with the seeds of their thresholds: found once, in one scan."""
    out = {name: Chain(*arguments, seed=11) for name, arguments in CHAINS.items()}
    for chain in out.values():
        chain.items = list(chain.questions())
    choose_seeds([item[2] for chain in out.values() for item in chain.items])
    return out


@pytest.mark.parametrize("name", CHAINS)
def test_law_by_exact_enumeration(backend, name):
    vocab, num_drafts, one_hot, *_ = CHAINS[name]
    # The law is numerics: the plain build shows it; the detectors see the same code on less.
    if backend.emulated and vocab**num_drafts > (27 if backend.name == "emu" else 5):
        pytest.skip("125 draft paths of 4 rows take minutes under emulation")
    chain = prepared_chains()[name]
    # The formulas themselves are exact ...
    target = chain.target()
    for emitted in chain.emitted(chain.accept, chain.residual, lambda s: chain.p[s]):
        assert np.abs(emitted - target).max() < FORMULA_ERROR
    # ... and so is the op.
    measured = chain.measure(backend)
    emitted = chain.emitted(
        lambda s, x: measured["accept", s, x],
        lambda s, x: (
            differences(measured, ("residual", s, x if one_hot else None), vocab)
            if ("residual", s, x if one_hot else None, 0) in measured
            else chain.residual(s, x)
        ),
        lambda s: differences(measured, ("bonus", s), vocab),
    )
    worst = max(np.abs(e - target).max() for e in emitted)
    assert worst <= LAW_ERROR, f"law error {worst:.3g}"
    marginal = max(
        np.abs((e - target).sum(axis=tuple(range(1, num_drafts + 1)))).max() for e in emitted
    )
    assert marginal <= LAW_ERROR, f"error {marginal:.3g} in the law of the first token"


@pytest.mark.parametrize("vocab, temperature", [(2, 1.0), (5, 1.0), (5, 0.6), (4, 30.0)])
def test_law_of_sample_by_exact_enumeration(backend, vocab, temperature):
    g = torch.Generator().manual_seed(vocab)
    x = torch.randn(vocab, generator=g) * 1.5
    p = law(x.double().numpy(), float(np.float32(temperature)))
    own = (0, SAMPLE)
    thresholds = [Threshold(own, edge) for edge in np.cumsum(p)[:-1]]
    choose_seeds(thresholds)
    seeds = torch.from_numpy(np.concatenate([t.seeds for t in thresholds]).astype(np.int64))
    n, on = len(seeds), backend.device
    tokens = backend.ops.sample(
        x.repeat(n, 1).to(on),
        seeds.to(on),
        torch.zeros_like(seeds).to(on),
        vocab_size=vocab,
        temperature=torch.full((n,), temperature, device=on),
    )[0]
    tokens = np.split(tokens.cpu().numpy(), np.cumsum([len(t.seeds) for t in thresholds])[:-1])
    edges = [t.measure(own <= v) for v, (t, own) in enumerate(zip(thresholds, tokens, strict=True))]
    assert np.abs(np.diff([0.0, *edges, 1.0]) - p).max() <= LAW_ERROR


# --- Chi-squared ------------------------------------------------------------------------------------
def chi_squared(tokens, p):
    """(chi2, threshold): neighbouring ids are merged until a bin expects 5; ids of mass 0 never."""
    assert (p[tokens] > 0).all(), "a token of probability 0 came out"
    counts = np.bincount(tokens, minlength=len(p))
    expected = p * len(tokens)
    # A bin ends where the running expectation passes another multiple of 5 or more.
    bins, filled = np.zeros(len(p), dtype=np.int64), 0.0
    current = 0
    for v, e in enumerate(expected):
        bins[v] = current
        filled += e
        if filled >= 5.0:
            current, filled = current + 1, 0.0
    if filled < 5.0 and current > 0:
        bins[bins == current] = current - 1
    e = np.bincount(bins, weights=expected)
    c = np.bincount(bins, weights=counts, minlength=len(e))
    df = len(e) - 1
    return ((c - e) ** 2 / e).sum(), df + 10 * np.sqrt(2 * df)


def inverse_cdf(p, u):
    return np.minimum(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"), len(p) - 1)


def drawn_drafts(seeds, q_laws):
    """Drafts from the DRAFT stream: [len(seeds), K]."""
    return np.stack(
        [inverse_cdf(q, chains.coins(seeds, 0, j + 1, DRAFT)) for j, q in enumerate(q_laws)], axis=1
    )


def emitted_tokens(backend, target, draft, trials, temperature, chunk):
    """(tokens, num_accepted) of `trials` seeds with the same rows: target [K+1, V], draft [K, V]."""
    num_drafts, vocab = draft.shape
    q_laws = [law(row.double().numpy()) for row in draft]
    rows, drafts_rows = target.repeat(chunk, 1), draft.repeat(chunk, 1, 1)
    rows, drafts_rows = rows.to(backend.device), drafts_rows.to(backend.device)
    out = []
    for start in range(0, trials, chunk):
        seeds = np.arange(start, start + chunk)
        ids = np.concatenate([np.zeros((chunk, 1), np.int64), drawn_drafts(seeds, q_laws)], axis=1)
        out.append(
            chains.run(
                backend,
                {
                    "target_logits": rows,
                    "input_ids": torch.from_numpy(ids).flatten(),
                    "cu_rows": (torch.arange(chunk + 1) * (num_drafts + 1)).int(),
                    "seeds": torch.from_numpy(seeds),
                    "positions": torch.zeros(chunk, dtype=torch.int64),
                    "max_drafts": num_drafts,
                    "vocab_size": vocab,
                    "draft_logits": drafts_rows,
                    "temperature": torch.full((chunk,), temperature),
                },
            )
        )
    assert all((part[2] == 0).all() for part in out)
    return torch.cat([part[0] for part in out]).numpy(), torch.cat(
        [part[1] for part in out]
    ).numpy()


def assert_law(tokens, accepted, target, temperature):
    """At every position, over the requests that emitted it."""
    for j, row in enumerate(target):
        there = tokens[accepted >= j, j]
        chi2, threshold = chi_squared(
            there, law(row.double().numpy(), float(np.float32(temperature)))
        )
        assert chi2 < threshold, (
            f"position {j}: chi2 {chi2:.0f} of {len(there)} tokens, limit {threshold:.0f}"
        )


def skip_large(backend):
    if backend.emulated:
        pytest.skip(
            "too many trials; its decisions are compared one by one in test_verify_chain.py"
        )


@pytest.mark.parametrize("draft_dtype", PROTOCOL["wide"]["draft_dtype"])
@pytest.mark.parametrize("temperature", PROTOCOL["wide"]["temperature"])
@pytest.mark.parametrize("num_drafts", PROTOCOL["wide"]["draft_steps"])
def test_chain_statistical_vllm_wide(backend, num_drafts, temperature, draft_dtype):
    skip_large(backend)
    vocab, trials = PROTOCOL["wide"]["vocab"], PROTOCOL["wide"]["trials"]
    g = torch.Generator().manual_seed(num_drafts)
    target = torch.randn(num_drafts + 1, vocab, generator=g)
    draft = torch.randn(num_drafts, vocab, generator=g).to(getattr(torch, draft_dtype))
    tokens, accepted = emitted_tokens(backend, target, draft, trials, temperature, 1024)
    assert_law(tokens, accepted, target, temperature)


def test_law_at_a_vocabulary_of_151936(backend):
    """Two drafts, the second drafter close to the target, so that all positions are reached."""
    skip_large(backend)
    vocab = 151936
    g = torch.Generator().manual_seed(5)
    target = torch.randn(3, vocab, generator=g) * 3
    draft = target[:2] + torch.randn(2, vocab, generator=g)
    tokens, accepted = emitted_tokens(
        backend, target.bfloat16(), draft.bfloat16(), trials=6144, temperature=1.0, chunk=64
    )
    assert (np.bincount(accepted, minlength=3) > 500).all()
    assert_law(tokens, accepted, target.bfloat16(), 1.0)


@pytest.mark.parametrize("vocab, trials", [(4096, 40960), (151936, 8192)])
def test_law_of_sample(backend, vocab, trials):
    skip_large(backend)
    x = torch.randn(vocab, generator=torch.Generator().manual_seed(6)) * 2
    seeds, on = torch.arange(trials), backend.device
    tokens = backend.ops.sample(
        x.to(on).expand(trials, vocab),
        seeds.to(on),
        torch.zeros_like(seeds).to(on),
        vocab_size=vocab,
    )[0]
    chi2, threshold = chi_squared(tokens.cpu().numpy(), law(x.double().numpy()))
    assert chi2 < threshold


def test_chain_statistical_vllm_narrow(backend):
    """The detector of shared noise: the op passes, and what it must find does not.

    With the draft's logits the negated target's, about three of four drafts are rejected, so a residual
    that reuses the number of the draft's draw, or of the accept test, shows at once."""
    vocab, trials = PROTOCOL["narrow"]["vocab"], PROTOCOL["narrow"]["trials"]
    if backend.emulated:
        trials = 2048
    g = torch.Generator().manual_seed(0)
    target = torch.randn(2, vocab, generator=g)
    draft = -target[:1]
    chunk = min(trials, 20000)
    tokens, accepted = emitted_tokens(backend, target, draft, trials, 1.0, chunk)
    rejected = (accepted == 0).mean()
    assert 0.6 < rejected < 0.85
    assert_law(tokens, accepted, target, 1.0)

    seeds = np.arange(trials)
    p, q = law(target[0].double().numpy()), law(draft[0].double().numpy())
    u_draft, u_accept, u_residual = (
        chains.coins(seeds, 0, 1, purpose) for purpose in (DRAFT, ACCEPT, RESIDUAL)
    )
    drafts = inverse_cdf(q, u_draft)
    accepts = u_accept * q[drafts] < p[drafts]

    def chi2_with(u):
        emulated = np.where(accepts, drafts, inverse_cdf(np.maximum(p - q, 0.0), u))
        return chi_squared(emulated, p)

    chi2, threshold = chi2_with(u_residual)
    assert chi2 < threshold
    if not backend.emulated:  # at full size
        for wrong in (u_draft, u_accept):
            chi2, threshold = chi2_with(wrong)
            assert chi2 > 3 * threshold, "the detector misses shared noise"
    # One coin for the accept test and the draft's own draw: another way of sharing.
    always = u_draft * q[drafts] < p[drafts]
    shared = np.where(always, drafts, inverse_cdf(np.maximum(p - q, 0.0), u_residual))
    chi2, threshold = chi_squared(shared, p)
    assert chi2 > threshold
