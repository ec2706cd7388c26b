"""The functions of vLLM's second sampler generation by their signatures, request by request. Random numbers are
those of specdec_ext; `walk` is verification itself, for given choices (oracles/choices.py)."""

import numpy as np
import torch

from oracles.choices import Coins
from oracles.compat_flashinfer import chain


def _softmax(x):
    x = np.asarray(x, dtype=np.float64)
    e = np.exp(x - x.max())
    return e / e.sum()


def walk(target, draft, ids, heat, choose):
    """[(probability, tokens)] of one request: logits target [K + 1, V], draft [K, V] or None, the drafts and
    the temperature."""
    if heat == 0:
        tokens = []
        for j, row in enumerate(target):
            tokens.append(int(np.argmax(row)))
            if j == len(ids) or ids[j] != tokens[j]:
                return [(1.0, tokens)]
    p = np.stack([_softmax(row) for row in target])
    if draft is None:
        q = np.zeros((len(ids), p.shape[1]))
        for j, x in enumerate(ids):
            q[j, x] = float(x >= 0)
    else:
        q = [_softmax(row / np.float64(np.float32(heat))) for row in draft[: len(ids)]]
    return chain(p, q, ids, choose)


def rejection_sample(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
    expanded_local_pos, temperature, seed, num_speculative_steps, band=0.0, **options,
):  # fmt: skip
    """The peer's results, or with a band the tokens that rounding allows per request."""
    batch = len(cu_num_logits) - 1
    sampled = torch.full((batch, num_speculative_steps + 1), -1, dtype=torch.int64)
    count, allowed = torch.zeros(batch, dtype=torch.int32), []
    vocab = target_logits.shape[1]
    vocab = vocab if draft_logits is None else min(vocab, draft_logits.shape[2])
    for b in range(batch):
        first, end = int(cu_num_logits[b]), int(cu_num_logits[b + 1])
        if first == end:
            allowed.append([[]])
            continue
        slot = int(idx_mapping[b])
        target = target_logits[first:end, :vocab].double().numpy()
        draft = None if draft_logits is None else draft_logits[slot, :, :vocab].double().numpy()
        ids = draft_sampled[first + 1 : end].tolist()
        choose = Coins(int(seed[slot]), int(pos[first]), band)
        found = [t for _, t in walk(target, draft, ids, float(temperature[slot]), choose)]
        allowed.append(found)
        sampled[b, : len(found[0])] = torch.tensor(found[0])
        count[b] = len(found[0])
    return allowed if band else (sampled, count)


def _next_token(slot, b, num_sampled, last_sampled, next_prefill_tokens):
    return int(last_sampled[slot] if num_sampled[b] > 0 else next_prefill_tokens[slot])


def prepare_prefill_inputs(
    last_token_indices, current_draft_step, input_buffers, input_batch, num_sampled, num_rejected,
    last_sampled, next_prefill_tokens, max_num_reqs,
):  # fmt: skip
    end = 0
    for b in range(input_batch.num_reqs):
        slot = int(input_batch.idx_mapping[b])
        start, end = (int(input_batch.query_start_loc[i]) for i in (b, b + 1))
        last = end - int(num_rejected[b]) - 1
        for t in range(start, last):
            input_buffers.input_ids[t] = input_batch.input_ids[t + 1]
        for t in range(start, last + 1):
            input_buffers.positions[t] = input_batch.positions[t]
        token = _next_token(slot, b, num_sampled, last_sampled, next_prefill_tokens)
        input_buffers.input_ids[last] = token
        last_token_indices[b] = last
        input_buffers.query_start_loc[b] = start
        input_buffers.seq_lens[b] = input_batch.seq_lens[b]
    for b in range(input_batch.num_reqs, max_num_reqs):
        last_token_indices[b] = 0
        input_buffers.seq_lens[b] = 0
    for b in range(input_batch.num_reqs, max_num_reqs + 1):
        input_buffers.query_start_loc[b] = end
    current_draft_step[...] = 0
    return last_token_indices


def prepare_decode_inputs(
    draft_tokens, target_seq_lens, num_rejected, input_buffers, sample_src_positions, max_model_len,
    max_num_reqs, advance_draft_positions=True,
):  # fmt: skip
    batch = draft_tokens.shape[0]
    for b in range(max_num_reqs + 1):
        input_buffers.query_start_loc[b] = min(b, batch)
    for b in range(max_num_reqs):
        if b >= batch:
            input_buffers.seq_lens[b] = 0
            continue
        input_buffers.input_ids[b] = draft_tokens.view(batch, -1)[b, 0]
        sample_src_positions[b] += 1
        length = int(target_seq_lens[b]) - int(num_rejected[b])
        if advance_draft_positions:
            position = int(input_buffers.positions[b])
            input_buffers.positions[b] = min(position + 1, max_model_len - 1)
            length = min(length + 1, max_model_len)
        input_buffers.seq_lens[b] = length


def update_draft_inputs(
    draft_tokens, current_draft_step, hidden_states, output_draft_tokens, next_input_hidden_states,
    input_buffers, sample_src_positions, num_reqs, max_model_len, num_speculative_steps,
    advance_draft_positions=True,
):  # fmt: skip
    step = int(current_draft_step)
    for b in range(num_reqs):
        output_draft_tokens[b, step] = draft_tokens[b]
        if step >= num_speculative_steps - 1:
            continue
        sample_src_positions[b] += 1
        input_buffers.input_ids[b] = draft_tokens[b]
        next_input_hidden_states[b] = hidden_states[b]
        if advance_draft_positions:
            position, length = int(input_buffers.positions[b]), int(input_buffers.seq_lens[b])
            input_buffers.positions[b] = min(position + 1, max_model_len - 1)
            input_buffers.seq_lens[b] = min(length + 1, max_model_len)


def cp_slot(table, position, size, rank, ranks, interleave):
    """Slot on this rank, -1 in the null block and on other ranks."""
    block = int(table[min(position // (size * ranks), len(table) - 1)])
    mine = [
        offset for offset in range(size * ranks) if (offset // interleave) % ranks == rank
    ]  # the positions of a block of all ranks that this rank holds, in order
    offset = position % (size * ranks)
    return block * size + mine.index(offset) if block and offset in mine else -1


def prepare_dflash_inputs(
    input_buffers, query_slot_mapping, context_positions, context_slot_mapping, sample_indices,
    sample_pos, sample_idx_mapping, temperature, seeds, input_batch, num_sampled, num_rejected,
    last_sampled, next_prefill_tokens, input_temperature, input_seeds, block_table, block_size,
    cp_rank, cp_size, cp_interleave, parallel_drafting_token_id, num_query_per_req,
    num_speculative_steps, max_num_reqs, max_num_tokens, max_model_len, sample_from_anchor=False,
    num_reqs_override=None,
):  # fmt: skip
    batch = input_batch.num_reqs if num_reqs_override is None else num_reqs_override
    where = (block_size, cp_rank, cp_size, cp_interleave)
    sample_indices[: max_num_reqs * num_speculative_steps] = 0
    sample_pos[: max_num_reqs * num_speculative_steps] = 0
    sample_idx_mapping[: max_num_reqs * num_speculative_steps] = -1
    input_buffers.input_ids[:max_num_tokens] = 0
    input_buffers.positions[:max_num_tokens] = 0
    input_buffers.is_padding[:max_num_tokens] = True
    query_slot_mapping[:max_num_tokens] = -1
    input_buffers.seq_lens[:max_num_reqs] = 0
    input_buffers.query_start_loc[: max_num_reqs + 1] = batch * num_query_per_req
    for b in range(batch):
        slot, table = int(input_batch.idx_mapping[b]), block_table[b]
        start, end = (int(input_batch.query_start_loc[i]) for i in (b, b + 1))
        valid_end = end - int(num_rejected[b])
        for t in range(start, end):
            position = int(input_batch.positions[t])
            context_positions[t] = position if t < valid_end else 0
            context_slot_mapping[t] = cp_slot(table, position, *where) if t < valid_end else -1
        last = int(input_batch.positions[valid_end - 1])
        token = _next_token(slot, b, num_sampled, last_sampled, next_prefill_tokens)
        for k in range(num_query_per_req):
            row, position = b * num_query_per_req + k, last + 1 + k
            input_buffers.input_ids[row] = parallel_drafting_token_id if k else token
            input_buffers.positions[row] = min(position, max_model_len - 1)
            input_buffers.is_padding[row] = False
            query_slot_mapping[row] = cp_slot(table, position, *where)
            draft = k if sample_from_anchor else k - 1
            if draft >= 0:
                at = b * num_speculative_steps + draft
                sample_indices[at] = row
                sample_pos[at] = position + 1 if sample_from_anchor else position
                sample_idx_mapping[at] = slot
        input_buffers.query_start_loc[b] = b * num_query_per_req
        input_buffers.seq_lens[b] = min(last + 1 + num_query_per_req, max_model_len)
        temperature[slot] = input_temperature[slot]
        seeds[slot] = input_seeds[slot]
