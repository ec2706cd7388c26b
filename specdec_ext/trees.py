"""Static draft trees, built once on the host."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def _fail(wanted, got):
    raise RuntimeError(f"specdec_ext.tree_from_paths: paths: wanted {wanted}, got {got}")


def _as_path(path):
    try:
        ranks = tuple(operator.index(rank) for rank in path)
    except TypeError:
        _fail("sequences of child ranks (integers)", repr(path))
    if not ranks:
        _fail("paths of at least one rank (the root is there by itself)", repr(path))
    if min(ranks) < 0:
        _fail("child ranks >= 0", repr(path))
    return ranks


def tree_from_paths(paths: Iterable[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """A static tree (the "choices" of Medusa and EAGLE) as parents, for `tree_links`.

    Every path is a node: ``[0, 2]`` is the candidate of rank 2 below the candidate of rank 0 below
    the root. Nodes are sorted by (depth, path), the root first, so the node of
    ``sorted(map(tuple, paths), key=lambda path: (len(path), path))[n - 1]`` is n.

    Args:
        paths: one path per node but the root, in any order; a path's prefixes must be there too.

    Returns:
        parents: int32 ``[N]``, N = number of paths + 1; -1 for the root.
        ranks: int32 ``[N]``, the last element of the node's path: which of its parent's candidates
            the node is. -1 for the root.

    Raises:
        RuntimeError: an empty path, a path twice, a path without its prefix, a rank below 0.
    """
    nodes = sorted((_as_path(path) for path in paths), key=lambda path: (len(path), path))
    number = {(): 0}
    parents, ranks = [-1], [-1]
    for path in nodes:
        if path in number:
            _fail("every path once", f"{list(path)} twice")
        if path[:-1] not in number:
            _fail("every prefix of a path", f"{list(path)} without {list(path[:-1])}")
        number[path] = len(parents)
        parents.append(number[path[:-1]])
        ranks.append(path[-1])
    return torch.tensor(parents, dtype=torch.int32), torch.tensor(ranks, dtype=torch.int32)
