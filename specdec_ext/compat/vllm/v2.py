"""vLLM's second sampler generation and the inputs of its speculators, by its signatures (docs/compat_vllm.md).

`rejection_sample` is that of vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils; `prepare_prefill_inputs`,
`prepare_decode_inputs` and `update_draft_inputs` those of its target_dependent_ar speculator (EAGLE, MTP);
`prepare_dflash_inputs` that of its dflash speculator (DFlash, DSpark). The inputs are tensor code, written in place
into the engine's buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext._checks import check, fail
from specdec_ext.compat.vllm._slots import PADDING_SLOT_ID, blocks, owners
from specdec_ext.ops import verify_chain

_IDS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _name(function):
    return f"compat.vllm.v2.{function}"


def rejection_sample(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: Tensor | None = None,
    watermarking: Tensor | None = None,
    watermarking_skip_mask: Tensor | None = None,
    watermark_key: int | None = None,
    fly_window_size: int = 0,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of the drafts of each request, then draw one token: `verify_chain`.

    p = softmax(target_logits), q = softmax(draft_logits / temperature); requests of temperature 0 are greedy. A
    draft of -1 ends the chain: the token comes from p of that row. Random numbers are those of this library, keyed
    by (seed, position of the request's first row).

    Args:
        target_logits: ``[R, V]`` float32, float16 or bfloat16, last dimension dense, processed (temperature and filters
            applied).
        draft_logits: ``[M, S, Vd]`` by request slot, before temperature, last dimension dense; None: drafts chosen
            without chance. The narrower of V and Vd is the vocabulary.
        draft_sampled: int32 or int64 ``[R]``: row j of a request is its draft j; row 0 is not read.
        cu_num_logits: int32 or int64 ``[B + 1]``, first row of each request.
        pos: int32 or int64 ``[R]``, position of every row.
        idx_mapping: int32 or int64 ``[B]``, slot of each request.
        expanded_idx_mapping, expanded_local_pos: not read; cu_num_logits says the same.
        temperature: float32 ``[M]`` by slot.
        seed: int64 ``[M]`` by slot.
        num_speculative_steps: S.
        use_fp64: no effect: the draw is an inverse CDF, which has no tail to be exact in.
        use_block_verification: block verification instead of token by token.
        synthetic_conditional_rates, contexts, watermarking, watermarking_skip_mask, watermark_key, fly_window_size:
            not supported, must be None or 0.

    Returns:
        sampled: int64 ``[B, S + 1]``, -1 behind the last token.
        num_sampled: int32 ``[B]``, accepted drafts plus 1; 0 for requests without rows.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("rejection_sample")
    for argument, value, what in (
        ("synthetic_conditional_rates", synthetic_conditional_rates, "synthetic acceptance"),
        ("contexts", contexts, "watermarking"),
        ("watermarking", watermarking, "watermarking"),
        ("watermarking_skip_mask", watermarking_skip_mask, "watermarking"),
        ("watermark_key", watermark_key, "watermarking"),
    ):
        if value is not None:
            fail(name, argument, f"None ({what} is not supported)", type(value).__name__)
    if fly_window_size:
        fail(name, "fly_window_size", "0 (FLy is not supported)", fly_window_size)
    check(name, "target_logits", target_logits, "[R, V]", _FLOATS)
    rows, vocab = target_logits.shape
    like, sizes = ("target_logits", target_logits), [(0, rows, "R of target_logits")]
    check(name, "draft_sampled", draft_sampled, "[R]", _IDS, sizes, like)
    check(name, "pos", pos, "[R]", _IDS, sizes, like)
    check(name, "cu_num_logits", cu_num_logits, "[B + 1]", _IDS, (), like)
    batch = cu_num_logits.shape[0] - 1
    check(name, "idx_mapping", idx_mapping, "[B]", _IDS, [(0, batch, "B")], like)
    check(name, "temperature", temperature, "[M]", (torch.float32,), (), like)
    check(name, "seed", seed, "[M]", (torch.int64,), (), like)
    if draft_logits is not None:
        sizes = [(1, num_speculative_steps, "num_speculative_steps")]
        check(name, "draft_logits", draft_logits, "[M, S, Vd]", _FLOATS, sizes, like)
        vocab = min(vocab, draft_logits.shape[2])
    slot = idx_mapping.long().clamp(min=0)
    heat = temperature[slot]
    first = cu_num_logits[:-1].long().clamp(0, max(rows - 1, 0))
    drafted = {}
    if draft_logits is not None:
        drafted = {
            "draft_logits": draft_logits,
            "draft_rows": slot.to(torch.int32),
            "draft_temperature": heat,
        }
    tokens, accepted, *_ = verify_chain(
        target_logits,
        draft_sampled,
        cu_num_logits.to(torch.int32),
        seed[slot],
        pos[first] if rows else pos.new_zeros(batch),
        num_speculative_steps,
        vocab_size=vocab,
        method="block" if use_block_verification else "token",
        temperature=torch.where(heat == 0, 0.0, 1.0),  # the logits have theirs already
        **drafted,
    )
    active = cu_num_logits.diff() > 0
    return tokens.long(), (accepted + active).to(torch.int32)


def _next_tokens(slot, num_sampled, last_sampled, next_prefill_tokens):
    """The token behind each request's valid ones: the last sampled one, or during a prefill the prompt's next."""
    return torch.where(
        num_sampled[: slot.shape[0]] > 0,
        last_sampled.flatten()[slot].long(),
        next_prefill_tokens[slot].long(),
    )


def prepare_prefill_inputs(
    last_token_indices: Tensor,
    current_draft_step: Tensor,
    input_buffers,
    input_batch,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    max_num_reqs: int,
) -> Tensor:
    """The first pass of an autoregressive drafter: the target's tokens shifted by one, without the rejected ones.

    Args:
        last_token_indices: ``[>= max_num_reqs]``, written: the last valid row of each request; 0 behind the requests.
        current_draft_step: one element, set to 0.
        input_buffers: has ``input_ids``, ``positions`` (rows of rejected tokens are kept), ``query_start_loc``
            ``[max_num_reqs + 1]`` and ``seq_lens`` ``[max_num_reqs]``, written.
        input_batch: has ``num_reqs``, ``input_ids``, ``positions``, ``idx_mapping``, ``query_start_loc``, ``seq_lens``.
        num_sampled, num_rejected: ``[>= num_reqs]``.
        last_sampled, next_prefill_tokens: by slot.
        max_num_reqs: requests of the buffers.

    Returns:
        last_token_indices.
    """
    batch = input_batch.num_reqs
    starts = input_batch.query_start_loc[: batch + 1].long()
    slot = input_batch.idx_mapping[:batch].long()
    token = _next_tokens(slot, num_sampled, last_sampled, next_prefill_tokens)
    last = starts[1:] - num_rejected[:batch] - 1
    source, goal = input_batch.input_ids, input_buffers.input_ids
    rows = min(source.shape[0], goal.shape[0])
    at = torch.arange(rows, device=source.device)
    mine = owners(starts[:-1], rows)
    end = last[mine]
    shifted = torch.where(at == end, token[mine], source[(at + 1).clamp(max=rows - 1)].long())
    valid = (at <= end) & (at >= starts[0])
    goal[:rows].copy_(torch.where(valid, shifted, goal[:rows]))
    positions = input_buffers.positions[:rows]
    positions.copy_(torch.where(valid, input_batch.positions[:rows], positions))
    last_token_indices[:batch].copy_(last)
    last_token_indices[batch:max_num_reqs].zero_()
    input_buffers.query_start_loc[:batch].copy_(starts[:-1])
    input_buffers.query_start_loc[batch : max_num_reqs + 1].copy_(
        starts[-1:].expand(max_num_reqs + 1 - batch)
    )
    input_buffers.seq_lens[:batch].copy_(input_batch.seq_lens[:batch])
    input_buffers.seq_lens[batch:max_num_reqs].zero_()
    current_draft_step.zero_()
    return last_token_indices


def prepare_decode_inputs(
    draft_tokens: Tensor,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_buffers,
    sample_src_positions: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool = True,
) -> None:
    """The first one-row pass of an autoregressive drafter, behind its first draft.

    Args:
        draft_tokens: ``[B]`` or ``[B, S]`` (its first column), the first drafts.
        target_seq_lens, num_rejected: ``[>= B]``.
        input_buffers: has ``input_ids``, ``positions``, ``query_start_loc`` ``[max_num_reqs + 1]`` and ``seq_lens``
            ``[max_num_reqs]``, written.
        sample_src_positions: ``[>= B]``, one is added.
        max_model_len: positions stay below, lengths at most this.
        advance_draft_positions: whether the drafter's positions go on from row to row.
    """
    batch = draft_tokens.shape[0]
    tokens = draft_tokens if draft_tokens.dim() == 1 else draft_tokens[:, 0]
    input_buffers.input_ids[:batch].copy_(tokens)
    sample_src_positions[:batch].add_(1)
    length = target_seq_lens[:batch] - num_rejected[:batch]
    if advance_draft_positions:
        length = (length + 1).clamp(max=max_model_len)
        positions = input_buffers.positions[:batch]
        positions.copy_((positions + 1).clamp(max=max_model_len - 1))
    input_buffers.seq_lens[:batch].copy_(length)
    input_buffers.seq_lens[batch:max_num_reqs].zero_()
    starts = torch.arange(max_num_reqs + 1, device=length.device).clamp(max=batch)
    input_buffers.query_start_loc[: max_num_reqs + 1].copy_(starts)


def update_draft_inputs(
    draft_tokens: Tensor,
    current_draft_step: Tensor,
    hidden_states: Tensor,
    output_draft_tokens: Tensor,
    next_input_hidden_states: Tensor,
    input_buffers,
    sample_src_positions: Tensor,
    num_reqs: int,
    max_model_len: int,
    num_speculative_steps: int,
    advance_draft_positions: bool = True,
) -> None:
    """Keep the drafts of one step and prepare the next one; after the last step only the drafts are kept.

    Args:
        draft_tokens: ``[>= num_reqs]``, the drafts of this step.
        current_draft_step: one element on the device, 0 .. num_speculative_steps - 1; not advanced here.
        hidden_states: ``[>= num_reqs, d]``.
        output_draft_tokens: ``[>= num_reqs, num_speculative_steps]``, column current_draft_step written.
        next_input_hidden_states: ``[>= num_reqs, >= d]``, written.
        input_buffers: has ``input_ids``, ``positions``, ``seq_lens``, written.
        sample_src_positions: ``[>= num_reqs]``, one is added.
        max_model_len: positions stay below, lengths at most this.
    """
    step = current_draft_step.reshape(()).long()
    tokens = draft_tokens[:num_reqs]
    column = torch.arange(output_draft_tokens.shape[1], device=tokens.device) == step
    drafts = output_draft_tokens[:num_reqs]
    drafts.copy_(torch.where(column, tokens[:, None], drafts))
    last = step >= num_speculative_steps - 1

    def update(buffer, value):
        buffer.copy_(torch.where(last, buffer, value))

    positions, lengths = input_buffers.positions[:num_reqs], input_buffers.seq_lens[:num_reqs]
    sampled = sample_src_positions[:num_reqs]
    update(sampled, sampled + 1)
    update(input_buffers.input_ids[:num_reqs], tokens)
    width = hidden_states.shape[1]
    update(next_input_hidden_states[:num_reqs, :width], hidden_states[:num_reqs])
    if advance_draft_positions:
        update(positions, (positions + 1).clamp(max=max_model_len - 1))
        update(lengths, (lengths + 1).clamp(max=max_model_len))


def prepare_dflash_inputs(
    input_buffers,
    query_slot_mapping: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    input_batch,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_temperature: Tensor,
    input_seeds: Tensor,
    block_table: Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
    num_reqs_override: int | None = None,
) -> None:
    """The context rows, the query block and the sampled rows of a DFlash or DSpark pass.

    Block 0 of the cache is the null block: rows that lie in it get slot -1. Rejected context rows get position 0 and
    slot -1. With context parallelism, so do rows that another rank holds.

    Args:
        input_buffers: has ``input_ids``, ``positions``, ``is_padding`` (rows up to max_num_tokens), ``query_start_loc``
            ``[max_num_reqs + 1]`` and ``seq_lens`` ``[max_num_reqs]``, written.
        query_slot_mapping: ``[>= max_num_tokens]``, written: -1 behind the queries.
        context_positions, context_slot_mapping: written, one per row of the target's pass.
        sample_indices, sample_pos, sample_idx_mapping: ``[>= max_num_reqs * num_speculative_steps]``, written: query row,
            position of the token and slot of every draft; 0, 0 and -1 behind them.
        temperature, seeds: by slot, written from input_temperature, input_seeds.
        input_batch: has ``num_reqs``, ``positions``, ``query_start_loc``, ``idx_mapping``.
        num_sampled, num_rejected: ``[>= num_reqs]``.
        last_sampled, next_prefill_tokens: by slot.
        block_table: ``[>= num_reqs, P]``.
        cp_rank, cp_size, cp_interleave: context parallelism; positions go round the ranks in runs of cp_interleave.
        parallel_drafting_token_id: of the rows behind the first one of a block.
        num_query_per_req: rows of a block.
        sample_from_anchor: row k predicts draft k + 1 (DSpark); else row k predicts draft k (DFlash).
        num_reqs_override: requests to prepare; None: all.

    Raises:
        RuntimeError: a wrong block table or number of requests; names function, argument, wanted, got.
    """
    name = _name("prepare_dflash_inputs")
    batch = input_batch.num_reqs if num_reqs_override is None else num_reqs_override
    if not 0 < batch <= input_batch.num_reqs:
        fail(name, "num_reqs_override", f"1 to {input_batch.num_reqs}", batch)
    check(name, "block_table", block_table, "[B, P]", _IDS)
    starts = input_batch.query_start_loc[: batch + 1].long()
    slot = input_batch.idx_mapping[:batch].long()
    ends = starts[1:] - num_rejected[:batch]  # of the valid context
    device = starts.device
    request = torch.arange(batch, device=device)

    def cache_slots(request, position, valid):
        block = blocks(block_table, request, position, block_size * cp_size)
        offset = position % (block_size * cp_size)
        run = max(cp_interleave, 1)
        valid = valid & (block != 0) & (offset // run % cp_size == cp_rank)
        local = offset // (run * cp_size) * run + offset % run
        return torch.where(valid, block * block_size + local, PADDING_SLOT_ID)

    # The context: rows of the target's pass.
    source = input_batch.positions
    rows = min(source.shape[0], context_positions.shape[0])
    at = torch.arange(rows, device=device)
    mine = owners(starts[:-1], rows)
    inside = (at >= starts[0]) & (at < starts[-1])
    valid = inside & (at < ends[mine])
    position = torch.where(valid, source[:rows].long(), 0)
    for out, value in (
        (context_positions, position),
        (context_slot_mapping, cache_slots(mine, position, valid)),
    ):
        out[:rows].copy_(torch.where(inside, value, out[:rows]))

    # The query blocks.
    width, total = num_query_per_req, batch * num_query_per_req
    last = source[(ends - 1).clamp(0, source.shape[0] - 1)].long()
    offset = torch.arange(width, device=device)
    query = last[:, None] + 1 + offset
    token = _next_tokens(slot, num_sampled, last_sampled, next_prefill_tokens)
    ids = torch.where(offset == 0, token[:, None], parallel_drafting_token_id)
    everywhere = torch.ones_like(query, dtype=torch.bool)
    for out, value, padding in (
        (input_buffers.input_ids, ids, 0),
        (input_buffers.positions, query.clamp(max=max_model_len - 1), 0),
        (input_buffers.is_padding, ~everywhere, True),
        (query_slot_mapping, cache_slots(request[:, None], query, everywhere), PADDING_SLOT_ID),
    ):
        out[:total].copy_(value.flatten())
        out[total:max_num_tokens].fill_(padding)
    input_buffers.query_start_loc[: max_num_reqs + 1].copy_(
        torch.arange(max_num_reqs + 1, device=device).clamp(max=batch) * width
    )
    input_buffers.seq_lens[:batch].copy_((last + 1 + width).clamp(max=max_model_len))
    input_buffers.seq_lens[batch:max_num_reqs].zero_()

    # The rows that are sampled from, each with the position of its token.
    skip = 0 if sample_from_anchor else 1
    drafts, most = batch * num_speculative_steps, max_num_reqs * num_speculative_steps
    row = (request[:, None] * width + offset)[:, skip:]
    for out, value, padding in (
        (sample_indices, row, 0),
        (sample_pos, (query + 1 - skip)[:, skip:], 0),
        (sample_idx_mapping, slot[:, None].expand_as(row), -1),
    ):
        out[:drafts].view(batch, num_speculative_steps)[:, : row.shape[1]].copy_(value)
        out[drafts:most].fill_(padding)
    temperature[slot] = input_temperature[slot]
    seeds[slot] = input_seeds[slot]
