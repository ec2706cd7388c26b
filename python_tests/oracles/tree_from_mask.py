"""tree_from_mask, slowly and obviously: rows as sets of nodes, one node at a time."""

import torch

from oracles.tree_links import BAD_TREE, links, spans


def unpacked(words, count):
    """The nodes below `count` whose bits are set in a mask row."""
    return {j for j in range(min(count, 32 * len(words))) if words[j // 32] >> (j % 32) & 1}


def tree_from_mask(tree_mask, cu_rows):
    """(parents, depth, first_child, next_sibling, status)."""
    num_rows = tree_mask.shape[0]
    parents, depth, first_child, next_sibling = ([-1] * num_rows for _ in range(4))
    status = []
    for begin, count in spans(cu_rows, num_rows):
        rows = [unpacked(words, count) for words in tree_mask[begin : begin + count].tolist()]
        parent_of, children = {}, {}
        for node, row in enumerate(rows):
            parent = max((j for j in row if j < node), default=-1)
            if node == 0 and row == {0}:
                parent_of[0], children[0] = -1, []
            elif parent in parent_of and row == rows[parent] | {node}:
                parent_of[node], children[node] = parent, []
                children[parent].append(node)
        first, following = links(children)
        for node, parent in parent_of.items():
            row = begin + node
            parents[row] = parent
            depth[row] = len(rows[node]) - 1
            first_child[row] = first.get(node, -1)
            next_sibling[row] = following.get(node, -1)
        status.append(BAD_TREE if len(parent_of) < count else 0)
    outputs = (parents, depth, first_child, next_sibling, status)
    return tuple(torch.tensor(t, dtype=torch.int32) for t in outputs)
