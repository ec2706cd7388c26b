"""The functions of vLLM's first sampler generation by their signatures, request by request."""

import torch


def uniforms(count, num_draft_tokens, generators):
    coins, start = torch.rand(count, dtype=torch.float64), 0
    for b, n in enumerate(num_draft_tokens):
        if n and b in generators:
            coins[start : start + n].uniform_(generator=generators[b])
        start += n
    return coins


def exponentials(vocab, num_draft_tokens, generators, dtype):
    noise = torch.empty((len(num_draft_tokens), vocab), dtype=dtype).exponential_()
    for b, generator in generators.items():
        if num_draft_tokens[b]:
            noise[b].exponential_(generator=generator)
    return noise


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
    bonus_token_ids, sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None,
    use_fp64_gumbel=False, fly_window_size=None, fly_entropy_threshold=None, fly_entropy_top_k=3,
):  # fmt: skip
    meta, vocab = sampling_metadata, target_logits.shape[1]
    out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
    if synthetic_mode or not meta.all_greedy:
        coins = uniforms(len(draft_token_ids), num_draft_tokens, meta.generators)
    if not meta.all_greedy:
        law = target_logits.softmax(-1, dtype=torch.float32)
        dtype = torch.float64 if use_fp64_gumbel else torch.float32
        noise = 1.0 / exponentials(vocab, num_draft_tokens, meta.generators, dtype)
    start = 0
    for b, n in enumerate(num_draft_tokens):
        greedy = meta.all_greedy or float(meta.temperature[b]) == 0
        for j in range(n + 1):
            if j == n:
                out[b, n] = int(bonus_token_ids.flatten()[b])
                break
            row, x = start + j, int(draft_token_ids[start + j])
            if synthetic_mode:
                accepted = x >= 0 and float(coins[row]) < float(synthetic_conditional_rates[j])
            elif greedy:
                accepted = x == int(target_logits[row].argmax())
            else:
                q = 1.0 if draft_probs is None else draft_probs[row, x]
                accepted = x >= 0 and bool(q > 0) and bool((law[row, x] / q) >= coins[row])
            if accepted:
                out[b, j] = x
                continue
            if greedy:
                out[b, j] = int(target_logits[row].argmax())
                break
            rest = law[row].clone()
            if x >= 0 and draft_probs is not None:
                rest = (rest - draft_probs[row]).clamp(min=0)
            elif x >= 0:
                rest[x] = 0
            out[b, j] = int((rest * noise[b]).argmax())
            break
        start += n
    return out


def _eagle_prepare_next_token_padded(
    sampled_token_ids, discard_request_mask, backup_next_token_ids, next_token_ids,
    valid_sampled_tokens_count, vocab_size, num_sampled_tokens_per_req, num_reqs,
    stride_sampled_token_ids, *, BLOCK_SIZE_TOKENS=0,
):  # fmt: skip
    for b in range(num_reqs):
        row = sampled_token_ids[b, :num_sampled_tokens_per_req].tolist()
        valid = [] if discard_request_mask[b] else [t for t in row if 0 <= t < vocab_size]
        next_token_ids[b] = valid[-1] if valid else backup_next_token_ids[b]
        valid_sampled_tokens_count[b] = len(valid)


def _eagle_prepare_inputs_padded(
    cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc_gpu, token_indices_to_sample,
    num_rejected_tokens_gpu, num_reqs,
):  # fmt: skip
    before = 0
    for b in range(num_reqs):
        drafts = int(cu_num_draft_tokens[b]) - before
        before += drafts
        rejected = drafts + 1 - int(valid_sampled_tokens_count[b]) if drafts else 0
        token_indices_to_sample[b] = int(query_start_loc_gpu[b + 1]) - 1 - rejected
        num_rejected_tokens_gpu[b] = rejected


def slot_of(table, position, size):
    return int(table[min(position // size, len(table) - 1)]) * size + position % size


def eagle_step_update_slot_mapping_and_metadata(
    positions_1d, block_table_tensor, seq_lens, block_size, max_model_len, out_clamped_positions,
    out_slot_mapping, input_batch_size=None,
):  # fmt: skip
    batch = len(positions_1d)
    for b in range(batch):
        position = int(positions_1d[b]) + 1
        over = position >= max_model_len
        out_clamped_positions[b] = 0 if over else position
        out_slot_mapping[b] = -1 if over else slot_of(block_table_tensor[b], position, block_size)
        seq_lens[b] = 1 if over else min(int(seq_lens[b]) + 1, max_model_len)
    for b in range(batch, input_batch_size or batch):
        out_slot_mapping[b] = -1


def _copy_and_expand_eagle_inputs(
    target_token_ids_ptr, target_positions_ptr, next_token_ids_ptr, out_input_ids_ptr,
    out_positions_ptr, out_is_rejected_token_mask_ptr, out_is_masked_token_mask_ptr,
    out_new_token_indices_ptr, out_hidden_state_mapping_ptr, query_start_loc_ptr, query_end_loc_ptr,
    padding_token_id, parallel_drafting_token_id, total_input_tokens, num_padding_slots_per_request,
    shift_input_ids, *, BLOCK_SIZE_TOKENS=0, batch_size=0, num_blocks=0,
):  # fmt: skip
    at = new = 0
    for b in range(len(query_end_loc_ptr)):
        first, end = int(query_start_loc_ptr[b]), int(query_start_loc_ptr[b + 1])
        last = int(query_end_loc_ptr[b])
        tokens = target_token_ids_ptr[first : last + 1].tolist()[1 if shift_input_ids else 0 :]
        rows = [(t, False, False) for t in tokens] + [(int(next_token_ids_ptr[b]), False, False)]
        rows += [(parallel_drafting_token_id, True, False)] * (num_padding_slots_per_request - 1)
        for i in range(num_padding_slots_per_request):
            out_new_token_indices_ptr[new] = at + len(tokens) + i
            new += 1
        rows += [(padding_token_id, False, True)] * (end - last - 1)
        if shift_input_ids:
            for t in range(first, end):
                out_hidden_state_mapping_ptr[t] = at + t - first
        for j, (token, masked, rejected) in enumerate(rows):
            out_input_ids_ptr[at] = token
            out_positions_ptr[at] = 0 if rejected else int(target_positions_ptr[first]) + j
            out_is_masked_token_mask_ptr[at] = masked
            out_is_rejected_token_mask_ptr[at] = rejected
            at += 1


def _copy_and_expand_dflash_inputs(
    *, next_token_ids_ptr, target_positions_ptr, out_input_ids_ptr, out_context_positions_ptr,
    out_query_positions_ptr, out_context_slot_mapping_ptr, out_query_slot_mapping_ptr,
    out_token_indices_ptr, block_table_ptr, query_start_loc_ptr, num_rejected_tokens_ptr,
    block_table_stride=0, parallel_drafting_token_id, block_size, num_query_per_req,
    num_speculative_tokens, total_input_tokens, max_tokens_per_req=0, triton_block_size=0,
    has_num_rejected=False,
):  # fmt: skip
    for b in range(len(query_start_loc_ptr) - 1):
        first, end = int(query_start_loc_ptr[b]), int(query_start_loc_ptr[b + 1])
        for t in range(first, end):
            position = int(target_positions_ptr[t])
            out_context_positions_ptr[t] = position
            out_context_slot_mapping_ptr[t] = slot_of(block_table_ptr[b], position, block_size)
        valid_end = end - (int(num_rejected_tokens_ptr[b]) if has_num_rejected else 0)
        for k in range(num_query_per_req):
            position = int(target_positions_ptr[valid_end - 1]) + 1 + k
            row = b * num_query_per_req + k
            out_input_ids_ptr[row] = parallel_drafting_token_id if k else next_token_ids_ptr[b]
            out_query_positions_ptr[row] = position
            out_query_slot_mapping_ptr[row] = slot_of(block_table_ptr[b], position, block_size)
            if k:
                out_token_indices_ptr[b * num_speculative_tokens + k - 1] = row
