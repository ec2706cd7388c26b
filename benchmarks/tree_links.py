"""tree_links against the same from torch operations, one level of the trees at a time."""

import torch
from compare import assert_same
from oracles import tree_links as oracle

import specdec_ext


def level_by_level(parents, cu_rows, depth, batch, nodes):
    """Mask, depth and links of `batch` trees of `nodes` <= 63 nodes, `depth` levels deep."""
    tree = parents.view(batch, nodes).long()
    number = torch.arange(nodes, device=parents.device)
    bits = (torch.ones_like(number) << number).expand(batch, nodes)
    parent = tree.clamp(min=0)
    mask, levels = bits, torch.zeros_like(tree)
    for _ in range(depth):
        mask = bits | torch.where(tree < 0, 0, mask.gather(1, parent))
        levels = torch.where(tree < 0, 0, levels.gather(1, parent) + 1)
    after = tree[:, None, :] == number[:, None]  # [batch, node, child]
    first = torch.where(after.any(2), after.int().argmax(2), -1)
    beside = (tree[:, None, :] == tree[:, :, None]) & (number > number[:, None])
    following = torch.where(beside.any(2), beside.int().argmax(2), -1)
    words = torch.stack([mask, mask >> 32], 2).to(torch.int32)
    flat = (levels, first, following)
    return words.view(-1, 2), *(t.to(torch.int32).view(-1) for t in flat)


def bench(harness):
    on, nodes, max_nodes = harness.device, 60, 64
    g = torch.Generator().manual_seed(0)
    for batch in (1, 8, 64):
        inputs = []
        for _ in range(8):
            trees = [oracle.random_parents(g, nodes) for _ in range(batch)]
            parents = torch.cat(trees)
            cu_rows = torch.arange(batch + 1, dtype=torch.int32) * nodes
            depth = int(oracle.tree_links(parents, cu_rows, max_nodes)[1].max())
            inputs.append((parents.to(on), cu_rows.to(on), depth))

        def ours(tree):
            return specdec_ext.tree_links(tree[0], tree[1], max_nodes)

        def torch_ops(tree, batch=batch):
            return level_by_level(*tree, batch, nodes)

        def check(ours=ours, torch_ops=torch_ops, tree=inputs[0]):
            wanted = oracle.tree_links(tree[0].cpu(), tree[1].cpu(), max_nodes)
            for out in (ours(tree), torch_ops(tree)):
                for got, want in zip(out, wanted[: len(out)], strict=True):
                    assert_same(got.cpu(), want)

        harness.case(
            "tree_links",
            f"{batch} trees of {nodes} nodes",
            inputs=inputs,
            ours=ours,
            peers={"torch, level by level": torch_ops},
            bytes=4 * batch * nodes * (1 + 2 + 3),
            check=check,
        )
