"""tree_from_paths: static trees from lists of paths, and what tree_links makes of them."""

import itertools
import json
import pathlib

import pytest
import torch
from compare import assert_same
from tree_cases import run_links

import specdec_ext

CASES = pathlib.Path(__file__).parent / "cases"


def links(backend, parents):
    nodes = parents.shape[0]
    cu_rows = torch.tensor([0, nodes], dtype=torch.int32)
    return dict(
        zip(
            ["tree_mask", "depth", "first_child", "next_sibling", "status"],
            run_links(backend, parents, cu_rows, nodes),
            strict=True,
        )
    )


def children(tree, node):
    """The node's children by way of the links."""
    found, child = [], int(tree["first_child"][node])
    while child >= 0:
        found.append(child)
        child = int(tree["next_sibling"][child])
    return found


@pytest.mark.parametrize("order", ["as given", "reversed"])
def test_metadata_of_a_published_tree(backend, order):
    case = json.loads((CASES / "static_tree_metadata_xformers.json").read_text())
    choices = case["choices"] if order == "as given" else case["choices"][::-1]
    parents, ranks = specdec_ext.tree_from_paths(choices)
    assert parents.dtype == ranks.dtype == torch.int32
    tree = links(backend, parents)
    nodes = range(len(parents))
    depth = tree["depth"].tolist()
    assert tree["status"].tolist() == [0]
    assert depth == case["positions"]
    assert [len(children(tree, n)) for n in nodes] == case["num_children"]
    assert ranks.tolist()[1:] == case["candidate_idx"][1:] and ranks[0] == -1
    sizes = [sum(d <= level for d in depth) for level in range(max(depth) + 1)]
    assert sizes == case["subtree_sizes"]
    # Candidates of level d are its first 3 ranks, laid out level by level behind the root.
    first = [0, 1, 4]
    indices = [first[d] + max(r, 0) for d, r in zip(depth, ranks.tolist(), strict=True)]
    assert indices == case["tree_indices"]

    def path_to(node):
        word = int(tree["tree_mask"][node, 0])
        return [j for j in nodes if word >> j & 1]

    leaves = [n for n in nodes if not children(tree, n)]
    assert sorted(path_to(n) for n in leaves) == sorted(case["paths_unordered"])
    assert [len(path_to(n)) for n in leaves] == case["path_lengths"]
    rows = case["child_nodes_first_rows_zero_based_without_root"]
    assert [[c - 1 for c in children(tree, n)] for n in range(len(rows))] == rows


def test_order_is_by_depth_then_path():
    paths = [(1,), (0, 2), (0,), (1, 0), (0, 0), (0, 2, 5), (10,), (2,)]
    parents, ranks = specdec_ext.tree_from_paths(paths)
    #         root  0  1  2  10  0,0  0,2  1,0  0,2,5
    assert parents.tolist() == [-1, 0, 0, 0, 0, 1, 1, 2, 6]
    assert ranks.tolist() == [-1, 0, 1, 2, 10, 0, 2, 0, 5]


def test_every_input_order_gives_the_same_tree():
    paths = [[0], [1], [0, 0], [0, 1], [1, 0]]
    wanted = specdec_ext.tree_from_paths(paths)
    for order in itertools.permutations(paths):
        for got, want in zip(specdec_ext.tree_from_paths(iter(order)), wanted, strict=True):
            assert_same(got, want)


def test_no_paths_is_the_root_alone():
    parents, ranks = specdec_ext.tree_from_paths([])
    assert parents.tolist() == ranks.tolist() == [-1]


def test_ranks_may_be_any_integers():
    paths = torch.tensor([[0], [3]]).numpy()
    assert specdec_ext.tree_from_paths(paths)[1].tolist() == [-1, 0, 3]
    assert specdec_ext.tree_from_paths(torch.tensor([[0], [3]]))[1].tolist() == [-1, 0, 3]


@pytest.mark.parametrize(
    "paths, message",
    [
        ([[0], [1, 0]], r"wanted every prefix of a path, got \[1, 0\] without \[1\]"),
        ([[0], [0, 1, 2]], r"got \[0, 1, 2\] without \[0, 1\]"),
        ([[0], (1,), [0]], r"wanted every path once, got \[0\] twice"),
        ([[0], []], r"wanted paths of at least one rank .*, got \[\]"),
        ([[0], [-1]], r"wanted child ranks >= 0, got \[-1\]"),
        ([[0], [0.5]], r"wanted sequences of child ranks \(integers\), got \[0.5\]"),
        ([0, 1], r"wanted sequences of child ranks \(integers\), got 0"),
        (["0"], r"wanted sequences of child ranks \(integers\), got '0'"),
    ],
)
def test_errors_say_which_path(paths, message):
    with pytest.raises(RuntimeError, match=r"tree_from_paths: paths: .*" + message):
        specdec_ext.tree_from_paths(paths)
