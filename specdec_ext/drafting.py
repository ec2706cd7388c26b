"""Around the draft pass of block drafters (DFlash, DSpark): tensor code alone, on the tensors' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_ext._checks import check as _check
from specdec_ext._checks import fail as _fail
from specdec_ext.ops import next_round

_MOST_DRAFTS = 4096  # of a block


def prepare_kv_weights(k_weights: Sequence[Tensor], v_weights: Sequence[Tensor]) -> Tensor:
    """Stack the K and V projections of all draft layers, once after loading.

    In DFlash and DSpark the K and V of a context token are the layers' own projections of one and the same
    row of features, so one product gives them all::

        kv = row_linear(features, weight).view(R, L, 2, num_kv_heads, head_dim)      # for inject_kv

    Args:
        k_weights: of each layer ``[Hkv * D, d]``, any dtype, all of one shape, dtype and device.
        v_weights: the same.

    Returns:
        weight ``[L * 2 * Hkv * D, d]``, contiguous, without a derivative: K of layer 0, V of layer 0, K of
            layer 1, ..

    Raises:
        RuntimeError: no layers, lists of different lengths, weights that differ or are no matrices.
    """
    if len(k_weights) == 0:
        _fail("prepare_kv_weights", "k_weights", "at least one layer", "none")
    if len(v_weights) != len(k_weights):
        _fail("prepare_kv_weights", "v_weights", f"{len(k_weights)} layers", len(v_weights))
    first = k_weights[0]
    for name, weights in (("k_weights", k_weights), ("v_weights", v_weights)):
        for i, w in enumerate(weights):
            _check("prepare_kv_weights", f"{name}[{i}]", w, "[Hkv * D, d]", ())
            for what in ("shape", "dtype", "device"):
                if getattr(w, what) != getattr(first, what):
                    wanted = f"the {what} of k_weights[0], {getattr(first, what)}"
                    _fail("prepare_kv_weights", f"{name}[{i}]", wanted, getattr(w, what))
    k, v = (torch.stack([w.detach() for w in weights]) for weights in (k_weights, v_weights))
    both = torch.stack([k, v], dim=1)
    return both.reshape(-1, first.shape[1])


def draft_block(
    anchor_ids: Tensor,
    positions: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    num_drafts: int,
    mask_token_id: int,
    sample_from_anchor: bool,
    max_len: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input of a draft pass: the anchor and mask tokens of every request, and which rows are read.

    Block drafters are read in two ways that no shape tells apart; the wrong one costs nearly all
    acceptance. ``sample_from_anchor=True`` (DSpark, DeepSpec's DFlash): the block has ``num_drafts`` rows
    and row k predicts draft k + 1, row 0 being the anchor. False (z-lab's DFlash): it has
    ``num_drafts + 1`` rows, row k predicts draft k, and row 0 is not read. Draft k stands at position
    anchor + k either way.

    This is `next_round` with one emitted token, for a block that follows no verification, such as the first
    one; between rounds `next_round` itself makes the block, with ``block_len=num_drafts`` or
    ``num_drafts + 1``.

    Args:
        anchor_ids: ``[B]`` int32 or int64, the last token of each request; negative: an inactive request.
        positions: ``[B]`` int32 or int64, absolute position of the anchor: the KV cache holds those before it.
        block_table: int32 ``[B, P]``, last dimension dense: the page of every page_size places.
        page_size: places of a page, at least 1.
        num_drafts: G, 1 to 4096.
        mask_token_id: input id of the rows behind the anchor, and of requests without a block.
        sample_from_anchor: which rows predict drafts.
        max_len: int32 ``[B]``, most tokens of the request; its anchor may be the last one.

    Returns:
        input_ids: ``[B, N]``, dtype of anchor_ids; N = num_drafts, or num_drafts + 1.
        positions, slots: int64 ``[B, N]``, as of `next_round`: slot -1 where the block table has no page
            and at places from ``max_len[b]`` on. Inactive requests, and those whose anchor is their last
            token, have mask_token_id, position 0 and slot -1.
        draft_rows: int64 ``[B, num_drafts]``, rows of the flattened block ``[B * N]`` that predict drafts 1
            to num_drafts.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names op, argument, wanted, got.
    """
    ids = (torch.int32, torch.int64)
    _check("draft_block", "anchor_ids", anchor_ids, "[B]", ids)
    batch = (0, anchor_ids.shape[0], "B of anchor_ids")
    like = ("anchor_ids", anchor_ids)
    _check("draft_block", "positions", positions, "[B]", ids, [batch], like)
    _check("draft_block", "block_table", block_table, "[B, P]", (torch.int32,), [batch], like)
    if max_len is not None:
        _check("draft_block", "max_len", max_len, "[B]", (torch.int32,), [batch], like)
    if not 1 <= num_drafts <= _MOST_DRAFTS:
        _fail("draft_block", "num_drafts", f"1 to {_MOST_DRAFTS}", num_drafts)
    if page_size < 1:
        _fail("draft_block", "page_size", "at least 1", page_size)
    if sample_from_anchor not in (True, False):
        _fail("draft_block", "sample_from_anchor", "True or False", sample_from_anchor)
    before = positions.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    length = num_drafts if sample_from_anchor else num_drafts + 1
    input_ids, at, slots, *_ = next_round(
        anchor_ids[:, None],
        torch.zeros_like(before),
        before - 1,
        block_table,
        page_size=page_size,
        block_len=length,
        mask_token_id=mask_token_id,
        max_len=max_len,
    )
    rows = torch.arange(anchor_ids.shape[0] * length, device=anchor_ids.device)
    return input_ids, at, slots, rows.view(-1, length)[:, length - num_drafts :]
