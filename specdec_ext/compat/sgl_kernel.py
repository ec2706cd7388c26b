"""The speculative functions of SGLang's sgl_kernel (0.4.10), by its signatures: docs/compat_sglang.md.

A draft tree is three int64 ``[B, N]`` tensors: node 0 of a request is its root (the last committed token),
``retrive_next_token`` a node's first child, ``retrive_next_sibling`` the next child of its parent (-1: none), both
numbers within the request, and ``retrive_index`` the node's row in the flattened batch, ``b * N + node``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext._checks import check, fail
from specdec_ext.ops import tree_links

_IDS = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8)
_MAX_NODES = 1024
FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = range(3)  # tree_mask_mode


def _name(function):
    return f"compat.sgl_kernel.{function}"


def _within(index, size):
    return (index >= 0) & (index < size)


def _inverse(links):
    """Which node links to each one, -1: none. A link outside the request is none."""
    batch, nodes = links.shape
    here = torch.where(_within(links, nodes), links, nodes)
    source = torch.arange(nodes, device=links.device).expand(batch, nodes)
    return links.new_full((batch, nodes + 1), -1).scatter_(1, here, source)[:, :nodes]


def _families(next_token, next_sibling):
    """Parent of every node (-1: none) and its rank among that parent's children, from the links."""
    nodes = next_token.shape[1]
    before = _inverse(next_sibling)
    rank = (before >= 0).long()
    head = torch.where(before >= 0, before, torch.arange(nodes, device=before.device))
    for _ in range((nodes - 1).bit_length()):  # pointer doubling: a list has at most N nodes
        rank = rank + rank.gather(1, head)
        head = head.gather(1, head)
    return _inverse(next_token).gather(1, head), rank


def _walk(accepted, parent, rank, width):
    """From the root along the first accepted child: path ``[B, width]`` (-1 behind its end), its length - 1,
    and the rank ``[B, N]`` of each node's accepted child (huge: none)."""
    batch, nodes = parent.shape
    none = 2 * nodes * nodes
    at = torch.arange(nodes, device=parent.device)
    family = torch.where(parent >= 0, parent, nodes)
    key = torch.where(accepted, rank * nodes + at, none)
    best = key.new_full((batch, nodes + 1), none).scatter_reduce_(1, family, key, "amin")[:, :nodes]
    child = torch.where(best < none, best % nodes, -1)
    path = [parent.new_zeros(batch)]
    for _ in range(width - 1):
        here = child.gather(1, path[-1].clamp(min=0)[:, None])[:, 0]
        path.append(torch.where(path[-1] >= 0, here, -1))
    path = torch.stack(path, 1)
    return path, (path >= 0).sum(1) - 1, best // nodes


def _commit(predicts, accept_index, accept_token_num, retrive_index, path, count, tokens):
    """Write the path: tokens[b, i] into the slot of its node i, the slots and the number of accepted drafts."""
    slots = retrive_index.gather(1, path.clamp(min=0))
    on_path = path >= 0
    size = predicts.shape[0]
    where = torch.where(on_path & _within(slots, size), slots, size)
    # One place more takes what is not to be written.
    room = torch.nn.functional.pad(predicts, (0, 1))
    room.index_put_((where.flatten(),), tokens.to(predicts.dtype).flatten())
    predicts.copy_(room[:size])
    accept_index.copy_(torch.where(on_path, slots, accept_index))
    accept_token_num.copy_(count)


def _check_tree(name, predicts, accept_index, accept_token_num, candidates, trees):
    check(name, "candidates", candidates, "[B, N]", _IDS)
    batch, nodes = candidates.shape
    if not 1 <= nodes <= _MAX_NODES:
        fail(name, "candidates", f"1 to {_MAX_NODES} nodes", nodes)
    like = ("candidates", candidates)
    sizes = [(0, batch, "B of candidates"), (1, nodes, "N of candidates")]
    for argument, t in trees.items():
        check(name, argument, t, "[B, N]", _IDS, sizes, like)
    check(name, "accept_index", accept_index, "[B, D]", _IDS, sizes[:1], like)
    if accept_index.shape[1] < 1:
        fail(name, "accept_index", "at least one column", list(accept_index.shape))
    check(name, "accept_token_num", accept_token_num, "[B]", _IDS, sizes[:1], like)
    check(name, "predicts", predicts, "[B * N]", _IDS, (), like)
    if predicts.shape[0] < batch * nodes:
        fail(name, "predicts", f"at least {batch * nodes} elements (B * N)", predicts.shape[0])


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the path of a draft tree that the target's argmax takes.

    Tensor code: the peer takes argmax ids, not logits. Written in place; what is not named keeps the caller's fill.

    Args:
        predicts: int32 ``[B * N]``, written: at the slot of an accepted node the token behind it.
        accept_index: int32 ``[B, D]``, written: slots of the root and the accepted nodes; at most D - 1 drafts.
        accept_token_num: int32 ``[B]``, written: accepted drafts (without root and bonus token).
        candidates: int64 ``[B, N]``, ids of the nodes.
        retrive_index, retrive_next_token, retrive_next_sibling: int64 ``[B, N]``, see the head of this module.
        target_predict: int64 ``[B, N]``, the target's argmax behind every node, read by slot.

    Raises:
        RuntimeError: wrong shape, dtype or device; names function, argument, wanted, got.
    """
    name = _name("verify_tree_greedy")
    trees = {
        "retrive_index": retrive_index,
        "retrive_next_token": retrive_next_token,
        "retrive_next_sibling": retrive_next_sibling,
        "target_predict": target_predict,
    }
    _check_tree(name, predicts, accept_index, accept_token_num, candidates, trees)
    index, next_token, next_sibling, target = (t.long() for t in trees.values())
    parent, rank = _families(next_token, next_sibling)
    behind = target.flatten()[index.clamp(0, target.numel() - 1)] if target.numel() else target
    accepted = (parent >= 0) & (candidates == behind.gather(1, parent.clamp(min=0)))
    path, count, _ = _walk(accepted, parent, rank, accept_index.shape[1])
    tokens = behind.gather(1, path.clamp(min=0))
    _commit(predicts, accept_index, accept_token_num, index, path, count, tokens)


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a path of a draft tree whose siblings are distinct and were chosen without chance, then draw one token.

    At a node u with coin ``uniform_samples[b, u]``: its children in order, each accepted if its probability p is
    not 0 and the coin is below (sum of p up to it) / threshold_acc, or p >= threshold_single. With thresholds 1 the
    emitted law is the target's. Without an accepted child, or with D - 1 accepted drafts, the token comes from
    ``max(target_probs - draft_probs, 0)`` of that row (the row of D - 1 accepted drafts: target_probs alone), by
    inverse CDF with ``uniform_samples_for_final_sampling[b]``.

    Tensor code, so that the caller's coins decide: `verify_tree` draws its own. Sums are float64.

    Args:
        predicts, accept_index, accept_token_num: written, as in `verify_tree_greedy`.
        candidates, retrive_index, retrive_next_token, retrive_next_sibling: as in `verify_tree_greedy`. An id
            outside the vocabulary is rejected.
        uniform_samples: float32 ``[B, N]`` in [0, 1).
        uniform_samples_for_final_sampling: float32 ``[B]``.
        target_probs: float32 ``[B, N, V]``, row u the law behind node u.
        draft_probs: float32 ``[B, N, V]``, zeros; written: at the rows that were tested, the probability of each
            rejected child.
        threshold_single, threshold_acc: 0 to 1; below 1 more drafts are accepted and the law is not the target's.
        deterministic: no effect.

    Raises:
        RuntimeError: wrong shape, dtype, device or threshold; names function, argument, wanted, got.
    """
    name = _name("tree_speculative_sampling_target_only")
    trees = {
        "retrive_index": retrive_index,
        "retrive_next_token": retrive_next_token,
        "retrive_next_sibling": retrive_next_sibling,
    }
    _check_tree(name, predicts, accept_index, accept_token_num, candidates, trees)
    batch, nodes = candidates.shape
    like = ("candidates", candidates)
    sizes = [(0, batch, "B of candidates"), (1, nodes, "N of candidates")]
    floats = (torch.float32,)
    check(name, "uniform_samples", uniform_samples, "[B, N]", floats, sizes, like)
    final = uniform_samples_for_final_sampling
    check(name, "uniform_samples_for_final_sampling", final, "[B]", floats, sizes[:1], like)
    check(name, "target_probs", target_probs, "[B, N, V]", floats, sizes, like)
    vocab = target_probs.shape[2]
    if vocab < 1:
        fail(name, "target_probs", "V of at least 1", list(target_probs.shape))
    sizes.append((2, vocab, "V of target_probs"))
    check(name, "draft_probs", draft_probs, "[B, N, V]", floats, sizes, like)
    for argument, threshold in (
        ("threshold_single", threshold_single),
        ("threshold_acc", threshold_acc),
    ):
        if not 0 <= threshold <= 1:
            fail(name, argument, "0 to 1", threshold)
    if batch == 0:
        return
    index, next_token, next_sibling = (t.long() for t in trees.values())
    parent, rank = _families(next_token, next_sibling)
    up = parent.clamp(min=0)
    ids = candidates.long()
    usable = (parent >= 0) & _within(ids, vocab)
    row = torch.arange(batch, device=ids.device)[:, None]
    ids = ids.clamp(0, vocab - 1)
    p = torch.where(usable, target_probs[row, up, ids], 0)
    older = (parent[:, :, None] == parent[:, None, :]) & (rank[:, None, :] <= rank[:, :, None])
    running = torch.where(older, p.double()[:, None, :], 0.0).sum(2)
    coin = uniform_samples.gather(1, up)
    accepted = usable & (p > 0)
    least = coin.new_full((), max(threshold_acc, 1e-9))  # float32, as the peer's
    accepted &= (coin < running / least) | (p >= threshold_single)
    width = accept_index.shape[1]
    path, count, best = _walk(accepted, parent, rank, width)

    # What was tested and rejected: older children than the accepted one, of nodes on the path before its last place.
    tested = torch.zeros_like(parent, dtype=torch.bool)
    tested = torch.nn.functional.pad(tested, (0, 1))
    tested.scatter_(1, torch.where(path[:, :-1] >= 0, path[:, :-1], nodes), True)
    rejected = usable & tested.gather(1, up) & (rank < best.gather(1, up))
    # Every place is written once or with one value: what is not rejected goes to (0, 0), with what that place gets.
    corner = torch.where(
        (rejected & (up == 0) & (ids == 0)).any(1), target_probs[:, 0, 0], draft_probs[:, 0, 0]
    )
    value = torch.where(rejected, p, corner[:, None])
    up, ids = torch.where(rejected, up, 0), torch.where(rejected, ids, 0)
    draft_probs.index_put_((row.expand_as(ids), up, ids), value)

    last = path.gather(1, count[:, None])[:, 0]
    mine = row[:, 0]
    p, q = target_probs[mine, last], draft_probs[mine, last]
    rest = p - torch.where(count[:, None] < width - 1, q, 0)
    token = _draw(rest, p, final)
    tokens = torch.nn.functional.pad(candidates.gather(1, path[:, 1:].clamp(min=0)), (0, 1))
    place = torch.arange(width, device=ids.device)
    tokens = torch.where(place == count[:, None], token[:, None], tokens)
    _commit(predicts, accept_index, accept_token_num, index, path, count, tokens)


def _draw(rest, p, coin):
    """Inverse CDF of the positive part of rest ``[B, V]``, of p where that is nothing; V - 1 where p is nothing too."""
    rest, p = (torch.nan_to_num(x, nan=0.0).clamp(min=0) for x in (rest, p))
    mass = torch.where((rest > 0).any(1, keepdim=True), rest, p)
    cdf = mass.double().cumsum(1)
    vocab = mass.shape[1]
    at = torch.arange(vocab, device=mass.device)
    above = (cdf > coin.double()[:, None] * cdf[:, -1:]) & (mass > 0)
    first = torch.where(above, at, vocab).amin(1)
    last = torch.where(mass > 0, at, -1).amax(1)  # for a coin of 1
    return torch.where(first < vocab, first, torch.where(last >= 0, last, vocab - 1))


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links, positions and mask of EAGLE draft trees from the chosen candidates, on `tree_links`.

    Candidate c has its parent at slot ``c // topk`` of parent_list, slot 0 being the root; node n is candidate
    ``selected_index[b, n - 1]``. All outputs are written in place and whole (no fill is needed beforehand); of a
    full mask only the N columns of the tree.

    Args:
        parent_list: int64 ``[B, topk * (depth - 1) + 1]``, candidate numbers (any width when depth is 1).
        selected_index: int64 ``[B, N - 1]``, ascending.
        verified_seq_len: int64 ``[B]``, position of the root.
        tree_mask: written. Mode 0 (full): bool or uint8, flat, ``sum(N * (verified_seq_len[b] + N))`` elements. Mode 1 (tree
            only): bool or uint8, flat, ``B * N * N``. Mode 2 (bits, N at most 32): any integer type, per node 1, 2
            or 4 bytes (N to 8, 16, 32), bit j: node j is the node or an ancestor.
        positions: int64 ``[B * N]``, written: verified_seq_len plus depth.
        retrive_index, retrive_next_token, retrive_next_sibling: int64 ``[B, N]``, written.
        topk, depth: of the drafting that made the candidates.
        draft_token_num: N, 1 to 1024.
        tree_mask_mode: 0, 1 or 2.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("build_tree_kernel_efficient")
    for argument, value, low, high in (
        ("topk", topk, 1, 2**31 - 1),
        ("depth", depth, 1, 2**31 - 1),
        ("draft_token_num", draft_token_num, 1, _MAX_NODES),
        ("tree_mask_mode", tree_mask_mode, FULL_MASK, QLEN_ONLY_BITPACKING),
    ):
        if not low <= value <= high:
            fail(name, argument, f"{low} to {high}", value)
    nodes, longs = draft_token_num, (torch.int64,)
    check(name, "selected_index", selected_index, "[B, N - 1]", longs)
    batch = selected_index.shape[0]
    like = ("selected_index", selected_index)
    rows = [(0, batch, "B of selected_index")]
    check(name, "selected_index", selected_index, "[B, N - 1]", longs, [(1, nodes - 1, "N - 1")])
    width = [] if depth == 1 else [(1, topk * (depth - 1) + 1, "topk * (depth - 1) + 1")]
    check(name, "parent_list", parent_list, "[B, P]", longs, rows + width, like)
    check(name, "verified_seq_len", verified_seq_len, "[B]", _IDS, rows, like)
    check(name, "positions", positions, "[B * N]", longs, [(0, batch * nodes, "B * N")], like)
    for argument, t in (
        ("retrive_index", retrive_index),
        ("retrive_next_token", retrive_next_token),
        ("retrive_next_sibling", retrive_next_sibling),
    ):
        check(name, argument, t, "[B, N]", longs, [*rows, (1, nodes, "draft_token_num")], like)
    packed = tree_mask_mode == QLEN_ONLY_BITPACKING
    if packed and nodes > 32:
        fail(name, "draft_token_num", "at most 32 with tree_mask_mode 2", nodes)
    check(name, "tree_mask", tree_mask, "[M]", None if packed else _MASKS, (), like)
    node_bytes = (4 if nodes > 16 else 2 if nodes > 8 else 1) if packed else nodes
    if tree_mask.numel() * tree_mask.element_size() < batch * nodes * node_bytes:
        got = tree_mask.numel() * tree_mask.element_size()
        fail(name, "tree_mask", f"at least {batch * nodes * node_bytes} bytes", got)
    if batch == 0:
        return

    # The parent of a node: the root, or the place of the candidate that it continues.
    slot = selected_index // topk
    wanted = parent_list.gather(1, slot.clamp(0, parent_list.shape[1] - 1)) if nodes > 1 else slot
    found = wanted[:, :, None] == selected_index[:, None, :]
    at = torch.arange(nodes, device=slot.device)
    place = torch.where(found, at[1:], nodes).amin(2) if nodes > 1 else slot
    parents = torch.where(slot > 0, place, 0)  # N: no such candidate, outside the tree
    parents = torch.nn.functional.pad(parents, (1, 0), value=-1).to(torch.int32)
    cu_rows = torch.arange(batch + 1, device=slot.device, dtype=torch.int32) * nodes
    words, deep, first_child, next_sibling, _ = tree_links(parents.flatten(), cu_rows, nodes)

    start = verified_seq_len.long()
    positions.copy_((deep.view(batch, nodes).clamp(min=0) + start[:, None]).flatten())
    retrive_index.copy_(torch.arange(batch * nodes, device=slot.device).view(batch, nodes))
    retrive_next_token.copy_(first_child.view(batch, nodes))
    retrive_next_sibling.copy_(next_sibling.view(batch, nodes))
    words[:, 0] |= 1  # the root is seen by all, by nodes outside the tree too
    if packed:
        tree_bytes = words.view(torch.uint8)[:, :node_bytes].flatten()
        tree_mask.view(torch.uint8)[: tree_bytes.shape[0]].copy_(tree_bytes)
        return
    seen = (words[:, at // 32] >> (at % 32).to(torch.int32) & 1).view(batch, nodes, nodes)
    if tree_mask_mode == QLEN_ONLY:
        tree_mask[: batch * nodes * nodes].copy_(seen.flatten())
        return
    length = start + nodes  # of a mask row
    before = (nodes * length).cumsum(0) - nodes * length
    row = before[:, None] + length[:, None] * at + start[:, None]
    tree_mask.index_put_((row[:, :, None] + at,), seen.to(tree_mask.dtype))


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of draft trees from their masks.

    Tensor code by the peer's formulas, which read any mask below its diagonal: a node's parent is its highest
    ancestor, its depth their number, its first child the lowest node that sees it. (`tree_from_mask` takes packed
    words, wants the own bits, and leaves rows that do not fit out of the tree.)

    Args:
        tree_mask: bool or uint8, flat, at least ``B * N * N``: element [b, i, j] says that j is an ancestor of i.
        verified_seq_len: int64 ``[B]``, position of the root.
        positions: int64 ``[B * N]``, written.
        retrive_index, retrive_next_token, retrive_next_sibling: int64 ``[B, N]``, written.
        batch_size, draft_token_num: B and N, N from 1 to 1024.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("reconstruct_indices_from_tree_mask")
    batch, nodes = batch_size, draft_token_num
    if not 1 <= nodes <= _MAX_NODES:
        fail(name, "draft_token_num", f"1 to {_MAX_NODES}", nodes)
    check(name, "tree_mask", tree_mask, "[M]", _MASKS)
    if tree_mask.shape[0] < batch * nodes * nodes:
        fail(name, "tree_mask", f"at least {batch * nodes * nodes} elements", tree_mask.shape[0])
    like, rows = ("tree_mask", tree_mask), [(0, batch, "batch_size")]
    check(name, "verified_seq_len", verified_seq_len, "[B]", _IDS, rows, like)
    longs = (torch.int64,)
    check(name, "positions", positions, "[B * N]", longs, [(0, batch * nodes, "B * N")], like)
    for argument, t in (
        ("retrive_index", retrive_index),
        ("retrive_next_token", retrive_next_token),
        ("retrive_next_sibling", retrive_next_sibling),
    ):
        check(name, argument, t, "[B, N]", longs, [*rows, (1, nodes, "draft_token_num")], like)
    sees = tree_mask[: batch * nodes * nodes].view(batch, nodes, nodes) != 0
    ancestor = torch.tril(sees, -1)
    at = torch.arange(nodes, device=tree_mask.device, dtype=torch.int32)
    parent = torch.where(ancestor, at, -1).amax(2)
    child = torch.where(ancestor, at[:, None], nodes).amin(1)
    younger = (parent[:, :, None] == parent[:, None, :]) & (at > at[:, None])
    sibling = torch.where(younger, at, nodes).amin(2)
    positions.copy_((ancestor.sum(2) + verified_seq_len[:, None]).flatten())
    retrive_index.copy_(torch.arange(batch * nodes, device=at.device).view(batch, nodes))
    retrive_next_token.copy_(torch.where(child < nodes, child, -1))
    retrive_next_sibling.copy_(torch.where((parent >= 0) & (sibling < nodes), sibling, -1))


def segment_packbits(
    x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor, batch_size: int
) -> None:
    """Pack the flags of every segment into bits, lowest bit first; a segment begins with a whole byte.

    Tensor code. ``y[output_indptr[b] + i]`` holds flags 8 i to 8 i + 7 of segment b; other bytes of y are kept.

    Args:
        x: bool or uint8 ``[M]``; not 0 is set.
        input_indptr: int32 or int64 ``[B + 1]``: segment b is ``x[input_indptr[b] : input_indptr[b + 1]]``.
        output_indptr: int32 or int64 ``[B + 1]``, non-decreasing: where the bytes of segment b go.
        y: uint8, written.
        batch_size: B.

    Raises:
        RuntimeError: wrong shape, dtype or device; names function, argument, wanted, got.
    """
    name = _name("segment_packbits")
    check(name, "x", x, "[M]", _MASKS)
    for argument, t in (("input_indptr", input_indptr), ("output_indptr", output_indptr)):
        check(name, argument, t, "[B + 1]", _IDS, (), ("x", x))
        if t.shape[0] < batch_size + 1:
            fail(name, argument, f"at least {batch_size + 1} elements (B + 1)", t.shape[0])
    check(name, "y", y, "[any]", (torch.uint8,), (), ("x", x))
    if batch_size < 1 or y.shape[0] == 0:
        return
    source, goal = input_indptr[: batch_size + 1].long(), output_indptr[: batch_size + 1].long()
    byte = torch.arange(y.shape[0], device=y.device)
    # The last segment that begins at or before the byte: empty ones have no bytes.
    segment = torch.searchsorted(goal, byte, right=True) - 1
    inside = _within(segment, batch_size)
    segment = segment.clamp(0, batch_size - 1)
    flag = source[segment] + 8 * (byte - goal[segment])
    end = source[segment + 1].clamp(max=x.shape[0])
    inside &= flag < end
    bit = torch.arange(8, device=y.device)
    at = flag[:, None] + bit
    live = inside[:, None] & (at < end[:, None]) & (at >= 0)
    flags = torch.nn.functional.pad((x != 0).to(torch.uint8), (0, 1))
    eight = flags[torch.where(live, at, x.shape[0])]
    packed = (eight << bit.to(torch.uint8)).sum(1).to(torch.uint8)
    y.copy_(torch.where(inside, packed, y))
