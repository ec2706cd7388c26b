"""tree_links, slowly and obviously: sets of ancestors, one node at a time."""

import torch

BAD_TREE = 16


def spans(cu_rows, num_rows):
    """(first row, number of rows) of every request."""
    cu = [min(max(int(c), 0), num_rows) for c in cu_rows]
    return [(begin, max(end - begin, 0)) for begin, end in zip(cu, cu[1:], strict=False)]


def ancestors(parents, max_nodes):
    """Of one request: node -> the set of itself and its ancestors, for nodes of the tree only."""
    tree = {}
    for node, parent in enumerate(parents[:max_nodes]):
        if node == 0:
            tree[node] = {node}
        elif 0 <= parent < node and parent in tree:
            tree[node] = tree[parent] | {node}
    return tree


def links(children):
    """node -> its ascending children; returns (first_child, next_sibling) as dictionaries."""
    first = {node: kids[0] for node, kids in children.items() if kids}
    following = {a: b for kids in children.values() for a, b in zip(kids, kids[1:], strict=False)}
    return first, following


def packed(nodes, words):
    """Words of a mask with the bits of these nodes, as signed numbers."""
    row = [0] * words
    for node in nodes:
        if node < 32 * words:
            row[node // 32] |= 1 << (node % 32)
    return [word - 2**32 if word >= 2**31 else word for word in row]


def tree_links(parents, cu_rows, max_nodes):
    """(tree_mask, depth, first_child, next_sibling, status)."""
    num_rows, words = parents.shape[0], -(-max_nodes // 32)
    mask = [[0] * words for _ in range(num_rows)]
    depth, first_child, next_sibling = ([-1] * num_rows for _ in range(3))
    status = []
    for begin, count in spans(cu_rows, num_rows):
        mine = parents[begin : begin + count].tolist()
        tree = ancestors(mine, max_nodes)
        children = {node: [k for k in tree if k > 0 and mine[k] == node] for node in tree}
        first, following = links(children)
        for node in range(count):
            row = begin + node
            mask[row] = packed(tree.get(node, {node}), words)
            if node in tree:
                depth[row] = len(tree[node]) - 1
                first_child[row] = first.get(node, -1)
                next_sibling[row] = following.get(node, -1)
        bad = len(tree) < count or (count > 0 and mine[0] != -1)
        status.append(BAD_TREE if bad else 0)
    vectors = (
        torch.tensor(t, dtype=torch.int32) for t in (depth, first_child, next_sibling, status)
    )
    return torch.tensor(mask, dtype=torch.int32).view(num_rows, words), *vectors


def random_parents(generator, nodes, kind="any"):
    """Parents of a valid tree: "any", a "chain", a "star", or "deep" (mostly chains)."""
    if kind == "chain":
        return torch.arange(-1, nodes - 1, dtype=torch.int32)
    parents = torch.zeros(nodes, dtype=torch.int32)
    for node in range(1, nodes):
        low = max(0, node - 3) if kind == "deep" else 0
        if kind != "star":
            parents[node] = torch.randint(low, node, (1,), generator=generator)
    parents[:1] = -1
    return parents
