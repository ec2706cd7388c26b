"""Faults of tree verification and of what all sampling ops share, by id: edges of the numbers, trees that
are chains, seeds under graph replay, products of row and stride, many requests."""

import chains
import pytest
import torch
import trees
from compare import assert_same
from huge_strides import PICKED, ROWS, STRIDE, huge

from specdec_ext._philox import ACCEPT, uniform

RULES = [
    (children, method)
    for children in ("deterministic", "sampled", "sampled_with_replacement")
    for method in ("token", "traversal")
]


# --- A03: a draft of probability 0 is accepted at the edge of the numbers ---------------------------
@pytest.mark.parametrize("children, method", RULES)
def test_A03_zero_probability_is_never_accepted_in_a_tree(backend, children, method):
    """Both children have p = 0, whatever q says of them; the first one's number is 0 for the first seed."""
    p = [[0.0, 0.25, 0.75, 0.0]] * 3
    seeds = [17976797, *range(30)]
    assert uniform(seeds[0], 0, 1, ACCEPT) == 0.0
    case = trees.repeated(p, [-1, 0, 0], [2, 0, 3], seeds, children=children, method=method)
    if children != "deterministic":
        case["draft_logits"] = chains.logits_of([[0.5, 0.2, 0.2, 0.1]] * 3).repeat(len(seeds), 1)
    tokens, path, num_accepted, status, *_ = trees.check(backend, case)
    assert not num_accepted.any() and not status.any()
    assert set(tokens[:, 0].tolist()) <= {1, 2}


# --- B12: a tree with one child per node behaves otherwise than the chain ---------------------------
@pytest.mark.parametrize("method", ["token", "block"])
def test_B12_a_tree_of_one_path_is_the_chain(backend, method):
    """parents [-1, 0, 1, 2], the same numbers: all fields bit for bit (random ones: test_verify_tree.py)."""
    batch, vocab = 12 if backend.emulated else 40, 7
    g = torch.Generator().manual_seed(12)
    target = torch.randn(batch * 4, vocab, generator=g)
    draft = target + torch.randn(batch * 4, vocab, generator=g)
    shared = {
        "target_logits": target,
        "input_ids": draft.roll(1, 0).argmax(1),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * 4,
        "seeds": torch.arange(batch),
        "positions": torch.arange(batch),
        "vocab_size": vocab,
        "num_logprobs": 3,
    }
    of_chain = draft.view(batch, 4, vocab)[:, :3].contiguous()
    wanted = chains.run(
        backend, {**shared, "max_drafts": 3, "draft_logits": of_chain, "method": method}
    )
    as_tree = {
        "parents": torch.tensor([-1, 0, 1, 2], dtype=torch.int32).repeat(batch),
        "max_depth": 3,
        "draft_logits": draft,
        "children": "sampled",
        "method": {"token": "token", "block": "traversal"}[method],
    }
    got = trees.run(backend, {**shared, **as_tree})
    path = got.pop(1)
    chains.assert_equal(got, wanted)
    assert len(set(wanted[1].tolist())) > 2
    for steps, accepted in zip(path.tolist(), wanted[1].tolist(), strict=True):
        assert steps == list(range(accepted + 1)) + [-1] * (3 - accepted)


# --- C04: every replay of a graph draws the same numbers --------------------------------------------
@pytest.mark.parametrize("op", ["sample", "verify_chain", "verify_tree"])
def test_C04_numbers_follow_the_tensors(backend, op):
    """Position 0, then 1, then 0 in the same tensor: the third run is the first, the second is not. Under
    a captured graph: test_gpu.py."""
    count = 20 if backend.emulated else 200
    flat = torch.zeros(count, 40)
    seeds, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    cu_rows = torch.arange(count + 1, dtype=torch.int32)
    ids, roots = torch.zeros(count, dtype=torch.int64), torch.full((count,), -1, dtype=torch.int32)
    arguments = {
        "sample": (flat, seeds, positions),
        "verify_chain": (flat, ids, cu_rows, seeds, positions, 0),
        "verify_tree": (flat, ids, roots, cu_rows, seeds, positions, 0),
    }[op]
    on = [t.to(backend.device) if torch.is_tensor(t) else t for t in arguments]
    place = next(i for i, t in enumerate(arguments) if t is positions)
    runs = []
    for position in (0, 1, 0):
        on[place].fill_(position)
        runs.append(getattr(backend.ops, op)(*on, vocab_size=40)[0].cpu())
    assert_same(runs[2], runs[0])
    assert (runs[1] != runs[0]).float().mean() > 0.8


# --- E01: products of row and stride in 32 bits -----------------------------------------------------
def one_hot(token):
    return torch.nn.functional.one_hot(torch.tensor(token), 8) * 90.0 - 45.0


def test_E01_row_strides_of_verify_tree(backend):
    """Two nodes per request: a root in rows 2046 and 2098, whose child is accepted for certain."""
    target = huge(backend, (ROWS, 8), (STRIDE, 1), torch.bfloat16)
    draft = huge(backend, (ROWS, 8), (STRIDE, 1), torch.bfloat16)
    parents = huge(backend, (ROWS,), (STRIDE,), torch.int32)
    ids = huge(backend, (ROWS,), (STRIDE,), torch.int32)
    for token, row in ((1, 2046), (3, 2098)):
        target[row], target[row + 1] = one_hot(token), one_hot(token + 1)
        draft[row] = one_hot(token)
        parents[row], ids[row + 1] = -1, token
    on = backend.device
    zeros = torch.zeros(4, dtype=torch.int64, device=on)
    cu_rows = torch.tensor([2046, 2048, 2048, 2098, 2100], dtype=torch.int32, device=on)
    for children in ("deterministic", "sampled"):
        more = {} if children == "deterministic" else {"draft_logits": draft}
        tokens, path, *_ = backend.ops.verify_tree(
            target, ids, parents, cu_rows, zeros, zeros, 1, vocab_size=8, children=children, **more
        )
        assert tokens[[0, 3]].tolist() == [[1, 2], [3, 4]], children
        assert path[[0, 3]].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("name", ["token_counts", "prompt_mask", "token_bitmask"])
def test_E01_row_strides_of_controls(backend, name):
    """The control of a far row decides which of two equal logits comes out."""
    control = huge(backend, (ROWS, 8 if name == "token_counts" else 1), (STRIDE, 1), torch.int32)
    options = {"temperature": torch.zeros(ROWS)}
    # Id 0 wins ties; in the picked rows it is penalised or banned.
    if name == "token_bitmask":
        control[:, 0] = -1
        control[PICKED, 0] = ~1
    else:
        control[PICKED, 0] = 1
        options["repetition_penalty"] = torch.full((ROWS,), 2.0)
    if name == "prompt_mask":
        options["token_counts"] = torch.zeros(ROWS, 8, dtype=torch.int32)
    on = {k: v.to(backend.device) for k, v in options.items()}
    zeros = torch.zeros(ROWS, dtype=torch.int64, device=backend.device)
    logits = torch.ones(ROWS, 8, device=backend.device)
    tokens = backend.ops.sample(logits, zeros, zeros, vocab_size=8, **on, **{name: control})[0]
    wanted = torch.zeros(ROWS, dtype=torch.int64)
    wanted[PICKED] = 1
    assert_same(tokens.cpu(), wanted)


def test_E01_row_strides_of_tree_ops(backend):
    parents = huge(backend, (ROWS,), (STRIDE,), torch.int32)
    mask = huge(backend, (ROWS, 1), (STRIDE, 1), torch.int32)
    cu_rows = torch.tensor([0, 2, 2047, 2049, 2098, 2100], dtype=torch.int32)
    for row in (0, 2047, 2098):
        parents[row], mask[row, 0], mask[row + 1, 0] = -1, 0b1, 0b11
    cu_rows = cu_rows.to(backend.device)
    links = backend.ops.tree_links(parents, cu_rows, 2)
    assert links[0][[2047, 2048, 2098, 2099], 0].tolist() == [1, 3, 1, 3]
    assert links[4][[0, 2, 4]].tolist() == [0, 0, 0]
    back = backend.ops.tree_from_mask(mask, cu_rows)
    assert back[0][[2047, 2048, 2098, 2099]].tolist() == [-1, 0, -1, 0]
    assert back[4][[0, 2, 4]].tolist() == [0, 0, 0]


# --- E03: more requests than the y dimension of a grid has ------------------------------------------
@pytest.mark.parametrize("batch", [65536, 65537])
def test_E03_many_requests(backend, batch):
    if backend.emulated:
        pytest.skip("so many blocks take minutes here; the emulator checks grids at every launch")
    vocab = 3
    seeds, positions = torch.arange(batch), torch.arange(batch)
    cu_rows = torch.arange(batch + 1, dtype=torch.int32) * 2
    best = torch.arange(2 * batch) % vocab
    logits = torch.nn.functional.one_hot(best, vocab) * 90.0
    ids = best.roll(1)
    last = best.view(batch, 2)
    tokens = backend.call(
        "sample",
        ["logits", "seeds", "positions"],
        {"logits": logits[:batch], "seeds": seeds, "positions": positions, "vocab_size": vocab},
    )[0]
    assert_same(tokens, best[:batch])
    case = {
        "target_logits": logits,
        "input_ids": ids,
        "cu_rows": cu_rows,
        "seeds": seeds,
        "positions": positions,
        "vocab_size": vocab,
    }
    tokens, accepted, *_ = chains.run(backend, {**case, "max_drafts": 1})
    assert_same(tokens, last)
    assert (accepted == 1).all()
    parents = torch.tensor([-1, 0], dtype=torch.int32).repeat(batch)
    tokens, path, *_ = trees.run(backend, {**case, "parents": parents, "max_depth": 1})
    assert_same(tokens, last)
    assert (path == torch.tensor([0, 1])).all()
