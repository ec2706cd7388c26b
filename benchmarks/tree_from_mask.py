"""tree_from_mask against the same from torch operations on the unpacked masks."""

import torch
from compare import assert_same
from oracles import tree_from_mask as oracle
from oracles import tree_links

import specdec_ext


def unpacked(tree_mask, cu_rows, batch, nodes):
    """Parents, depth and links of `batch` well-formed trees of `nodes` nodes."""
    number = torch.arange(nodes, device=tree_mask.device)
    words = tree_mask.view(batch, nodes, -1)[:, :, number // 32]
    seen = (words >> (number % 32)) & 1  # [batch, node, ancestor]
    above = torch.where(seen.bool() & (number < number[:, None]), number, -1)
    parents, depth = above.amax(2), seen.sum(2) - 1
    after = parents[:, None, :] == number[:, None]  # [batch, node, child]
    first = torch.where(after.any(2), after.int().argmax(2), -1)
    beside = (parents[:, None, :] == parents[:, :, None]) & (number > number[:, None])
    following = torch.where(beside.any(2), beside.int().argmax(2), -1)
    return tuple(t.to(torch.int32).view(-1) for t in (parents, depth, first, following))


def bench(harness):
    on, nodes = harness.device, 60
    g = torch.Generator().manual_seed(0)
    for batch in (1, 8, 64):
        inputs = []
        for _ in range(8):
            parents = torch.cat([tree_links.random_parents(g, nodes) for _ in range(batch)])
            cu_rows = torch.arange(batch + 1, dtype=torch.int32) * nodes
            mask = tree_links.tree_links(parents, cu_rows, nodes)[0]
            inputs.append((mask.to(on), cu_rows.to(on)))

        def ours(tree):
            return specdec_ext.tree_from_mask(*tree)

        def torch_ops(tree, batch=batch):
            return unpacked(*tree, batch, nodes)

        def check(ours=ours, torch_ops=torch_ops, tree=inputs[0]):
            wanted = oracle.tree_from_mask(tree[0].cpu(), tree[1].cpu())
            for out in (ours(tree), torch_ops(tree)):
                for got, want in zip(out, wanted[: len(out)], strict=True):
                    assert_same(got.cpu(), want)

        harness.case(
            "tree_from_mask",
            f"{batch} trees of {nodes} nodes",
            inputs=inputs,
            ours=ours,
            peers={"torch on unpacked masks": torch_ops},
            bytes=4 * batch * nodes * (2 + 4),
            check=check,
        )
