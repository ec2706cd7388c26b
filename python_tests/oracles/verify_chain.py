"""verify_chain, slowly and obviously: one request, one row at a time, float64.

`outcomes` returns per request every outcome (accepted, token, status) that rounding may decide for:
first the exact one, then, with band > 0, those reached by crossing a threshold that is not further
away than the band.
"""

import numpy as np
import torch

from oracles.sample import draw, finite_argmax, is_greedy, law, usable
from specdec_ext._philox import ACCEPT, BONUS, RESIDUAL, uniform

TARGET_NAN, DRAFT_NAN, BAD_ID = 1, 2, 4
MIN_RESIDUAL_MASS = 1e-6


def _clamp(x, low, high):
    return max(low, min(x, high))


def _residual_tokens(p, q, u, band):
    rest = np.maximum(p - q, 0.0)
    mass = rest.sum()
    if mass < MIN_RESIDUAL_MASS:
        tokens = draw(p, u, band)
        if band and mass > MIN_RESIDUAL_MASS - band and mass > 0:
            tokens += draw(rest, u, band / mass)
    else:
        # An error of `band` in p and q is band / mass in the residual's law.
        tokens = draw(rest, u, band / mass)
        if band and mass < MIN_RESIDUAL_MASS + band:
            tokens += draw(p, u, band)
    return list(dict.fromkeys(tokens))


def _walk(j, rows, drafts, q_rows, request, band):
    """Outcomes of a request from its row j on."""
    seed, position, temperature, draft_temperature, vocab_size = request

    def coin(index, purpose):
        return uniform(seed, position, index, purpose)

    x = rows[j]
    if not usable(x):
        return [(j, finite_argmax(x), TARGET_NAN)]
    p = law(x, temperature)
    end_of_chain = [int(np.argmax(x))] if is_greedy(temperature) else draw(p, coin(j, BONUS), band)
    draft = drafts[j] if j < len(drafts) else -1
    if not 0 <= draft < vocab_size:
        return [(j, token, 0 if draft == -1 else BAD_ID) for token in end_of_chain]
    if is_greedy(temperature):
        if draft != int(np.argmax(x)):
            return [(j, int(np.argmax(x)), 0)]
        return _walk(j + 1, rows, drafts, q_rows, request, band)
    q = np.zeros(vocab_size)
    q[draft] = 1.0
    if q_rows is not None:
        if not usable(q_rows[j]):
            return [(j, token, DRAFT_NAN) for token in end_of_chain]
        q = law(q_rows[j], draft_temperature)
    left, right = coin(j + 1, ACCEPT) * q[draft], p[draft]
    near = abs(left - right) <= band * max(left, right) and right > 0
    out = []
    for accept in [left < right] + ([not left < right] if near and band else []):
        if accept:
            out += _walk(j + 1, rows, drafts, q_rows, request, band)
        else:
            tokens = _residual_tokens(p, q, coin(j + 1, RESIDUAL), band)
            out += [(j, token, 0) for token in tokens]
    return out


def outcomes(
    target_logits,
    input_ids,
    cu_rows,
    seeds,
    positions,
    max_drafts,
    *,
    vocab_size,
    draft_logits=None,
    draft_rows=None,
    draft_temperature=None,
    draft_is_one_hot=None,
    method="token",
    temperature=None,
    band=0.0,
):
    assert method == "token"
    num_rows = target_logits.shape[0]
    out = []
    for b in range(cu_rows.shape[0] - 1):
        begin = _clamp(int(cu_rows[b]), 0, num_rows)
        end = _clamp(int(cu_rows[b + 1]), begin, num_rows)
        if begin == end:
            out.append([None])
            continue
        num_drafts = min(end - begin - 1, max_drafts)
        rows = target_logits[begin : begin + num_drafts + 1, :vocab_size].double().numpy()
        drafts = [int(i) for i in input_ids[begin + 1 : begin + 1 + num_drafts]]
        t = 1.0 if temperature is None else float(temperature[b])
        t_draft = 1.0 if draft_temperature is None else float(draft_temperature[b])
        q_rows = None
        if draft_logits is not None:
            row = b if draft_rows is None else int(draft_rows[b])
            one_hot = draft_is_one_hot is not None and bool(draft_is_one_hot[b])
            if 0 <= row < draft_logits.shape[0] and not one_hot and not is_greedy(t_draft):
                q_rows = draft_logits[row, :, :vocab_size].double().numpy()
        request = (int(seeds[b]), int(positions[b]), t, t_draft, vocab_size)
        out.append(_walk(0, rows, drafts, q_rows, request, band))
    return out


def verify_chain(target_logits, input_ids, cu_rows, seeds, positions, max_drafts, **options):
    """(tokens, num_accepted, status)."""
    every = outcomes(target_logits, input_ids, cu_rows, seeds, positions, max_drafts, **options)
    batch = len(every)
    tokens = torch.full((batch, max_drafts + 1), -1, dtype=input_ids.dtype)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    status = torch.zeros(batch, dtype=torch.int32)
    for b, (outcome, *_) in enumerate(every):
        if outcome is None:
            continue
        accepted, token, status[b] = outcome
        begin = _clamp(int(cu_rows[b]), 0, target_logits.shape[0])
        tokens[b, :accepted] = input_ids[begin + 1 : begin + 1 + accepted]
        tokens[b, accepted] = token
        num_accepted[b] = accepted
    return tokens, num_accepted, status
