"""sample, slowly and obviously: float64 laws, inverse CDF in vocabulary order."""

import numpy as np
import torch

from specdec_ext._philox import SAMPLE, uniform

GREEDY = 1e-5
TARGET_NAN = 1


def usable(x):
    """Whether a float64 row has a law: no NaN, no +inf, something finite."""
    return not (np.isnan(x).any() or (x == np.inf).any()) and np.isfinite(x).any()


def finite_argmax(x):
    """Lowest id of the largest finite logit, 0 when there is none."""
    return int(np.argmax(np.where(np.isfinite(x), x, -np.inf))) if np.isfinite(x).any() else 0


def is_greedy(temperature):
    return not temperature >= np.float32(GREEDY)


def law(x, temperature=1.0):
    """Probabilities of a usable row; one-hot at the lowest argmax when greedy."""
    if is_greedy(temperature):
        p = np.zeros(len(x))
        p[np.argmax(x)] = 1.0
        return p
    with np.errstate(over="ignore", invalid="ignore"):  # -inf is kept apart from T = inf
        z = np.where(x == -np.inf, -np.inf, (x - x.max()) / temperature)
        e = np.exp(z)
    return e / e.sum()


def draw(p, u, band=0.0):
    """Ids that the number u may draw from masses p: first the exact one, then (band > 0) those whose
    half-open bucket [cdf - p, cdf) lies within `band` of u. Ids of mass 0 never."""
    total = p.sum()
    cdf = np.cumsum(p) / total
    above = np.nonzero((cdf > u) & (p > 0))[0]
    exact = int(above[0]) if len(above) else int(np.nonzero(p > 0)[0][-1])
    if band == 0.0:
        return [exact]
    near = np.nonzero((p > 0) & (cdf - p / total - band <= u) & (u < cdf + band))[0]
    return [exact] + [int(v) for v in near if v != exact]


def allowed(logits, seeds, positions, *, vocab_size, temperature=None, band=0.0):
    """Per row the tokens that may come out, the exact one first."""
    out = []
    for r in range(logits.shape[0]):
        x = logits[r, :vocab_size].double().numpy()
        if not usable(x):
            out.append([finite_argmax(x)])
            continue
        t = 1.0 if temperature is None else float(temperature[r])
        u = uniform(int(seeds[r]), int(positions[r]), 0, SAMPLE)
        out.append([int(np.argmax(x))] if is_greedy(t) else draw(law(x, t), u, band))
    return out


def statistics(logits, tokens, *, vocab_size):
    """(logprob of the given tokens, lse, status) in float64."""
    x = logits[:, :vocab_size].double()
    bad = torch.tensor([not usable(row.numpy()) for row in x], dtype=torch.bool)
    lse = torch.where(bad, 0.0, torch.logsumexp(x, dim=-1))
    picked = x.gather(1, tokens.long()[:, None])[:, 0] if x.shape[0] else lse
    return torch.where(bad, 0.0, picked - lse), lse, bad.int() * TARGET_NAN


def sample(logits, seeds, positions, *, vocab_size, temperature=None):
    """(tokens, logprob, lse, status)."""
    ids = allowed(logits, seeds, positions, vocab_size=vocab_size, temperature=temperature)
    tokens = torch.tensor([row[0] for row in ids], dtype=torch.int64)
    return (tokens, *statistics(logits, tokens, vocab_size=vocab_size))
