"""build_tree against the same from torch operations, one level of the trees at a time, and against the lists that
the published drafters build their trees with on the host."""

import torch
from compare import assert_same
from oracles import build_tree as oracle

import specdec_ext

TOPK, DEPTH, NODES = 10, 7, 60  # EAGLE-2's


def candidates(generator, batch):
    """Those of EAGLE-2: depth after depth, of the topk best of the depth above."""
    scores, parents = (
        [-torch.rand(batch, TOPK, generator=generator)],
        [torch.full((batch, TOPK), -1)],
    )
    offset = 0
    for _ in range(DEPTH - 1):
        best, index = scores[-1].topk(TOPK, -1)
        steps = -torch.rand(batch, TOPK, TOPK, generator=generator)
        parents.append((offset + index).repeat_interleave(TOPK, 1))
        offset += scores[-1].shape[1]
        scores.append((best[..., None] + steps).flatten(1))
    scores, parents = torch.cat(scores, 1), torch.cat(parents, 1).int()
    tokens = torch.randint(0, 32000, scores.shape, generator=generator)
    numbers = torch.arange(batch)
    return tokens, scores, parents, numbers, numbers + 100


def level_by_level(tokens, scores, parents, anchors, positions):
    """Trees of at most 63 nodes, all of whose parents are there and come first."""
    batch = tokens.shape[0]
    chosen = scores.topk(NODES - 1, -1).indices.sort(-1).values
    above = parents.gather(1, chosen).long()
    tree = torch.searchsorted(chosen, above) + 1
    tree = torch.nn.functional.pad(torch.where(above < 0, 0, tree), (1, 0), value=-1)
    ids = torch.cat([anchors[:, None], tokens.gather(1, chosen)], 1)
    number = torch.arange(NODES, device=tokens.device)
    bits = (torch.ones_like(number) << number).expand(batch, NODES)
    parent = tree.clamp(min=0)
    mask, depth = bits, torch.zeros_like(tree)
    for _ in range(DEPTH):
        mask = bits | torch.where(tree < 0, 0, mask.gather(1, parent))
        depth = torch.where(tree < 0, 0, depth.gather(1, parent) + 1)
    words = torch.stack([mask, mask >> 32], 2).to(torch.int32)
    after = tree[:, None, :] == number[:, None]
    first = torch.where(after.any(2), after.int().argmax(2), -1)
    beside = (tree[:, None, :] == tree[:, :, None]) & (number > number[:, None])
    following = torch.where(beside.any(2), beside.int().argmax(2), -1)
    status = torch.zeros(batch, dtype=torch.int32, device=tokens.device)
    return (
        ids, tree.int(), words, positions[:, None] + depth, first.int(), following.int(), status,
    )  # fmt: skip


def on_the_host(*case):
    """Chosen by torch, the rest by lists, as in EAGLE's own loop; masks as a matrix of floats."""
    tokens, scores, parents, anchors, positions = case
    chosen = scores.topk(NODES - 1, -1).indices.sort(-1).values
    out = []
    for b in range(tokens.shape[0]):
        order = chosen[b].tolist()
        number = {c: n for n, c in enumerate(order, 1)} | {-1: 0}
        tree = [number[parents[b, c].item()] for c in order]
        mask = torch.eye(NODES)
        mask[:, 0] = 1
        for node, parent in enumerate(tree, 1):
            mask[node].add_(mask[parent])
        depth = (mask > 0).sum(1) - 1
        ids = torch.cat([anchors[b : b + 1], tokens[b, chosen[b]]])
        out.append((ids, tree, mask, positions[b] + depth))
    return out


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    for batch in (1, 8, 64):
        inputs = [tuple(t.to(on) for t in candidates(g, batch)) for _ in range(8)]

        def ours(case):
            return specdec_ext.build_tree(*case, NODES)

        def torch_ops(case):
            return level_by_level(*case)

        def lists(case):
            return on_the_host(*case)

        def check(ours=ours, case=inputs[0]):
            wanted = oracle.build_tree(*[t.cpu() for t in case], NODES)
            for out in (ours(case), level_by_level(*case)):
                for mine, theirs in zip(out, wanted, strict=True):
                    assert_same(mine.cpu(), theirs)

        count = inputs[0][0].shape[1]
        harness.case(
            "build_tree",
            f"{batch} trees, {NODES} of {count} candidates",
            inputs=inputs,
            ours=ours,
            peers={"torch, level by level": torch_ops, "lists on the host": lists},
            bytes=batch * (16 * count + NODES * (28 + 8)),
            check=check,
            target=20.0,
        )
