"""markov_draft in float64: one request, one draft at a time. Later drafts depend on earlier ones, so a run can be
followed along tokens that were drawn elsewhere."""

import dataclasses

import numpy as np
import torch

from specdec_ext import philox4x32

NAMES = ["tokens", "logprob", "lse", "confidence", "logits"]
DRAFT = 0


def uniform(seed, position, index, purpose=DRAFT):
    seed, position = seed % 2**64, position % 2**64
    counter = [position % 2**32, index, 0, (purpose + 8 * (position >> 32)) % 2**32]
    word = philox4x32(
        np.array([counter], dtype=np.uint32),
        np.array([[seed % 2**32, seed >> 32]], dtype=np.uint32),
    )[0][0]
    return float(int(word) >> 8) * 2.0**-24


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


@dataclasses.dataclass
class Step:
    """What a step draws from. `logits` [V'], `law` [columns]; no law: the request ends here."""

    logits: np.ndarray
    law: np.ndarray | None
    lse: float
    confidence: float
    greedy: bool
    u: float
    temperature: float


class Request:
    """Request b of a call; step(k, before) in order."""

    def __init__(self, case, b):
        def get(name):
            value = case.get(name)
            return None if value is None else value.double().numpy()

        self.case, self.b = case, b
        self.base = get("base_logits")[b]
        self.w1, self.w2 = get("w1"), get("w2")
        self.rank = self.w1.shape[1]
        hidden = get("hidden")
        self.hidden = np.zeros((len(self.base), 0)) if hidden is None else hidden[b]
        self.state = np.zeros(self.rank)
        self.head = case.get("head", "vanilla")
        self.get = get
        self.vocab = case["vocab_size"]
        d2t = case.get("d2t")
        if d2t is None:
            self.ids = list(range(self.vocab))
        else:
            offset = case.get("d2t_is_offset", True)
            self.ids = [int(t) + i * offset for i, t in enumerate(d2t)]
        t = case.get("temperature")
        t = 1.0 if t is None else float(t[b])
        self.greedy = not t >= np.float32(1e-5)
        self.temperature = 1.0 if self.greedy else t

    def output(self, k, e):
        h = self.hidden[k]
        if self.head == "vanilla":
            return e
        if self.head == "gated":
            return (
                sigmoid(self.get("gate_weight") @ np.concatenate([h, e]) + self.get("gate_bias"))
                * e
            )
        z = self.get("joint_weight") @ np.concatenate([self.state, e, h]) + self.get("joint_bias")
        g, c, o = np.split(z, 3)
        self.state = sigmoid(g) * self.state + (1.0 - sigmoid(g)) * np.tanh(c)
        return np.tanh(o)

    def confidence(self, k, e):
        w = self.get("confidence_weight")
        if w is None:
            return 1.0
        x = np.concatenate([self.hidden[k], e]) if len(w) > self.hidden.shape[1] else self.hidden[k]
        logit = w @ x + np.float32(self.case.get("confidence_bias", 0.0))
        sts = self.get("sts_temperature")
        return float(sigmoid(logit / (1.0 if sts is None else sts[k])))

    def step(self, k, before):
        """The Step after token `before`; None: the request has ended before it."""
        if not 0 <= before < self.vocab:
            return None
        e = self.w1[before]
        with np.errstate(all="ignore"):
            z = self.base[k, : len(self.ids)] + self.w2[: len(self.ids)] @ self.output(k, e)
            for i, target in enumerate(self.ids):
                if not 0 <= target < self.vocab:
                    z[i] = -np.inf
            logits = np.full(self.base.shape[1], -np.inf)
            logits[: len(z)] = z
            confidence = self.confidence(k, e)
        u = uniform(int(self.case["seeds"][self.b]), int(self.case["positions"][self.b]), k + 1)
        if np.isnan(z).any() or np.isposinf(z).any() or not np.isfinite(z).any():
            return Step(logits, None, 0.0, 0.0, self.greedy, u, self.temperature)
        scaled = (
            (z - z.max()) / self.temperature
            if np.isfinite(self.temperature)
            else np.where(np.isfinite(z), 0.0, -np.inf)
        )
        weights = np.exp(scaled)
        lse = float(z.max() / self.temperature + np.log(weights.sum()))
        return Step(
            logits, weights / weights.sum(), lse, confidence, self.greedy, u, self.temperature
        )

    def choices(self, step, band=0.0):
        """Target ids that the step may draw, the exact one first: thresholds within the band of the number."""
        if step.greedy:
            z = step.logits[: len(self.ids)]
            near = [i for i in range(len(z)) if z[i] >= z.max() - band * max(1.0, abs(z.max()))]
            best = int(z.argmax())
            return [self.ids[best]] + [self.ids[i] for i in near if i != best]
        ends = np.cumsum(step.law)
        starts = ends - step.law
        inside = [
            i
            for i in range(len(ends))
            if step.law[i] > 0 and starts[i] - band <= step.u < ends[i] + band
        ]
        exact = next((i for i in inside if starts[i] <= step.u < ends[i]), inside[-1])
        return [self.ids[exact]] + [self.ids[i] for i in inside if i != exact]


def markov_draft(case):
    """tokens, logprob, lse, confidence [B, G] and logits [B, G, V'] by following its own tokens."""
    return follow(case, None)


def follow(case, tokens):
    """The results along `tokens` [B, G]; None: along the exact ones."""
    batch, drafts, width = case["base_logits"].shape
    out = np.zeros((batch, drafts), dtype=np.int64) - 1
    logprob, lse, confidence = np.zeros((3, batch, drafts))
    logits = np.full((batch, drafts, width), -np.inf)
    for b in range(batch):
        request, before = Request(case, b), int(case["anchor_ids"][b])
        for k in range(drafts):
            step = request.step(k, before)
            if step is None:
                break
            logits[b, k] = step.logits
            if step.law is None:
                break
            exact = request.choices(step)[0]
            before = out[b, k] = exact if tokens is None else int(tokens[b, k])
            if before not in request.ids:
                break
            with np.errstate(divide="ignore"):
                logprob[b, k] = np.log(step.law[request.ids.index(before)])
            lse[b, k], confidence[b, k] = step.lse, step.confidence
    return [torch.from_numpy(x) for x in (out, logprob, lse, confidence, logits)]


def random_case(
    generator, batch=3, drafts=4, vocab=50, rank=8, depth=12, head="vanilla", dtype=torch.float32,
    weights=torch.float32, confidence=True, columns=None, scale=1.0, **options,
):  # fmt: skip
    """Arguments by name. columns: a reduced draft vocabulary of that many ids."""

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    width = vocab if columns is None else columns
    case = {
        "base_logits": (2.0 * randn(batch, drafts, width + 3)).to(dtype),
        "anchor_ids": torch.randint(0, vocab, (batch,), generator=generator),
        "w1": (scale * randn(vocab, rank)).to(weights),
        "w2": (randn(width, rank) * 2.0 / max(rank, 1) ** 0.5).to(weights),
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        "positions": torch.randint(0, 2**34, (batch,), generator=generator),
        "vocab_size": vocab,
        "head": head,
        "temperature": torch.rand(batch, generator=generator) * 1.5 + 0.2,
        "return_logits": True,
    }
    case["temperature"][torch.rand(batch, generator=generator) < 0.25] = 0.0
    if confidence or head != "vanilla":
        case["hidden"] = randn(batch, drafts, depth).to(dtype)
    if head == "gated":
        case["gate_weight"] = (randn(rank, depth + rank) * 0.4).to(weights)
        case["gate_bias"] = randn(rank).to(weights)
    if head == "rnn":
        case["joint_weight"] = (randn(3 * rank, 2 * rank + depth) * 0.4).to(weights)
        case["joint_bias"] = randn(3 * rank).to(weights)
    if confidence:
        case["confidence_weight"] = (randn(depth + rank) * 0.3).to(weights)
        case["confidence_bias"] = 0.25
        case["sts_temperature"] = torch.rand(drafts, generator=generator) + 0.5
    if columns is not None:
        ids = torch.randperm(vocab, generator=generator)[:columns].sort().values
        case["d2t"] = ids - torch.arange(columns)
    return case | options
