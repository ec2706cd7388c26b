"""verify_tree, slowly and obviously; oracles/verify.py has the rules."""

import numpy as np
import torch

from oracles.choices import Coins
from oracles.controls import BAD_TREE, GREEDY, Controls
from oracles.verify import Verification
from oracles.verify_chain import logprobs_along, span, target_ids


def structure(parents, max_depth):
    """(children of every node, status): the valid part of a tree, down to max_depth."""
    depth, status = [0], 0 if not len(parents) or parents[0] == -1 else BAD_TREE
    children = [[] for _ in parents]
    for u in range(1, len(parents)):
        p = parents[u]
        inside = 0 <= p < u and depth[p] is not None
        depth.append(depth[p] + 1 if inside else None)
        if not inside:
            status = BAD_TREE
        elif depth[u] <= max_depth:
            children[p].append(u)
    return children, status


def own_span(cu_rows, b, num_rows):
    """Rows of request b; none where cu_rows decreases and gives some of them to others too."""
    begin, end = span(cu_rows, b, num_rows)
    entries = [span(cu_rows, i, num_rows)[0] for i in range(len(cu_rows) - 1)]
    entries.append(max(0, min(int(cu_rows[-1]), num_rows)))
    alone = max(entries[: b + 1]) <= begin and min(entries[b + 1 :]) >= end
    return (begin, end) if alone else (begin, begin)


def verification(b, choices, case):
    """(The Verification of request b, the tree's status), None when it is inactive."""
    options = dict(case)
    target, ids, cu_rows = (options.pop(k) for k in ("target_logits", "input_ids", "cu_rows"))
    parents, max_depth = options.pop("parents"), options.pop("max_depth")
    vocab_size, draft = options.pop("vocab_size"), options.pop("draft_logits", None)
    draft_temperature = options.pop("draft_temperature", None)
    d2t, is_offset = options.pop("d2t", None), options.pop("d2t_is_offset", True)
    siblings = options.pop("children", "deterministic")
    own = {k: options.pop(k) for k in ("method", "draft_controls") if k in options}
    for name in ("seeds", "positions", "num_logprobs", "logprobs_mode"):
        options.pop(name, None)
    controls = Controls(vocab_size, **options)

    begin, end = own_span(cu_rows, b, target.shape[0])
    if begin == end:
        return None
    t = np.float32(1) if draft_temperature is None else np.float32(draft_temperature[b].item())
    if not t >= GREEDY:
        siblings = "deterministic"
    draft_of, draft_ids = None, None
    if siblings != "deterministic":
        columns = vocab_size if d2t is None else len(d2t)
        draft_of = lambda u: draft[begin + u, :columns].float().numpy()  # noqa: E731
        draft_ids = None if d2t is None else target_ids(d2t, is_offset)
    children, status = structure([int(p) for p in parents[begin:end]], max_depth)
    request = Verification(
        controls.of(b),
        [int(i) for i in ids[begin:end]],
        children,
        lambda u: target[begin + u, :vocab_size].float().numpy(),
        draft_of,
        choices,
        first_row=begin,
        siblings=siblings,
        draft_temperature=t,
        draft_ids=draft_ids,
        **own,
    )
    return request, status


def outcomes(
    target_logits,
    input_ids,
    parents,
    cu_rows,
    seeds,
    positions,
    max_depth,
    *,
    band=0.0,
    **options,
):
    """Per request every (path, token, status) that rounding may decide for, the exact one first."""
    case = {
        "target_logits": target_logits,
        "input_ids": input_ids,
        "parents": parents,
        "cu_rows": cu_rows,
        "max_depth": max_depth,
        **options,
    }
    out = []
    for b in range(cu_rows.shape[0] - 1):
        request = verification(b, Coins(int(seeds[b]), int(positions[b]), band), case)
        if request is None:
            out.append([None])
            continue
        some = [(o.path, o.token, o.status | request[1]) for _, o in request[0].walk()]
        out.append(list(dict.fromkeys(some)))
    return out


def logprobs(tokens, path, case):
    """(logprobs, top_ids, top_logprobs) of given results, float64: [B, max_depth+1(, n)]."""
    paths = [[int(u) for u in row if u >= 0] for row in path]
    return logprobs_along(paths, tokens, case, lambda b: verification(b, Coins(0, 0), case)[0])


def verify_tree(target_logits, input_ids, parents, cu_rows, seeds, positions, max_depth, **options):
    """(tokens, path, num_accepted, status)."""
    every = outcomes(
        target_logits, input_ids, parents, cu_rows, seeds, positions, max_depth, **options
    )
    batch = len(every)
    tokens = torch.full((batch, max_depth + 1), -1, dtype=input_ids.dtype)
    paths = torch.full((batch, max_depth + 1), -1, dtype=torch.int32)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    status = torch.zeros(batch, dtype=torch.int32)
    for b, (outcome, *_) in enumerate(every):
        if outcome is None:
            continue
        path, token, status[b] = outcome
        begin, _ = span(cu_rows, b, target_logits.shape[0])
        accepted = len(path) - 1
        paths[b, : accepted + 1] = torch.tensor(path, dtype=torch.int32)
        if accepted:
            tokens[b, :accepted] = input_ids[begin + torch.tensor(path[1:])]
        tokens[b, accepted] = token
        num_accepted[b] = accepted
    return tokens, paths, num_accepted, status
