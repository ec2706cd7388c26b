"""sample, slowly and obviously: float64 laws, inverse CDF in vocabulary order."""

import numpy as np
import torch

from oracles.choices import SAMPLE, draw
from oracles.controls import Controls, Row, top
from specdec_ext._philox import uniform


def law(x, temperature=1.0):
    """Probabilities of a usable row without controls; one-hot at the lowest argmax when greedy."""
    request = Controls(len(x)).of(0)
    request.temperature = np.float32(temperature)
    return request.laws(np.asarray(x).astype(np.float32))[0]


def rows_of(logits, vocab_size, controls):
    every = Controls(vocab_size, **controls)
    for r in range(logits.shape[0]):
        yield Row(logits[r, :vocab_size].float().numpy(), every.of(r), r)


def allowed(logits, seeds, positions, *, vocab_size, band=0.0, **controls):
    """Per row the tokens that may come out, the exact one first."""
    out = []
    for r, row in enumerate(rows_of(logits, vocab_size, controls)):
        if row.status:
            out.append([row.fallback])
            continue
        u = uniform(int(seeds[r]), int(positions[r]), 0, SAMPLE)
        tokens = [v for p in row.laws(band) for v in draw(p, u, band)]
        out.append(list(dict.fromkeys(tokens)))
    return out


def statistics(logits, tokens, *, vocab_size, num_logprobs=-1, logprobs_mode="raw", **controls):
    """(logprob of the given tokens, lse, status, top_ids, top_logprobs) in float64."""
    n, num_rows = max(num_logprobs, 0), logits.shape[0]
    logprob, lse = np.zeros(num_rows), np.zeros(num_rows)
    status = np.zeros(num_rows, dtype=np.int32)
    top_ids, top_logprobs = np.zeros((num_rows, n), dtype=np.int64), np.zeros((num_rows, n))
    for r, row in enumerate(rows_of(logits, vocab_size, controls)):
        raw, status[r] = row.logprobs("raw"), row.status
        if raw is not None:
            best = int(np.argmax(row.raw))
            lse[r] = float(row.raw[best]) - raw[best]
        values = row.logprobs(logprobs_mode)
        if values is not None:
            logprob[r] = values[int(tokens[r])]
        key = row.raw if logprobs_mode == "raw" else row.z
        top_ids[r], top_logprobs[r] = top(values, key, n)
    return tuple(torch.from_numpy(t) for t in (logprob, lse, status, top_ids, top_logprobs))


def sample(
    logits, seeds, positions, *, vocab_size, num_logprobs=-1, logprobs_mode="raw", **controls
):
    """(tokens, logprob, lse, status, top_ids, top_logprobs)."""
    ids = allowed(logits, seeds, positions, vocab_size=vocab_size, **controls)
    tokens = torch.tensor([row[0] for row in ids], dtype=torch.int64)
    return (
        tokens,
        *statistics(
            logits,
            tokens,
            vocab_size=vocab_size,
            num_logprobs=num_logprobs,
            logprobs_mode=logprobs_mode,
            **controls,
        ),
    )
