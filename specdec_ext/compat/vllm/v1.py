"""vLLM's first sampler generation and the inputs of its proposers, by its signatures (docs/compat_vllm.md).

`rejection_sample` is that of vllm.v1.sample.rejection_sampler, the others those of vllm.v1.spec_decode.utils.
All are tensor code and write their outputs in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext._checks import check, fail
from specdec_ext.compat.vllm._slots import PADDING_SLOT_ID, blocks, owners
from specdec_ext.ops import sample

_IDS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PLACEHOLDER_TOKEN_ID = -1
GREEDY_TEMPERATURE = 0


def _name(function):
    return f"compat.vllm.v1.{function}"


def _uniforms(count, num_draft_tokens, generators, device):
    """One coin per draft; of requests with a generator from that, in the peer's order of calls."""
    coins = torch.rand(count, dtype=torch.float64, device=device)
    start = 0
    for request, drafts in enumerate(num_draft_tokens):
        generator = generators.get(request)
        if generator is not None and drafts > 0:
            coins[start : start + drafts].uniform_(generator=generator)
        start += drafts
    return coins


def _exponentials(vocab, num_draft_tokens, generators, device, dtype):
    """One row of noise per request, for all of its positions."""
    noise = torch.empty((len(num_draft_tokens), vocab), dtype=dtype, device=device)
    noise.exponential_()
    for request, generator in generators.items():
        if num_draft_tokens[request] > 0:
            noise[request].exponential_(generator=generator)
    return noise


def rejection_sample(
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float | None = None,
    fly_entropy_top_k: int = 3,
) -> Tensor:
    """Accept a prefix of the drafts of each request, then its recovered or its bonus token.

    A draft is accepted iff ``target_prob / draft_prob >= coin``, p = softmax(target_logits); greedy requests accept
    while it is the argmax (`sample`: lowest id on ties). Coins and noise come from torch's generators in the
    peer's order, one generator per seeded request, so a seeded request gets the peer's tokens. Only the rejected
    row of a request is drawn from.

    Args:
        draft_token_ids: int32 or int64 ``[T]``; -1 is a placeholder: rejected, and the token comes from p.
        num_draft_tokens: drafts of each request, on the host.
        max_spec_len: K.
        cu_num_draft_tokens: int32 or int64 ``[B]``, inclusive sums of num_draft_tokens.
        draft_probs: float32 ``[T, V]``; None: drafts chosen without chance.
        target_logits: ``[T, V]`` float32, float16 or bfloat16, processed (temperature and filters applied).
        bonus_token_ids: int32 or int64 ``[B, 1]`` or ``[B]``.
        sampling_metadata: has ``all_greedy``, ``all_random``, ``temperature`` (``[B]``, 0: greedy) and
            ``generators`` (request number to torch.Generator).
        synthetic_mode, synthetic_conditional_rates: accept draft j + 1 at rate ``[K]`` j instead.
        use_fp64_gumbel: noise in float64.
        fly_window_size, fly_entropy_threshold, fly_entropy_top_k: not supported, must be None.

    Returns:
        int32 ``[B, K + 1]``, -1 behind the last token.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("rejection_sample")
    check(name, "draft_token_ids", draft_token_ids, "[T]", _IDS)
    count, batch = draft_token_ids.shape[0], len(num_draft_tokens)
    like = ("draft_token_ids", draft_token_ids)
    requests, rows = [(0, batch, "B of num_draft_tokens")], [(0, count, "T of draft_token_ids")]
    check(name, "cu_num_draft_tokens", cu_num_draft_tokens, "[B]", _IDS, requests, like)
    check(name, "target_logits", target_logits, "[T, V]", _FLOATS, rows, like)
    vocab, device = target_logits.shape[1], target_logits.device
    if draft_probs is not None:
        sizes = [*rows, (1, vocab, "V of target_logits")]
        check(name, "draft_probs", draft_probs, "[T, V]", _FLOATS, sizes, like)
    bonus = bonus_token_ids.flatten()
    check(name, "bonus_token_ids", bonus, "[B]", _IDS, requests, like)
    if sum(num_draft_tokens) != count:
        fail(name, "num_draft_tokens", f"a sum of {count} (T)", sum(num_draft_tokens))
    if max(num_draft_tokens, default=0) > max_spec_len:
        fail(name, "num_draft_tokens", f"at most {max_spec_len} each", max(num_draft_tokens))
    if fly_window_size is not None:
        fail(name, "fly_window_size", "None (FLy is not supported)", fly_window_size)
    if synthetic_mode:
        check(name, "synthetic_conditional_rates", synthetic_conditional_rates, "[K]", ())
    all_greedy = sampling_metadata.all_greedy
    coins = None
    if synthetic_mode or not all_greedy:
        coins = _uniforms(count, num_draft_tokens, sampling_metadata.generators, device)

    # Everything by request and place, [B, K]; places behind a request's drafts read row T: a placeholder.
    ends = cu_num_draft_tokens.long()
    drafted = torch.diff(ends, prepend=ends.new_zeros(1))
    place = torch.arange(max_spec_len, device=device)
    row = torch.where(place < drafted[:, None], (ends - drafted)[:, None] + place, count)

    def by_place(t, fill):
        return torch.nn.functional.pad(t, (0, 1), value=fill)[row]

    drafts = by_place(draft_token_ids, PLACEHOLDER_TOKEN_ID)
    usable = (drafts >= 0) & (drafts < vocab)
    greedy = torch.ones(batch, dtype=torch.bool, device=device)
    if not all_greedy:
        greedy = sampling_metadata.temperature == GREEDY_TEMPERATURE
    synthetic = None
    if synthetic_mode:
        rates = synthetic_conditional_rates[:max_spec_len]
        synthetic = usable & (by_place(coins, 1.0) < rates)
    accepted = torch.zeros_like(usable)
    best = token = None
    if all_greedy or not sampling_metadata.all_random:
        zeros = draft_token_ids.new_zeros(count, dtype=torch.int64)
        cold = torch.zeros(count, dtype=torch.float32, device=device)
        argmax = sample(target_logits, zeros, zeros, vocab_size=vocab, temperature=cold)[0]
        best = by_place(argmax, PLACEHOLDER_TOKEN_ID)
        accepted = usable & (drafts == best) if synthetic is None else synthetic
    if not all_greedy:
        law = target_logits.softmax(1, dtype=torch.float32)
        one = draft_token_ids.long().clamp(0, max(vocab - 1, 0))[:, None]
        p = law.gather(1, one)[:, 0]
        q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, one)[:, 0]
        passes = (q > 0) & (p > 0) & (p / q >= coins)
        random = usable & by_place(passes, False) if synthetic is None else synthetic
        accepted = torch.where(greedy[:, None], accepted, random)
    length = accepted.long().cumprod(1).sum(1)

    rejected = torch.nn.functional.pad(row, (0, 1), value=count).gather(1, length[:, None])[:, 0]
    if best is not None:
        token = torch.nn.functional.pad(best, (0, 1)).gather(1, length[:, None])[:, 0]
    if not all_greedy:
        dtype = torch.float64 if use_fp64_gumbel else torch.float32
        noise = _exponentials(
            vocab, num_draft_tokens, sampling_metadata.generators, device, dtype
        ).reciprocal()
        draft = torch.nn.functional.pad(drafts, (0, 1), value=-1).gather(1, length[:, None])
        recovered = _recovered(law, draft_probs, rejected, draft.long(), noise)
        token = recovered if token is None else torch.where(greedy, token, recovered)
    token = torch.where(length == drafted, bonus, token)
    width = torch.arange(max_spec_len + 1, device=device)
    out = torch.nn.functional.pad(drafts, (0, 1), value=PLACEHOLDER_TOKEN_ID)
    out = torch.where(width < length[:, None], out, PLACEHOLDER_TOKEN_ID)
    return torch.where(width == length[:, None], token[:, None], out).to(torch.int32)


def _recovered(law, draft_probs, row, draft, noise):
    """Ids ``[B]`` from the residuals of the rejected rows, by the largest of mass over exponential noise."""
    count, vocab = law.shape
    if count == 0:
        return row  # no request reads it
    row = row.clamp(max=count - 1)
    p = law[row]
    at = torch.arange(vocab, device=law.device)
    mass = torch.where(at == draft, 0, p)
    if draft_probs is not None:
        mass = (p - draft_probs[row]).clamp(min=0)
    # A placeholder was drawn from nothing; a residual of no mass is rounding.
    mass = torch.where((draft >= 0) & (mass > 0).any(1, keepdim=True), mass, p)
    return torch.where(mass > 0, mass * noise, -1.0).argmax(1)


def _launched(function):
    """A function where the peer has a Triton kernel with a warm-up, of which there is nothing to do here."""
    function.register_warmup = lambda *args, **options: None
    return function


@_launched
def _eagle_prepare_next_token_padded(
    sampled_token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_next_token_ids: Tensor,
    next_token_ids: Tensor,
    valid_sampled_tokens_count: Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    *,
    BLOCK_SIZE_TOKENS: int = 0,
) -> None:
    """The next input token of every request, and how many of its sampled tokens are valid.

    Args:
        sampled_token_ids: int32 or int64 ``[>= num_reqs, >= num_sampled_tokens_per_req]``; valid are ids in
            0 .. vocab_size - 1.
        discard_request_mask: bool ``[>= num_reqs]``: count 0 and the backup token.
        backup_next_token_ids: ``[>= num_reqs]``, for requests without a valid token.
        next_token_ids, valid_sampled_tokens_count: int32 ``[>= num_reqs]``, written.
        stride_sampled_token_ids, BLOCK_SIZE_TOKENS: no effect.
    """
    name = _name("_eagle_prepare_next_token_padded")
    check(name, "sampled_token_ids", sampled_token_ids, "[B, K + 1]", _IDS)
    ids = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    valid = (ids >= 0) & (ids < vocab_size)
    place = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(valid, place, -1).amax(1, keepdim=True)
    token = ids.gather(1, last.clamp(min=0))[:, 0]
    discarded = discard_request_mask[:num_reqs]
    none = discarded | (last[:, 0] < 0)
    next_token_ids[:num_reqs].copy_(torch.where(none, backup_next_token_ids[:num_reqs], token))
    valid_sampled_tokens_count[:num_reqs].copy_(torch.where(discarded, 0, valid.sum(1)))


@_launched
def _eagle_prepare_inputs_padded(
    cu_num_draft_tokens: Tensor,
    valid_sampled_tokens_count: Tensor,
    query_start_loc_gpu: Tensor,
    token_indices_to_sample: Tensor,
    num_rejected_tokens_gpu: Tensor,
    num_reqs: int,
) -> None:
    """The row of every request that the drafter samples from, with rejected rows left in the batch.

    Args:
        cu_num_draft_tokens: ``[>= num_reqs]``, inclusive sums of the drafts.
        valid_sampled_tokens_count: ``[>= num_reqs]``, accepted drafts plus 1.
        query_start_loc_gpu: ``[>= num_reqs + 1]``, first row of each request.
        token_indices_to_sample, num_rejected_tokens_gpu: int32 ``[>= num_reqs]``, written; without drafts nothing
            was rejected.
    """
    name = _name("_eagle_prepare_inputs_padded")
    check(name, "cu_num_draft_tokens", cu_num_draft_tokens, "[B]", _IDS)
    ends = cu_num_draft_tokens[:num_reqs]
    drafts = torch.diff(ends, prepend=ends.new_zeros(1))
    rejected = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count[:num_reqs], 0)
    last = query_start_loc_gpu[1 : num_reqs + 1] - 1
    token_indices_to_sample[:num_reqs].copy_(last - rejected)
    num_rejected_tokens_gpu[:num_reqs].copy_(rejected)


def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: Tensor,
    block_table_tensor: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    input_batch_size: int | None = None,
) -> None:
    """One step of an EAGLE drafter further: positions, slots and lengths.

    A position at or past max_model_len becomes 0, with slot -1 and length 1.

    Args:
        positions_1d: ``[B]``, current positions.
        block_table_tensor: ``[B, P]``.
        seq_lens: ``[B]``, updated in place.
        out_clamped_positions: ``[B]``, written.
        out_slot_mapping: ``[input_batch_size]``, written: -1 from B on.
        input_batch_size: None: B.
    """
    name = _name("eagle_step_update_slot_mapping_and_metadata")
    check(name, "positions_1d", positions_1d, "[B]", _IDS)
    batch = positions_1d.shape[0]
    like, rows = ("positions_1d", positions_1d), [(0, batch, "B of positions_1d")]
    check(name, "block_table_tensor", block_table_tensor, "[B, P]", _IDS, rows, like)
    position = positions_1d.long() + 1
    over = position >= max_model_len
    position = torch.where(over, 0, position)
    request = torch.arange(batch, device=position.device)
    block = blocks(block_table_tensor, request, position, block_size)
    slot = torch.where(over, PADDING_SLOT_ID, block * block_size + position % block_size)
    length = torch.where(over, 1, seq_lens + 1).clamp(max=max_model_len)
    out_clamped_positions.copy_(position)
    out_slot_mapping[:batch].copy_(slot)
    out_slot_mapping[batch:input_batch_size].fill_(PADDING_SLOT_ID)
    seq_lens.copy_(length)


@_launched
def _copy_and_expand_eagle_inputs(
    target_token_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    next_token_ids_ptr: Tensor,
    out_input_ids_ptr: Tensor,
    out_positions_ptr: Tensor,
    out_is_rejected_token_mask_ptr: Tensor,
    out_is_masked_token_mask_ptr: Tensor,
    out_new_token_indices_ptr: Tensor,
    out_hidden_state_mapping_ptr: Tensor | None,
    query_start_loc_ptr: Tensor,
    query_end_loc_ptr: Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    *,
    BLOCK_SIZE_TOKENS: int = 0,
    batch_size: int = 0,
    num_blocks: int = 0,
) -> None:
    """The rows of a first draft pass: the target's valid tokens, the new token, mask tokens, rejected rows.

    Args:
        target_token_ids_ptr, target_positions_ptr: ``[>= total_input_tokens]``, rows of the target's pass.
        next_token_ids_ptr: ``[B]``, the token after each request's valid ones.
        out_input_ids_ptr, out_positions_ptr: written: per request its valid tokens (without the first one where
            shift_input_ids), the next token, num_padding_slots_per_request - 1 mask tokens, one padding token per
            rejected row. Positions count on from the request's first one; 0 in rejected rows.
        out_is_rejected_token_mask_ptr, out_is_masked_token_mask_ptr: bool, written alike.
        out_new_token_indices_ptr: ``[B * num_padding_slots_per_request]``, written: rows of the next and the mask tokens.
        out_hidden_state_mapping_ptr: ``[>= total_input_tokens]``, written where shift_input_ids: the row that each row of
            the target goes to.
        query_start_loc_ptr: ``[B + 1]``, first row of each request.
        query_end_loc_ptr: ``[B]``, its last valid row.
        BLOCK_SIZE_TOKENS, batch_size, num_blocks: no effect.
    """
    name = _name("_copy_and_expand_eagle_inputs")
    check(name, "query_start_loc_ptr", query_start_loc_ptr, "[B + 1]", _IDS)
    batch = query_start_loc_ptr.shape[0] - 1
    check(name, "query_end_loc_ptr", query_end_loc_ptr, "[B]", _IDS, [(0, batch, "B")])
    starts, ends = query_start_loc_ptr.long(), query_end_loc_ptr.long()
    pad, shift = num_padding_slots_per_request, int(shift_input_ids)
    device = starts.device
    request = torch.arange(batch, device=device)
    begins = starts[:-1] + request * (pad - shift)  # of a request's rows in the output
    kept = ends - starts[:-1] + 1 - shift  # valid tokens that are copied

    rows = total_input_tokens + batch * (pad - shift)
    mine = owners(begins, rows)
    j = torch.arange(rows, device=device) - begins[mine]
    valid = kept[mine]
    copied = target_token_ids_ptr[(starts[mine] + shift + j).clamp(0, total_input_tokens - 1)]
    rejected = j >= valid + pad
    masked = (j > valid) & ~rejected
    ids = torch.where(j < valid, copied, next_token_ids_ptr[mine])
    ids = torch.where(masked, parallel_drafting_token_id, ids)
    first = target_positions_ptr[starts[:-1].clamp(max=total_input_tokens - 1)]
    out_input_ids_ptr[:rows].copy_(torch.where(rejected, padding_token_id, ids))
    out_positions_ptr[:rows].copy_(torch.where(rejected, 0, first[mine] + j))
    out_is_rejected_token_mask_ptr[:rows].copy_(rejected)
    out_is_masked_token_mask_ptr[:rows].copy_(masked)
    new = (begins + kept)[:, None] + torch.arange(pad, device=device)
    out_new_token_indices_ptr[: batch * pad].copy_(new.flatten())
    if shift_input_ids:
        mine = owners(starts[:-1], total_input_tokens)
        source = torch.arange(total_input_tokens, device=device)
        goal = begins[mine] + source - starts[mine]
        out_hidden_state_mapping_ptr[:total_input_tokens].copy_(goal)


@_launched
def _copy_and_expand_dflash_inputs(
    *,
    next_token_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    out_input_ids_ptr: Tensor,
    out_context_positions_ptr: Tensor,
    out_query_positions_ptr: Tensor,
    out_context_slot_mapping_ptr: Tensor,
    out_query_slot_mapping_ptr: Tensor,
    out_token_indices_ptr: Tensor,
    block_table_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    num_rejected_tokens_ptr: Tensor | int,
    block_table_stride: int = 0,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_tokens: int,
    total_input_tokens: int,
    max_tokens_per_req: int = 0,
    triton_block_size: int = 0,
    has_num_rejected: bool = False,
) -> None:
    """The context rows and the query block of a DFlash pass, with their slots.

    Args:
        next_token_ids_ptr: ``[B]``, the token that every block begins with.
        target_positions_ptr: ``[>= total_input_tokens]``, positions of the context rows.
        out_context_positions_ptr, out_context_slot_mapping_ptr: ``[>= total_input_tokens]``, written; rejected rows too.
        out_input_ids_ptr, out_query_positions_ptr, out_query_slot_mapping_ptr: ``[>= B * num_query_per_req]``, written:
            the next token, then mask tokens, at the positions behind the last accepted one.
        out_token_indices_ptr: ``[>= B * num_speculative_tokens]``, written: query rows of the mask tokens.
        block_table_ptr: ``[>= B, P]``.
        query_start_loc_ptr: ``[B + 1]``, first context row of each request.
        num_rejected_tokens_ptr: ``[B]``, read where has_num_rejected.
        block_table_stride, max_tokens_per_req, triton_block_size: no effect.
    """
    name = _name("_copy_and_expand_dflash_inputs")
    check(name, "query_start_loc_ptr", query_start_loc_ptr, "[B + 1]", _IDS)
    check(name, "block_table_ptr", block_table_ptr, "[B, P]", _IDS)
    starts = query_start_loc_ptr.long()
    batch, width = starts.shape[0] - 1, num_query_per_req
    position = target_positions_ptr[:total_input_tokens].long()
    block = blocks(block_table_ptr, owners(starts[:-1], total_input_tokens), position, block_size)
    out_context_positions_ptr[:total_input_tokens].copy_(position)
    out_context_slot_mapping_ptr[:total_input_tokens].copy_(
        block * block_size + position % block_size
    )
    ends = starts[1:] - num_rejected_tokens_ptr if has_num_rejected else starts[1:]
    offset = torch.arange(width, device=starts.device)
    query = position[(ends - 1).clamp(0, total_input_tokens - 1)][:, None] + 1 + offset
    request = torch.arange(batch, device=starts.device)[:, None]
    slot = blocks(block_table_ptr, request, query, block_size) * block_size + query % block_size
    ids = torch.where(offset == 0, next_token_ids_ptr[:batch, None], parallel_drafting_token_id)
    for out, value in (
        (out_input_ids_ptr, ids),
        (out_query_positions_ptr, query),
        (out_query_slot_mapping_ptr, slot),
    ):
        out[: batch * width].copy_(value.flatten())
    rows = (request * width + offset)[:, 1:]
    indices = out_token_indices_ptr[: batch * num_speculative_tokens]
    indices.view(batch, num_speculative_tokens)[:, : width - 1].copy_(rows)
