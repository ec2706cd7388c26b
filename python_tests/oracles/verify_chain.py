"""verify_chain, slowly and obviously: every request as a tree whose nodes have one child each.

`outcomes` returns per request every outcome (accepted, token, status) that rounding may decide for:
first the exact one, then, with band > 0, those reached by crossing a threshold that is not further
away than the band. oracles/verify.py has the rules.
"""

import numpy as np
import torch

from oracles.choices import Coins
from oracles.controls import GREEDY, Controls, top
from oracles.verify import Verification


def _clamp(x, low, high):
    return max(low, min(x, high))


def span(cu_rows, b, num_rows):
    """Rows of request b: clamped, so that no cu_rows leads outside."""
    begin = _clamp(int(cu_rows[b]), 0, num_rows)
    return begin, _clamp(int(cu_rows[b + 1]), begin, num_rows)


def target_ids(d2t, is_offset):
    """Target id of every draft id."""
    d2t = np.asarray(d2t)
    return d2t + np.arange(len(d2t)) if is_offset else d2t


def verification(b, choices, case):
    """The Verification of request b, None when it is inactive. case: arguments of the op by name."""
    options = dict(case)
    target, ids, cu_rows = (options.pop(k) for k in ("target_logits", "input_ids", "cu_rows"))
    vocab_size, max_drafts = options.pop("vocab_size"), options.pop("max_drafts")
    draft, draft_rows = options.pop("draft_logits", None), options.pop("draft_rows", None)
    draft_temperature = options.pop("draft_temperature", None)
    one_hot = options.pop("draft_is_one_hot", None)
    d2t, is_offset = options.pop("d2t", None), options.pop("d2t_is_offset", True)
    own = {
        k: options.pop(k)
        for k in ("method", "posterior_threshold", "posterior_alpha", "draft_controls")
        if k in options
    }
    for name in ("seeds", "positions", "num_logprobs", "logprobs_mode"):
        options.pop(name, None)
    controls = Controls(vocab_size, **options)

    begin, end = span(cu_rows, b, target.shape[0])
    if begin == end:
        return None
    rows = min(end - begin, max_drafts + 1)
    t = np.float32(1) if draft_temperature is None else np.float32(draft_temperature[b].item())
    draft_of, draft_ids = None, None
    if draft is not None:
        row = b if draft_rows is None else int(draft_rows[b])
        q_is_one_hot = one_hot is not None and bool(one_hot[b])
        if 0 <= row < draft.shape[0] and not q_is_one_hot and t >= GREEDY:
            columns = vocab_size if d2t is None else len(d2t)
            draft_of = lambda u: draft[row, u, :columns].float().numpy()  # noqa: E731
            draft_ids = None if d2t is None else target_ids(d2t, is_offset)
    return Verification(
        controls.of(b),
        [int(i) for i in ids[begin : begin + rows]],
        [[u + 1] if u + 1 < rows else [] for u in range(rows)],
        lambda u: target[begin + u, :vocab_size].float().numpy(),
        draft_of,
        choices,
        first_row=begin,
        siblings="deterministic" if draft_of is None else "sampled",
        draft_temperature=t,
        draft_ids=draft_ids,
        **own,
    )


def outcomes(
    target_logits, input_ids, cu_rows, seeds, positions, max_drafts, *, band=0.0, **options
):
    case = {
        "target_logits": target_logits,
        "input_ids": input_ids,
        "cu_rows": cu_rows,
        "max_drafts": max_drafts,
        **options,
    }
    out = []
    for b in range(cu_rows.shape[0] - 1):
        request = verification(b, Coins(int(seeds[b]), int(positions[b]), band), case)
        if request is None:
            out.append([None])
            continue
        some = [(len(o.path) - 1, o.token, o.status) for _, o in request.walk()]
        out.append(list(dict.fromkeys(some)))
    return out


def logprobs_along(paths, tokens, case, request_of):
    """(logprobs, top_ids, top_logprobs) of tokens emitted along paths of nodes, float64: [B, K+1(, n)].
    request_of(b): the Verification of request b; paths[b] is empty where it is inactive."""
    n, mode = max(case.get("num_logprobs", -1), 0), case.get("logprobs_mode", "raw")
    batch, width = tokens.shape
    out = np.zeros((batch, width)), np.full((batch, width, n), -1), np.zeros((batch, width, n))
    if case.get("num_logprobs", -1) >= 0:
        for b, path in enumerate(paths):
            for i in range(len(path)):
                row = request_of(b).row(path[: i + 1])
                values = row.logprobs(mode)
                if values is not None:
                    out[0][b, i] = values[int(tokens[b, i])]
                key = row.raw if mode == "raw" else row.z
                out[1][b, i], out[2][b, i] = top(values, key, n)
    return tuple(torch.from_numpy(t) for t in out)


def logprobs(tokens, num_accepted, case):
    """(logprobs, top_ids, top_logprobs) of given results."""

    def request_of(b):
        return verification(b, Coins(0, 0), case)

    active = [request_of(b) is not None for b in range(len(tokens))]
    counts = [int(a) + 1 if yes else 0 for a, yes in zip(num_accepted, active, strict=True)]
    return logprobs_along([list(range(c)) for c in counts], tokens, case, request_of)


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
        begin, _ = span(cu_rows, b, target_logits.shape[0])
        tokens[b, :accepted] = input_ids[begin + 1 : begin + 1 + accepted]
        tokens[b, accepted] = token
        num_accepted[b] = accepted
    return tokens, num_accepted, status
