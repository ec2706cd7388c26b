"""Where a position lies in vLLM's paged cache, and which request owns a row of a ragged batch."""

from __future__ import annotations

import torch

PADDING_SLOT_ID = -1


def owners(starts, rows):
    """Of rows 0 .. rows - 1: the request ``[rows]`` whose rows begin last at or before it, within 0 .. B - 1.

    starts: ``[B + 1]`` or ``[B]``, non-decreasing.
    """
    at = torch.arange(rows, device=starts.device)
    return (torch.searchsorted(starts.long(), at, right=True) - 1).clamp(min=0)


def blocks(block_table, request, position, per_block):
    """The block ``[...]`` that holds a position; past the table's width its last column, as the peer has it."""
    column = (position // per_block).clamp(0, block_table.shape[1] - 1)
    return block_table[request, column].long()
