"""The functions of FlashInfer by their signatures, row by row in float64. Random numbers are those of
specdec_ext (seed and position given); `chain` is the walk itself, for given choices (oracles/choices.py)."""

import numpy as np
import torch

from oracles.choices import BONUS, RESIDUAL, SAMPLE, Coins


def kept(weights, top_k=None, top_p=None):
    """Ids with fewer than top_k larger weights and less than top_p of the mass in larger weights."""
    w = np.asarray(weights, dtype=np.float64)
    keep = np.ones(len(w), dtype=bool)
    for i, x in enumerate(w):
        larger = w > x
        if top_k is not None and top_k > 0 and larger.sum() >= top_k:
            keep[i] = False
        if top_p is not None and top_p < 1 and larger.any() and w[larger].sum() >= top_p * w.sum():
            keep[i] = False
    return keep


def _of_row(value, row):
    return float(value[row]) if isinstance(value, torch.Tensor) else value


def _renormalised(probs, **filters):
    out = np.zeros(probs.shape)
    for b, row in enumerate(probs.double().numpy()):
        keep = kept(row, **{name: _of_row(value, b) for name, value in filters.items()})
        out[b, keep] = row[keep] / row[keep].sum()
    return torch.from_numpy(out)


def top_k_renorm_probs(probs, top_k, is_deterministic=False):
    return _renormalised(probs, top_k=top_k).to(probs.dtype)


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    return _renormalised(probs, top_p=top_p).float()


def law(logits, top_k=None, top_p=None, order="top_k_first"):
    """The law of one row of logits under the filters."""
    x = np.asarray(logits, dtype=np.float64)
    if order == "top_k_first" and top_k is not None:
        x = np.where(kept(x, top_k=top_k), x, -np.inf)
        top_k = None
    p = np.exp(x - x.max())
    p = np.where(kept(p, top_k, top_p), p, 0.0)
    return p / p.sum()


def _uniform_draws(laws, seeds, offsets):
    return [
        Coins(int(s), int(o)).draw(p, SAMPLE, 0)[0][1]
        for p, s, o in zip(laws, seeds, offsets, strict=True)
    ]


def sampling_from_logits(
    logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None
):  # fmt: skip
    rows = range(logits.shape[0]) if indices is None else indices.tolist()
    tokens = _uniform_draws([law(logits[r]) for r in rows], seed, offset)
    return torch.tensor(tokens, dtype=torch.int32 if indices is None else indices.dtype)


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True,
    generator=None, check_nan=False, seed=None, offset=None, top_k_max=None,
):  # fmt: skip
    rows = range(logits.shape[0]) if indices is None else indices.tolist()
    laws = [law(logits[r], _of_row(top_k, r), _of_row(top_p, r), filter_apply_order) for r in rows]
    tokens = _uniform_draws(laws, seed, offset)
    return torch.tensor(tokens, dtype=torch.int32 if indices is None else indices.dtype)


def chain(target, draft, ids, choose):
    """[(probability, tokens)] for rows of probabilities target [S + 1, V] and draft [S, V]."""

    def walk(j):
        if j == len(ids) or not 0 <= ids[j] < len(target[j]):
            return [(w, [x]) for w, x in choose.draw(target[j], BONUS, j)]
        x, out = ids[j], []
        for weight, yes in choose.accept(draft[j][x], target[j][x], j + 1):
            if yes:
                out += [(weight * w, [x, *tokens]) for w, tokens in walk(j + 1)]
                continue
            rest = np.maximum(target[j] - draft[j], 0.0)
            mass = rest.sum()
            rest = rest if mass >= 1e-6 else target[j]
            out += [(weight * w, [t]) for w, t in choose.draw(rest, RESIDUAL, j + 1, mass)]
        return out

    return walk(0)


def chain_speculative_sampling(
    draft_probs, draft_token_ids, target_probs, maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None, deterministic=True, generator=None, seed=None,
    offset=None,
):  # fmt: skip
    batch, drafts = draft_token_ids.shape
    out = torch.full((batch, drafts + 1), -1, dtype=torch.int32)
    emitted = maybe_output_emitted_draft_token_num
    emitted = torch.zeros(batch, dtype=torch.int32) if emitted is None else emitted
    for b in range(batch):
        p, q = target_probs[b].double().numpy(), draft_probs[b].double().numpy()
        choose = Coins(int(seed[b]), int(offset[b]))
        tokens = chain(p, q, draft_token_ids[b].tolist(), choose)[0][1]
        out[b, : len(tokens)] = torch.tensor(tokens)
        emitted[b] += len(tokens) - 1
    return out, None, emitted


def merge_state(v_a, s_a, v_b, s_b):
    a, b = s_a.double().numpy(), s_b.double().numpy()
    top = np.maximum(a, b)
    with np.errstate(invalid="ignore", divide="ignore"):
        wa = np.where(np.isneginf(a), 0.0, 2.0 ** (a - top))
        wb = np.where(np.isneginf(b), 0.0, 2.0 ** (b - top))
        s = np.log2(wa + wb) + top
        total = np.where(wa + wb > 0, wa + wb, 1.0)
    v = (wa / total)[:, :, None] * v_a.double().numpy()
    v = v + (wb / total)[:, :, None] * v_b.double().numpy()
    return torch.from_numpy(v), torch.from_numpy(s)
