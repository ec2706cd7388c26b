"""build_tree, slowly and obviously: sets of candidates, and one node at a time. Also EAGLE-2's expansion."""

import math

import torch

from oracles import tree_links as links_oracle

NAMES = [
    "input_ids", "parents", "tree_mask", "node_positions", "first_child", "next_sibling", "status",
]  # fmt: skip
BAD_TREE = 16


def chosen_candidates(tokens, scores, count):
    """Indices of the best usable candidates of a request."""
    usable = [
        c
        for c in range(len(tokens))
        if tokens[c] >= 0 and not math.isnan(scores[c]) and scores[c] != -math.inf
    ]
    return set(sorted(usable, key=lambda c: (-scores[c], c))[:count])


def numbered(chosen, parents):
    """Candidates in the order of their numbers from 1 up: always the lowest one whose parent has one."""
    order = []
    while True:
        ready = [c for c in chosen if c not in order and (parents[c] == -1 or parents[c] in order)]
        if not ready:
            return order
        order.append(min(ready))


def tree_of(parents_of_nodes, tokens, anchor, position, num_nodes):
    """Results of one request from the parents and tokens of its nodes 1, 2, .. (numbers in 0, 1, ..)."""
    count, words = len(parents_of_nodes) + 1, -(-num_nodes // 32)
    parents = [-1, *parents_of_nodes]
    tree = links_oracle.ancestors(parents, count)
    children = {node: [k for k in tree if k > 0 and parents[k] == node] for node in tree}
    first, following = links_oracle.links(children)
    ids = [anchor, *tokens] + [-1] * (num_nodes - count)
    nodes = range(num_nodes)
    return (
        ids,
        parents + [-1] * (num_nodes - count),
        [links_oracle.packed(tree.get(node, {node}), words) for node in nodes],
        [position + len(tree.get(node, {node})) - 1 for node in nodes],
        [first.get(node, -1) for node in nodes],
        [following.get(node, -1) for node in nodes],
        BAD_TREE if count < num_nodes else 0,
    )


def stacked(requests, num_nodes, id_dtype):
    """Tensors of the requests' results."""
    dtypes = [id_dtype, torch.int32, torch.int32, torch.int64, *[torch.int32] * 3]
    batch, words = len(requests), -(-num_nodes // 32)
    shapes = [(batch, num_nodes)] * 6 + [(batch,)]
    shapes[2] = (batch, num_nodes, words)
    return tuple(
        torch.tensor([request[i] for request in requests], dtype=dtypes[i]).view(shapes[i])
        for i in range(7)
    )


def build_tree(
    candidate_tokens, candidate_scores, candidate_parents, anchor_ids, positions, num_nodes
):
    requests = []
    for b in range(candidate_tokens.shape[0]):
        tokens, parents = candidate_tokens[b].tolist(), candidate_parents[b].tolist()
        chosen = chosen_candidates(tokens, candidate_scores[b].tolist(), num_nodes - 1)
        order = numbered(chosen, parents)
        number = {c: n for n, c in enumerate(order, 1)} | {-1: 0}
        requests.append(
            tree_of(
                [number[parents[c]] for c in order], [tokens[c] for c in order],
                int(anchor_ids[b]), int(positions[b]), num_nodes,
            )
        )  # fmt: skip
    return stacked(requests, num_nodes, candidate_tokens.dtype)


# --- EAGLE-2's expansion ------------------------------------------------------------------------------
def grow(drafter, batch, topk, depth, expand):
    """The candidates of all depths of one tree per request: (tokens, scores, parents) [B, C].

    drafter(prefixes) gives logits [B, F, V] of the frontier, from the tokens behind the anchor: [B][F] tuples.
    expand(logits, scores) is expand_tree with its results on the CPU.
    """
    scores = torch.zeros(batch, 1)
    prefixes = [[()] for _ in range(batch)]
    above = torch.full((batch, 1), -1)  # candidate of each frontier node
    tokens, values, parents, offset = [], [], [], 0
    for _ in range(depth):
        won, slot, won_scores, found, found_scores, index = expand(drafter(prefixes), scores)
        tokens.append(found)
        values.append(found_scores)
        parents.append(above.repeat_interleave(topk, 1).to(torch.int32))
        above = offset + index.long()
        offset += found.shape[1]
        prefixes = [
            [
                (*prefixes[b][int(slot[b, i])], int(won[b, i])) if slot[b, i] >= 0 else ()
                for i in range(topk)
            ]
            for b in range(batch)
        ]
        scores = won_scores
    return torch.cat(tokens, 1), torch.cat(values, 1), torch.cat(parents, 1)


def eagle_paths(law, topk, depth, num_nodes):
    """The tree of one request by EAGLE-2's own words, without candidate lists: {path: score}, the root's left out.
    law(prefix) is a row of float64 log-probabilities. Ties do not occur."""
    frontier, everything = [((), 0.0)], {}
    for _ in range(depth):
        candidates = []
        for prefix, score in frontier:
            row = law(prefix)
            for token in sorted(range(len(row)), key=lambda t: -row[t])[:topk]:
                candidates.append(((*prefix, token), score + row[token]))
        everything.update(candidates)
        frontier = sorted(candidates, key=lambda c: -c[1])[:topk]
    return dict(sorted(everything.items(), key=lambda c: -c[1])[: num_nodes - 1])


def random_case(generator, batch=3, count=20, num_nodes=12, kind="tree", dtype=torch.int64):
    """ "tree": parents come first and have the higher scores; "any": any parents; "tied": few scores."""
    tokens = torch.randint(0, 100, (batch, count), generator=generator)
    parents = torch.full((batch, count), -1, dtype=torch.int32)
    scores = torch.zeros(batch, count)
    step = torch.rand(batch, count, generator=generator)
    if kind == "tied":
        step = (step * 3).floor() / 2
    for b in range(batch):
        for c in range(count):
            if kind == "any":
                parents[b, c] = torch.randint(-2, count + 2, (1,), generator=generator)
                scores[b, c] = -float(step[b, c])
                continue
            parents[b, c] = torch.randint(-1, max(c, 1), (1,), generator=generator) if c else -1
            above = float(scores[b, parents[b, c]]) if parents[b, c] >= 0 else 0.0
            scores[b, c] = above - float(step[b, c])
    return {
        "candidate_tokens": tokens.to(dtype),
        "candidate_scores": scores,
        "candidate_parents": parents,
        "anchor_ids": torch.randint(0, 100, (batch,), generator=generator).to(dtype),
        "positions": torch.randint(0, 1000, (batch,), generator=generator),
        "num_nodes": num_nodes,
    }
