"""The rows of a target pass: which request each belongs to, where it stands, and what it may see.

Everything here is a tensor on the device. The one exception is marked: a pass on the CPU is cut to the rows in use,
and their number has to be known on the host for that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import BatchState, Drafts
from engine.kv_cache import slots_of
from engine.model import PassRows

ops = torch.ops.specdec


@dataclass(frozen=True)
class RoundRows:
    """The rows of one round and which request each of them belongs to."""

    rows: PassRows
    requests: Tensor  # int64 [R]; padding rows name request 0
    used: Tensor  # bool [R]
    num_used: int
    parents: Tensor | None = None  # int32 [R], node of the parent within the request; None: a chain


@dataclass(frozen=True)
class TargetPass:
    """What a pass of the target over prompt tokens or over a round's rows leaves for a drafter. The requests of
    `rows.cu_rows` are `members`; of each of them the first `num_committed` rows stay."""

    rows: PassRows
    requests: Tensor  # int64 [R], the request of every row
    members: Tensor  # int64 [M]
    hiddens: list[Tensor]  # [R, d] of every tapped layer
    num_committed: Tensor  # int64 [M]


def offsets_of(counts: Tensor) -> Tensor:
    """cu_rows int64 [B+1] of requests with so many rows each."""
    return torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)])


def owners_of(cu_rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of num_rows rows the request, whether any owns it (else request 0 and offset 0), and its number in the request."""
    row = torch.arange(num_rows, device=cu_rows.device)
    requests = torch.searchsorted(cu_rows[1:], row, right=True)
    used = requests < cu_rows.numel() - 1
    requests = requests.where(used, 0)
    return requests, used, (row - cu_rows[requests]).where(used, 0)


def lay_out_rows(
    state: BatchState, drafts: Drafts, page_size: int, row_count: Callable[[int], int]
) -> RoundRows | None:
    """Rows of the pass: per active request its anchor, then its drafts, then padding up to row_count of
    them. None when all have ended."""
    rows_per_request = state.active * (drafts.counts + 1)
    cu_rows = offsets_of(rows_per_request)
    num_used = int(cu_rows[-1])  # the one host read of a round
    if num_used == 0:
        return None

    # Offset 0 is the anchor, j draft j - 1.
    requests, used, offset = owners_of(cu_rows, row_count(num_used))
    candidates = torch.cat([state.anchor_ids[:, None], drafts.tokens], dim=1)
    begins = state.anchor_positions[requests]
    slots = slots_of(state.block_table, requests, begins + offset, page_size)
    cu_rows, max_rows = cu_rows.to(torch.int32), drafts.tokens.size(1) + 1
    parents = tree_mask = None
    depths = offset
    if drafts.tree is not None:
        root = torch.full_like(state.num_tokens, -1)
        above = torch.cat([root[:, None], drafts.tree.parents], dim=1)
        parents = above[requests, offset].to(torch.int32)
        tree_mask, depths, *_ = ops.tree_links(parents, cu_rows, max_rows)
        depths = depths.clamp(min=0)  # padding has none
    return RoundRows(
        rows=PassRows(
            token_ids=candidates[requests, offset],
            positions=begins + depths,
            slots=slots.where(used, -1),
            cu_rows=cu_rows,
            seq_lens=(state.anchor_positions + rows_per_request).to(torch.int32),
            block_table=state.block_table,
            max_rows=max_rows,
            tree_mask=tree_mask,
        ),
        requests=requests,
        used=used,
        num_used=num_used,
        parents=parents,
    )


def seen_along_path(
    layout: RoundRows, path: Tensor, num_committed: Tensor, hiddens: list[Tensor], page_size: int
) -> TargetPass:
    """Of a pass over trees the rows that stay, as a pass over them alone would have left it: row i of request b is
    node `path[b, i]`, for i below num_committed[b]. Padding up to B * path.size(1) rows."""
    cu_rows, begins = layout.rows.cu_rows.long(), layout.rows.seq_lens.long()
    begins = begins - cu_rows.diff()  # positions of the anchors
    kept = offsets_of(num_committed)
    requests, used, offset = owners_of(kept, path.numel())
    source = cu_rows[requests] + path[requests, offset]
    source = source.where(used, 0)
    positions = begins[requests] + offset
    slots = slots_of(layout.rows.block_table, requests, positions, page_size)
    rows = PassRows(
        token_ids=layout.rows.token_ids[source],
        positions=positions,
        slots=slots.where(used, -1),
        cu_rows=kept.to(torch.int32),
        seq_lens=(begins + num_committed).to(torch.int32),
        block_table=layout.rows.block_table,
        max_rows=path.size(1),
    )
    members = torch.arange(num_committed.numel(), device=path.device)
    return TargetPass(rows, requests, members, [h[source] for h in hiddens], num_committed)
