"""Faults seen in public builders of draft trees, by id: the smallest input that shows them."""

import itertools
import math

import pytest
import torch
from compare import assert_same
from huge_strides import PICKED, ROWS, STRIDE, huge
from oracles import build_tree as oracle
from test_build_tree import BAD_TREE, POSITIONAL, case_of, check, run

NAN, INF = math.nan, math.inf
EXPAND = ["logits", "parent_scores", "topk"]


def expand(backend, logits, parent_scores, topk, **options):
    case = {"logits": logits, "parent_scores": parent_scores, "topk": topk, **options}
    case.setdefault("vocab_size", logits.shape[-1])
    return backend.call("expand_tree", EXPAND, case)


# --- H01: the order of equal scores by address ------------------------------------------------------
def test_H01_equal_scores_have_one_order(backend):
    """Six candidates of score -1 over two depths: depth, then index; parents first."""
    parents = [-1, -1, 0, 0, 1, 1]
    wanted = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    for chosen in wanted:
        out = check(backend, case_of([-1.0] * 6, parents, len(chosen) + 1))
        assert out["input_ids"].tolist() == [[5, *(10 + c for c in chosen)]]
        assert out["status"].tolist() == [0]
    for _ in range(3):  # again and again
        again = run(backend, case_of([-1.0] * 6, parents, 4))
        assert_same(again[0], torch.tensor([[5, 10, 11, 12]]))


def test_H01_equal_scores_of_a_frontier(backend):
    """Two nodes with the same row and score: by index, which is by node, then rank."""
    logits = torch.zeros(1, 2, 6)
    out = expand(backend, logits, torch.full((1, 2), -1.0), 3)
    assert out[5].tolist() == [[0, 1, 2]] and out[0].tolist() == [[0, 1, 2]]
    assert out[1].tolist() == [[0, 0, 0]]


# --- H03: NaN scores reach the tree builder -----------------------------------------------------------
@pytest.mark.parametrize("bad", [NAN, -NAN, -INF])
def test_H03_one_bad_score_is_last(backend, bad):
    scores, parents = [-1.0, bad, -2.0, -3.0, -4.0], [-1, -1, 0, 1, 0]
    out = check(backend, case_of(scores, parents, 4))
    assert out["input_ids"].tolist() == [[5, 10, 12, -1]]  # 13 hangs on the bad one
    assert out["status"].tolist() == [BAD_TREE]
    out = check(backend, case_of(scores[:3] + [-9.0, -4.0], parents, 4))
    assert out["input_ids"].tolist() == [[5, 10, 12, 14]] and out["status"].tolist() == [0]


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_H03_all_bad_leaves_the_root(backend, bad):
    out = check(backend, case_of([bad] * 5, [-1, -1, 0, 0, 1], 4))
    assert out["input_ids"].tolist() == [[5, -1, -1, -1]]
    assert out["parents"].tolist() == [[-1] * 4] and out["status"].tolist() == [BAD_TREE]
    assert out["tree_mask"].flatten().tolist() == [1, 2, 4, 8]


def test_H03_a_neighbour_sees_nothing(backend):
    """The other request of the batch is as it is alone."""
    good = case_of([-1.0, -2.0, -3.0], [-1, 0, 1], 4)
    bad = case_of([NAN] * 3, [7, 2, -5], 4)
    both = {k: torch.cat([bad[k], good[k]]) if torch.is_tensor(good[k]) else good[k] for k in good}
    for mine, alone in zip(run(backend, both), run(backend, good), strict=True):
        assert_same(mine[1:], alone)


def test_H03_rows_of_nan_expand_to_nothing(backend):
    """From the logits on: a NaN row of the drafter gives dead candidates, which make no nodes."""
    logits = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(1))
    logits[0, 1, 4] = NAN
    tokens, slot, scores, candidates, values, index = expand(backend, logits, torch.zeros(1, 2), 3)
    assert slot.tolist() == [[0, 0, 0]] and (candidates[0, 3:] == -1).all()
    parents = torch.full((1, 6), -1, dtype=torch.int32)
    out = check(backend, dict(zip(POSITIONAL, (
        candidates, values, parents, torch.tensor([5]), torch.tensor([0]), 6), strict=True)))  # fmt: skip
    assert out["input_ids"].tolist() == [[5, *tokens[0].tolist(), -1, -1]]
    everything = expand(backend, torch.full((1, 2, 9), NAN), torch.zeros(1, 2), 3)
    assert (everything[0] == -1).all() and (everything[2] == -INF).all()


# --- Rank 13 of the kinds: cycles, missing parents, more nodes than exist, mask packing ----------------
def test_every_small_parent_list(backend):
    """All parents of up to three candidates, right and wrong ones, at every size."""
    some = [-2, -1, 0, 1, 2, 3]
    lists = list(itertools.product(some, repeat=3))
    count = len(lists)
    case = {
        "candidate_tokens": torch.tensor([[7, 8, 9]]).repeat(count, 1),
        "candidate_scores": torch.tensor([[-2.0, -1.0, -3.0]]).repeat(count, 1),
        "candidate_parents": torch.tensor(lists, dtype=torch.int32),
        "anchor_ids": torch.zeros(count, dtype=torch.int64),
        "positions": torch.arange(count),
    }
    for num_nodes in (1, 2, 3, 4, 6):
        check(backend, case | {"num_nodes": num_nodes})


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 64, 65, 255, 256])
def test_masks_pack_into_words(backend, num_nodes):
    """A chain: row i has the bits 0 .. i, whatever the words' edges."""
    scores, parents = [-float(i) for i in range(num_nodes)], list(range(-1, num_nodes - 1))
    mask = check(backend, case_of(scores, parents, num_nodes))["tree_mask"][0]
    for node in range(num_nodes):
        assert mask[node].tolist() == oracle.links_oracle.packed(range(node + 1), mask.shape[1])


# --- D02, D03, D05, E01, E03: ids, maps and sizes ---------------------------------------------------------
def test_D02_padding_of_the_width_has_no_probability(backend):
    g = torch.Generator().manual_seed(2)
    logits = torch.zeros(1, 1, 8)
    logits[..., :6] = -1.0 - 4.0 * torch.rand(6, generator=g)
    out = expand(backend, logits, torch.zeros(1, 1), 8, vocab_size=6)
    assert sorted(out[0][0, :6].tolist()) == list(range(6)) and out[0][0, 6:].tolist() == [-1, -1]
    for mine, alone in zip(out, expand(backend, logits[..., :6].contiguous(), torch.zeros(1, 1), 8),
                           strict=True):  # fmt: skip
        assert_same(mine, alone)


def test_D03_d2t_holds_offsets_or_absolute_ids(backend):
    logits = torch.tensor([[[3.0, 2.0, 1.0]]])
    for d2t, offset in (([0, 2, 4], True), ([0, 3, 6], False)):
        d2t = torch.tensor(d2t)
        out = expand(
            backend, logits, torch.zeros(1, 1), 3, vocab_size=8, d2t=d2t, d2t_is_offset=offset
        )
        assert out[0].tolist() == [[0, 3, 6]] and out[3].tolist() == [[0, 3, 6]]


def test_D05_columns_past_the_map_are_ignored(backend):
    logits = torch.tensor([[[0.0, 0.0, 0.0, 1.0]]])
    d2t = torch.zeros(3, dtype=torch.int64)
    out = expand(backend, logits, torch.zeros(1, 1), 2, vocab_size=4, d2t=d2t)
    assert out[0].tolist() == [[0, 1]]


def test_E01_rows_beyond_element_2_31(backend):
    """Of either dimension of the logits. Rows of dead parents are not looked at."""
    logits = huge(backend, (ROWS, 8), (STRIDE, 1), torch.float32)
    for i, row in enumerate(PICKED):
        logits[row] = 0.0
        logits[row, i] = 9.0
    for view in (logits[:, None], logits[None]):
        scores = torch.full((ROWS,), -INF, device=backend.device)
        scores[PICKED] = 0.0
        scores = scores.view(view.shape[:2])
        out = [t.cpu() for t in backend.ops.expand_tree(view, scores, 4, vocab_size=8)]
        assert out[3].view(ROWS, 4)[PICKED, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [65536, 65537])
def test_E03_many_requests(backend, batch):
    if backend.name != "cpu" and backend.device.type == "cpu":
        pytest.skip("requests lie in grid.x, whose limit is 2^31 - 1; 65537 blocks take long here")
    logits = torch.tensor([[[1.0, 2.0]]]).repeat(batch, 1, 1)
    out = expand(backend, logits, torch.zeros(batch, 1), 1)
    assert (out[0] == 1).all()
    case = case_of([-1.0], [-1], 2)
    case = {
        k: v.repeat(batch, *[1] * (v.dim() - 1)) if torch.is_tensor(v) else v
        for k, v in case.items()
    }
    assert (run(backend, case)[0] == torch.tensor([5, 10])).all()
