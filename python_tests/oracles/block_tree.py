"""block_tree, slowly and obviously: every path there is, sorted; and best-first with the op's own rounding."""

import itertools
import math

import numpy as np
import torch

from oracles import build_tree as trees
from oracles import expand_tree as expansion

NAMES = trees.NAMES
BAD_TREE, DRAFT_NAN = 16, 2


def position_laws(logits, b, topk, *, vocab_size, d2t=None, d2t_is_offset=True, temperature=None):
    """Per position [(token, log-probability)] of its first tokens, None where it has no law."""
    t = 1.0 if temperature is None else float(temperature[b])
    t = t if t >= 1e-5 else 1.0
    out = []
    columns = vocab_size if d2t is None else d2t.shape[0]
    for row in logits[b]:
        x = row[:columns].double()
        lawless = torch.isnan(x).any() or torch.isposinf(x).any() or not torch.isfinite(x).any()
        found = expansion.first_tokens(row, topk, vocab_size, d2t, d2t_is_offset, t)
        out.append(None if lawless else found)
    return out


def best_first(laws, num_nodes, dtype=np.float64):
    """[(parent, rank, depth)] of the nodes 1, 2, ..: always the path of the best score whose parent is in the tree."""
    laws = [[] if law is None else law for law in laws]
    scores, depths, taken = [dtype(0.0)], [0], []
    while len(taken) + 1 < num_nodes:
        ready = []
        for parent in range(len(scores)):
            depth = depths[parent] + 1
            law = laws[depth - 1] if depth <= len(laws) else []
            for rank, (_, logprob) in enumerate(law):
                score = dtype(scores[parent] + dtype(logprob))
                if (parent, rank, depth) not in taken and score > -math.inf:
                    ready.append((-score, depth, parent, rank))
        if not ready:
            break
        score, depth, parent, rank = min(ready)
        taken.append((parent, rank, depth))
        scores.append(dtype(-score))
        depths.append(depth)
    return taken


def block_tree(logits, anchor_ids, positions, num_nodes, topk, **options):
    """Scores summed in float32, of log-probabilities rounded from float64: what the op does but for the last bits."""
    requests = []
    for b in range(logits.shape[0]):
        laws = position_laws(logits, b, topk, **options)
        taken = best_first(laws, num_nodes, np.float32)
        tokens = [laws[depth - 1][rank][0] for _, rank, depth in taken]
        *rest, status = trees.tree_of(
            [parent for parent, _, _ in taken],
            tokens,
            int(anchor_ids[b]),
            int(positions[b]),
            num_nodes,
        )
        requests.append((*rest, status | (DRAFT_NAN if None in laws else 0)))
    return trees.stacked(requests, num_nodes, anchor_ids.dtype)


def best_paths(laws, num_nodes):
    """{path of tokens} of the num_nodes - 1 best of all paths, in float64; without ties."""
    everything = []
    for depth in range(1, len(laws) + 1):
        for path in itertools.product(*laws[:depth]):
            everything.append((sum(p for _, p in path), tuple(token for token, _ in path)))
    everything.sort(key=lambda entry: -entry[0])
    return {path for _, path in everything[: num_nodes - 1]}


def random_case(generator, batch=2, rows=3, vocab=30, topk=4, num_nodes=12, dtype=torch.float32):
    return {
        "logits": (2.0 * torch.randn(batch, rows, vocab, generator=generator)).to(dtype),
        "anchor_ids": torch.randint(0, vocab, (batch,), generator=generator),
        "positions": torch.randint(0, 1000, (batch,), generator=generator),
        "num_nodes": num_nodes,
        "topk": topk,
        "vocab_size": vocab,
    }
