"""expand_tree, slowly and obviously: sorted lists of columns, and log-softmax in float64."""

import math

import torch

NAMES = [
    "tokens", "parent_slot", "scores", "candidate_tokens", "candidate_scores", "candidate_index",
]  # fmt: skip
DEAD = -math.inf


def target_of(column, d2t, d2t_is_offset, vocab_size):
    """Target id of a column, None without one."""
    if d2t is None:
        return column
    token = int(d2t[column]) + (column if d2t_is_offset else 0)
    return token if 0 <= token < vocab_size else None


def first_tokens(row, k, vocab_size, d2t=None, d2t_is_offset=True, temperature=1.0):
    """[(token, log-probability)] of the first k tokens of a row, fewer where there are fewer."""
    columns = vocab_size if d2t is None else d2t.shape[0]
    x = row[:columns].double()
    if torch.isnan(x).any() or torch.isposinf(x).any() or not torch.isfinite(x).any():
        return []
    logprob = torch.log_softmax(x / temperature, 0).tolist()
    logits = x.tolist()
    out = []
    for column in sorted(range(columns), key=lambda c: (-logits[c], c)):
        token = target_of(column, d2t, d2t_is_offset, vocab_size)
        if token is not None and math.isfinite(logits[column]) and len(out) < k:
            out.append((token, logprob[column]))
    return out


def candidates(logits, parent_scores, topk, *, vocab_size, d2t=None, d2t_is_offset=True):
    """(tokens, scores) [B, F * topk], scores in float64."""
    batch, nodes = logits.shape[:2]
    tokens = torch.full((batch, nodes * topk), -1, dtype=torch.int64)
    scores = torch.full((batch, nodes * topk), DEAD, dtype=torch.float64)
    for b in range(batch):
        for f in range(nodes):
            parent = float(parent_scores[b, f])
            if math.isnan(parent) or parent == DEAD:
                continue
            found = first_tokens(logits[b, f], topk, vocab_size, d2t, d2t_is_offset)
            for i, (token, logprob) in enumerate(found):
                tokens[b, f * topk + i] = token
                scores[b, f * topk + i] = parent + logprob
    return tokens, scores


def winners(candidate_tokens, candidate_scores, topk):
    """(tokens, parent_slot, scores, candidate_index) of the first topk candidates."""
    batch, count = candidate_tokens.shape
    index = torch.full((batch, topk), -1, dtype=torch.int32)
    tokens = torch.full((batch, topk), -1, dtype=torch.int64)
    scores = torch.full((batch, topk), DEAD, dtype=candidate_scores.dtype)
    for b in range(batch):
        line = candidate_scores[b].tolist()
        for i, c in enumerate(sorted(range(count), key=lambda c: (-line[c], c))[:topk]):
            index[b, i], tokens[b, i], scores[b, i] = c, candidate_tokens[b, c], line[c]
    slot = torch.where(index < 0, -1, index // topk).to(torch.int32)
    return tokens, slot, scores, index


def expand_tree(logits, parent_scores, topk, **options):
    """All six results; scores in float64."""
    tokens, scores = candidates(logits, parent_scores, topk, **options)
    won, slot, won_scores, index = winners(tokens, scores, topk)
    return won, slot, won_scores, tokens, scores, index


def random_case(generator, batch=2, nodes=3, topk=4, vocab=50, dtype=torch.float32, scale=3.0):
    return {
        "logits": (scale * torch.randn(batch, nodes, vocab, generator=generator)).to(dtype),
        "parent_scores": -3.0 * torch.rand(batch, nodes, generator=generator),
        "topk": topk,
        "vocab_size": vocab,
    }


def random_d2t(generator, columns, vocab, offset=True):
    """Distinct target ids in any order, as offsets or as they are."""
    ids = torch.randperm(vocab, generator=generator)[:columns]
    return ids - torch.arange(columns) if offset else ids
