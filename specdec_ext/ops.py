"""Typed wrappers of torch.ops.specdec.*, each followed by its fake kernel (shapes and dtypes only).

Conventions shared by all ops (sizes, ragged layout, slots, status bits): docs/conventions.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from specdec_ext._fakes import CONTROLS, fake

if TYPE_CHECKING:
    from typing import Unpack

    from specdec_ext.prune import PreparedHead

_ops = torch.ops.specdec


def op_names() -> list[str]:
    """Names of all public ops, as registered under torch.ops.specdec."""
    return [
        "append_kv",
        "block_tree",
        "build_tree",
        "compact_kv",
        "expand_tree",
        "fuse_features",
        "inject_kv",
        "markov_draft",
        "next_round",
        "row_linear",
        "sample",
        "schedule_prefix",
        "tree_from_mask",
        "tree_links",
        "verify_attention",
        "verify_chain",
        "verify_tree",
    ]


def cpu_isa() -> str:
    """Instruction set of the CPU kernels in this process: "baseline", "avx2", "avx512",
    "avx512bf16" or "amx".

    SPECDEC_CPU_ISA forces one (it must be supported by the CPU); results are bitwise the same, but for
    products of bf16 on "avx512bf16" and "amx" (docs/conventions.md).
    """
    return _ops._cpu_isa()


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write this pass's K and V rows into a paged KV cache, in one launch.

    For every row r with ``0 <= slots[r] < num_pages * page_size``:
    ``k_cache[slots[r] // page_size, slots[r] % page_size] = k[r]``, and the same for v.

    Args:
        k: ``[R, Hkv, D]`` float32, float16 or bfloat16, last dimension dense.
        v: ``[R, Hkv, Dv]``, dtype of k.
        k_cache: ``[num_pages, page_size, Hkv, D]``, any strides with a dense last dimension (NHD,
            HND and interleaved caches are views); dtype of k, or float8_e4m3fn. Written in place.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, dtype of k_cache. Written in place.
        slots: ``[R]`` int32 or int64; a slot outside the cache (such as -1) writes nothing. Two rows
            with the same slot: undefined which one stays.
        k_scale, v_scale: float32 ``[1]`` or ``[Hkv]``, for float8 caches only: x / scale is stored,
            rounded to nearest even, saturated to +-448, NaN kept. None is 1.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    _ops.append_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


@fake(
    "append_kv",
    k="float [R, Hkv, D]",
    v="k [R, Hkv, Dv]",
    k_cache="cache [num_pages, page_size, Hkv, D]",
    v_cache="k_cache [num_pages, page_size, Hkv, Dv]",
    slots="index [R]",
    k_scale="float32 [any]",
    v_scale="float32 [any]",
)
def _append_kv_fake(k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None):
    return None


def compact_kv(
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    slots: Tensor,
    cu_rows: Tensor,
    path: Tensor,
    num_accepted: Tensor,
) -> None:
    """Move the KV of each request's accepted path to its first rows, in all layers and in one launch.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1``, and row r lies at place ``slots[r]`` of every
    cache. For ``i = 0 .. min(num_accepted[b], W - 1, rows_b - 1)`` the place of row ``path[b, i]`` goes to
    the place of row i. All sources of a request are read before any of its places is written, so paths
    may overlap in any way. What is in place already is not touched.

    Args:
        k_caches: caches ``[num_pages, page_size, heads, head_dim]`` of any dtype, any strides with a
            dense last dimension. They may differ in everything; planes of scales ``[.., heads, 1]`` and
            hidden rows ``[.., 1, d]`` may be among them. Written in place; no two may share a byte.
        v_caches: the same; either list may be empty.
        slots: ``[R]`` int32 or int64, the slots that the pass wrote its rows to. Two rows of the pass
            with the same slot: undefined which one moves or stays.
        cu_rows: int32 ``[B+1]``, non-decreasing; clamped to 0..R. A request may have no rows.
        path: int32 ``[B, W]``, rows within the request, as verify_tree returns it. An entry outside
            0..rows_b-1, or a slot outside the cache (such as -1) at either end, moves nothing.
        num_accepted: int32 ``[B]``; negative: nothing moves.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    _ops.compact_kv(k_caches, v_caches, slots, cu_rows, path, num_accepted)


@fake(
    "compact_kv",
    slots="index [R]",
    k_caches="any [num_pages, page_size, heads, head_dim]",
    v_caches="any [num_pages, page_size, heads, head_dim]",
    cu_rows="int32 [B+1]",
    path="int32 [B, W]",
    num_accepted="int32 [B]",
)
def _compact_kv_fake(k_caches, v_caches, slots, cu_rows, path, num_accepted):
    return None


def fuse_features(
    hiddens: list[Tensor],
    fc_weight: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Fuse hidden states of several target layers into the features that a drafter sees.

    ``RMSNorm(torch.cat(hiddens, -1) @ fc_weight.T)`` without the concatenation, which is H_ctx of DFlash
    (arXiv 2602.06036) and DSpark (arXiv 2607.05147), or without the norm, which is g of EAGLE-3 (arXiv
    2503.01840). Sums are float32, in the order of `row_linear`; the norm is taken of them, and the result is
    rounded once. Row r is bitwise the result of a call with that row alone, for any number of rows; without
    norm it is the one of `row_linear` on the concatenation.

    Args:
        hiddens: 1 to 16 tensors ``[R, d_i]`` float32, float16 or bfloat16, of one dtype, each with a row
            stride of its own and a dense last dimension, in the order of the columns of fc_weight.
        fc_weight: ``[d, sum of d_i]``, dtype of hiddens, last dimension dense.
        norm_weight: ``[d]`` float32, float16 or bfloat16, or None: no norm.
        eps: added to the mean of squares, at least 0.

    Returns:
        y ``[R, d]``, dtype of hiddens.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.fuse_features(hiddens, fc_weight, norm_weight, eps)


@fake(
    "fuse_features",
    hiddens="float [R, any]",
    fc_weight="hiddens [d, any]",
    norm_weight="float [d]",
)
def _fuse_features_fake(hiddens, fc_weight, norm_weight=None, eps=1e-6):
    return fc_weight.new_empty(hiddens[0].shape[0], fc_weight.shape[0])


def inject_kv(
    kv: Tensor,
    k_norm_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    *,
    eps: float,
    interleaved: bool = False,
    cu_rows: Tensor | None = None,
    commit_rows: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write K and V of context rows into the caches of all layers of a block drafter, in one launch.

    DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) give every draft layer the K and V that its own
    projections make of the fused target features. For row r, layer l and head h, in float32::

        y = x / sqrt(mean(x**2) + eps) * k_norm_weight[l],          x = kv[r, l, 0, h]
        k_caches[l][slots[r]] = y, its first rotary_dim channels turned by the angles of positions[r]
        v_caches[l][slots[r]] = kv[r, l, 1, h]

    rounded once. A pair (a, b) of channels becomes (a cos - b sin, b cos + a sin). A row has the same bits
    in any batch, on the CPU and on CUDA.

    Args:
        kv: ``[R, L, 2, Hkv, D]`` float32, float16 or bfloat16, last dimension dense; D at most 1024. What
            one product with the stacked weights of `prepare_kv_weights` gives.
        k_norm_weight: ``[L, D]`` float32, float16 or bfloat16, or None: K is not normalised.
        cos, sin: ``[max_position, rotary_dim / 2]`` float32, float16 or bfloat16, row = position.
        positions: ``[R]`` int32 or int64; a position outside the tables writes nothing.
        slots: ``[R]`` int32 or int64; a slot outside the cache (such as -1) writes nothing. Two rows with
            the same slot: undefined which one stays.
        k_caches: L caches ``[num_pages, page_size, Hkv, D]``, each with strides of its own and a dense last
            dimension; all of the dtype of kv, or all float8_e4m3fn. Written in place.
        v_caches: the same, of the dtype, num_pages and page_size of their k_caches. Written in place.
        eps: added to the mean of squares, at least 0.
        interleaved: pairs are channels (2 j, 2 j + 1); else (j, j + rotary_dim / 2), as in Qwen and Llama.
        cu_rows: int32 ``[B+1]``, non-decreasing; clamped to 0..R. Rows of no request write nothing.
        commit_rows: int32 ``[B]``, how many leading rows of each request are written (of a verified pass
            num_accepted + 1); clamped to 0..rows_b. Needs cu_rows; absent: all rows of requests.
        k_scale, v_scale: float32 ``[1]``, ``[L]`` or ``[L, Hkv]``, for float8 caches only, as in
            `append_kv`. None is 1.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    _ops.inject_kv(
        kv,
        k_norm_weight,
        cos,
        sin,
        positions,
        slots,
        k_caches,
        v_caches,
        eps=eps,
        interleaved=interleaved,
        cu_rows=cu_rows,
        commit_rows=commit_rows,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@fake(
    "inject_kv",
    kv="float [R, L, 2, Hkv, D]",
    k_norm_weight="float [L, D]",
    cos="float [max_position, half]",
    sin="float [max_position, half]",
    positions="index [R]",
    slots="index [R]",
    k_caches="cache [any, any, Hkv, D]",
    v_caches="cache [any, any, Hkv, D]",
    cu_rows="int32 [B+1]",
    commit_rows="int32 [B]",
    k_scale="float32 [any] or [L, Hkv]",
    v_scale="float32 [any] or [L, Hkv]",
)
def _inject_kv_fake(kv, k_norm_weight, cos, sin, positions, slots, k_caches, v_caches, **options):
    return None


def next_round(
    tokens: Tensor,
    num_accepted: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    block_len: int,
    mask_token_id: int,
    stop_token_ids: Tensor | None = None,
    max_len: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """End a round: count what is emitted, and lay out the next draft block, in one launch.

    The first ``num_accepted[b] + 1`` tokens of request b are emitted one by one. Emission ends behind a
    stop token, behind the token with which the request holds ``max_len[b]`` tokens, and before a
    negative id; the first two finish the request. The last token emitted is the new anchor, at position
    ``seq_lens[b] + num_emitted[b]``. A request is inactive iff ``tokens[b, 0] < 0``.

    Args:
        tokens: ``[B, K+1]`` int32 or int64, last dimension dense, as verification returns them.
        num_accepted: int32 ``[B]``, clamped to 0..K.
        seq_lens: int32 ``[B]``, places of the KV cache in use before the pass, which is the position of
            the old anchor.
        block_table: int32 ``[B, P]``, last dimension dense: the page of every page_size places.
        page_size: places of a page, at least 1.
        block_len: rows of the draft block, at least 0: the anchor and what stands behind it.
        mask_token_id: input id of the rows behind the anchor, and of requests without a block.
        stop_token_ids: ``[S]`` int32 or int64; negative ones are ignored.
        max_len: int32 ``[B]``, most tokens of the request, prompt and output; absent: 2^31 - 1.

    Returns:
        input_ids: ``[B, block_len]``, dtype of tokens: the anchor, then mask_token_id.
        positions: int64 ``[B, block_len]``, from the anchor's on, at most ``max_len[b] - 1``.
        slots: int64 ``[B, block_len]``, the cache's slots for these positions; -1 where the block table
            has no column or a negative page, and at places from ``max_len[b]`` on.
        new_seq_lens: int32 ``[B]``, ``seq_lens + num_emitted``.
        num_emitted: int32 ``[B]``, 0 for inactive requests.
        finished: bool ``[B]``, false for inactive requests. Finished and inactive requests have
            mask_token_id, position 0 and slot -1 in every row of the block.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.next_round(
        tokens,
        num_accepted,
        seq_lens,
        block_table,
        page_size=page_size,
        block_len=block_len,
        mask_token_id=mask_token_id,
        stop_token_ids=stop_token_ids,
        max_len=max_len,
    )


@fake(
    "next_round",
    tokens="index [B, any]",
    num_accepted="int32 [B]",
    seq_lens="int32 [B]",
    block_table="int32 [B, any]",
    stop_token_ids="index [any]",
    max_len="int32 [B]",
)
def _next_round_fake(
    tokens,
    num_accepted,
    seq_lens,
    block_table,
    *,
    page_size,
    block_len,
    mask_token_id,
    stop_token_ids=None,
    max_len=None,
):
    batch = tokens.shape[0]
    return (
        tokens.new_empty((batch, block_len)),
        tokens.new_empty((batch, block_len), dtype=torch.int64),
        tokens.new_empty((batch, block_len), dtype=torch.int64),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.bool),
    )


def markov_draft(
    base_logits: Tensor,
    anchor_ids: Tensor,
    w1: Tensor,
    w2: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    head: str = "vanilla",
    hidden: Tensor | None = None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    joint_weight: Tensor | None = None,
    joint_bias: Tensor | None = None,
    confidence_weight: Tensor | None = None,
    confidence_bias: float = 0.0,
    sts_temperature: Tensor | None = None,
    temperature: Tensor | None = None,
    d2t: Tensor | None = None,
    d2t_is_offset: bool = True,
    return_logits: bool = False,
    prepared: list[Tensor] | PreparedHead | None = None,
    return_logprobs: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw the drafts of a block one after the other with a DSpark head (arXiv 2607.05147, Eq. 4-6).

    For k = 0..G-1, with x the token before (first the anchor) and e = w1[x], draft k of a request is drawn
    from ``softmax((base_logits[b, k] + w2 @ y) / temperature)``:

    - "vanilla": ``y = e``
    - "gated": ``y = sigmoid(gate_weight @ [h; e] + gate_bias) * e``, h = hidden[b, k]
    - "rnn": ``(g, c, o) = joint_weight @ [s; e; h] + joint_bias``, ``s' = sigmoid(g) s + (1 - sigmoid(g))
      tanh(c)``, ``y = tanh(o)``; s is 0 before the first draft

    by inverse CDF in the order of columns with the uniform ``(seed, position, k + 1, DRAFT)``. Everything is
    float32. Tokens, log-probabilities and confidences have the same bits alone and in any batch, on the CPU and
    on CUDA. w2 is read once per draft for the whole batch, and no row of probabilities is written.

    A request ends at a token outside ``[0, vocab_size)`` before a draft, or at a row that has NaN or +inf or
    nothing finite: token -1, logprob, lse and confidence 0 from there on.

    Args:
        base_logits: ``[B, G, V']`` float32, float16 or bfloat16, last dimension dense. Columns past vocab_size
            (past the length of d2t) are ignored.
        anchor_ids: ``[B]`` int32 or int64, the last committed tokens.
        w1: ``[V1, r]`` any float type, V1 at least vocab_size: embeddings of target ids.
        w2: ``[>= columns, r]`` any float type, r of w1 (0 is no head): rows of columns of base_logits.
        seeds: int64 ``[B]``. positions: int32 or int64 ``[B]``, absolute positions of the anchors.
        vocab_size: ids of the target.
        head: "vanilla", "gated" or "rnn".
        hidden: ``[B, G, d]`` any float type: the drafter's output after its final norm.
        gate_weight, gate_bias: ``[r, d + r]`` and ``[r]``, for "gated" alone.
        joint_weight, joint_bias: ``[3 r, 2 r + d]`` and ``[3 r]``, for "rnn" alone.
        confidence_weight: ``[d + r]`` on [h; e], ``[d]`` on h, or without hidden ``[r]`` on e.
        confidence_bias: added to it.
        sts_temperature: float32 ``[G]``, divides the confidence head's logit at each place.
        temperature: float32 ``[B]``, divides the sum of base logits and bias; below 1e-5, negative or NaN is
            greedy (the largest, lowest column on ties, with numbers reported at temperature 1). None is 1.
        d2t: int64 ``[Vd]``: column i is the target id ``i + d2t[i]`` (``d2t[i]`` without d2t_is_offset); a
            column whose id is outside the vocabulary never comes out.
        return_logits: also return what was drawn from, for ``verify_chain(draft_logits=)``.
        prepared: ``prepare_markov(w2)``. With return_logprobs=False and return_logits=False, steps in which no
            request samples then read the table of 8-bit codes and the rows of w2 that can win, instead of all
            of w2: the same tokens and confidences, bit for bit. Otherwise it is not used.
        return_logprobs: False leaves out logprob and lse, which need every logit.

    Returns:
        tokens: ``[B, G]`` target ids, dtype of anchor_ids.
        logprob: float32 ``[B, G]``, of each token under the law it was drawn from; ``[0]`` if not asked for.
        lse: float32 ``[B, G]``, ``logsumexp(logits / temperature)`` of that law; ``[0]`` if not asked for.
        confidence: float32 ``[B, G]``, ``sigmoid((confidence_weight @ [h; e] + bias) / sts)``; 1 without weight.
        logits: float32 ``[B, G, V']`` before temperature, -inf outside of the law; ``[0]`` if not asked for.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.markov_draft(
        base_logits,
        anchor_ids,
        w1,
        w2,
        seeds,
        positions,
        vocab_size=vocab_size,
        head=head,
        hidden=hidden,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        joint_weight=joint_weight,
        joint_bias=joint_bias,
        confidence_weight=confidence_weight,
        confidence_bias=confidence_bias,
        sts_temperature=sts_temperature,
        temperature=temperature,
        d2t=d2t,
        d2t_is_offset=d2t_is_offset,
        return_logits=return_logits,
        prepared=None if prepared is None else list(prepared),
        return_logprobs=return_logprobs,
    )


@fake(
    "markov_draft",
    base_logits="float [B, G, any]",
    d2t="int64 [any]",
    anchor_ids="index [B]",
    w1="float [>= vocab_size, r]",
    w2="float [any, r]",
    seeds="int64 [B]",
    positions="index [B]",
    hidden="float [B, G, d]",
    gate_weight="float [any, any]",
    gate_bias="float [any]",
    joint_weight="float [any, any]",
    joint_bias="float [any]",
    confidence_weight="float [any]",
    sts_temperature="float32 [G]",
    temperature="float32 [B]",
)
def _markov_draft_fake(base_logits, anchor_ids, w1, w2, seeds, positions, **options):
    for tensor in options.get("prepared") or ():
        if tensor.device != base_logits.device:
            raise RuntimeError(
                "specdec::markov_draft: prepared: wanted the device of base_logits, "
                f"got {tensor.device}"
            )
    batch, drafts, width = base_logits.shape
    shape = (batch, drafts, width) if options.get("return_logits", False) else (0,)
    numbers = (batch, drafts) if options.get("return_logprobs", True) else (0,)
    return (
        anchor_ids.new_empty((batch, drafts)),
        base_logits.new_empty(numbers, dtype=torch.float32),
        base_logits.new_empty(numbers, dtype=torch.float32),
        base_logits.new_empty((batch, drafts), dtype=torch.float32),
        base_logits.new_empty(shape, dtype=torch.float32),
    )


def schedule_prefix(
    confidence: Tensor,
    steps_per_second: Tensor,
    *,
    budget: Tensor | None = None,
    min_drafts: int = 0,
    max_drafts: int | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose how many drafts of every request the next verification pass takes, in one launch.

    The survival of draft j of a request is the product of its confidences 0..j (float32, left to right): how
    likely it is that verification reaches beyond it. All drafts behind the floor are ordered by survival
    (descending), then by place, then by request, and admitted in that order, each one a row more:

    - without ``budget`` while each one raises ``tau * steps_per_second[rows]``, tau = active requests +
      survivals of their drafts so far (Algorithm 1 of the DSpark paper, arXiv 2607.05147). Stopping at
      the first one that does not pay is what keeps the emitted law: whether a draft is verified
      depends on nothing that came after it.
    - with ``budget`` the first ``budget[0]`` of them. The number must not come from this round's
      confidences.

    A survival of 0 is never admitted. docs/dspark.md has the argument and a counterexample.

    Args:
        confidence: float32 ``[B, G]``, last dimension dense, ``B * G <= 4096``; clamped to [0, 1],
            NaN is 0.
        steps_per_second: float32 ``[M+1]``: passes per second with n rows in all; beyond the table
            its last entry counts. Not read with a budget, and may be empty then.
        budget: int32 ``[1]``, drafts of the whole batch behind the floors; negative is 0.
        min_drafts: the floor: every active request gets so many, whatever they cost.
        max_drafts: most drafts of a request, and of its floor; None is G.
        active: bool ``[B]``; a request that is not gets no drafts and no rows. None: all are.

    Returns:
        num_drafts: int32 ``[B]``.
        cu_rows: int32 ``[B+1]``, the rows of the pass: ``1 + num_drafts[b]`` for an active request.
            What ``verify_chain`` and ``verify_attention`` take.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.schedule_prefix(
        confidence,
        steps_per_second,
        budget=budget,
        min_drafts=min_drafts,
        max_drafts=max_drafts,
        active=active,
    )


@fake(
    "schedule_prefix",
    confidence="float32 [B, G]",
    steps_per_second="float32 [any]",
    budget="int32 [1]",
    active="bool [B]",
)
def _schedule_prefix_fake(
    confidence, steps_per_second, *, budget=None, min_drafts=0, max_drafts=None, active=None
):
    batch = confidence.shape[0]
    return (
        confidence.new_empty(batch, dtype=torch.int32),
        confidence.new_empty(batch + 1, dtype=torch.int32),
    )


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_rows: Tensor,
    seq_lens: Tensor,
    *,
    max_rows: int,
    scale: float | None = None,
    mask: str = "causal",
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the rows of a verification pass over a paged KV cache that already holds them.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1`` of q; row i of ``rows_b`` sits at place
    ``seq_lens[b] - rows_b + i`` of the request, and place t lies in page
    ``block_table[b, t // page_size]`` at ``t % page_size``. For every visible place t of a row,
    ``s_t = scale * q . k_t``; ``lse = ln sum exp(s_t)``; ``out = sum exp(s_t - lse) v_t``.

    Row j of a causal pass is bitwise the result of a one-row call at the same prefix, whatever the
    batch, the pages, the cache's strides and the number of threads.

    Args:
        q: ``[R, Hq, D]`` float32, float16 or bfloat16, last dimension dense. Rows that belong to no
            request are padding.
        k_cache: ``[num_pages, page_size, Hkv, D]``, dtype of q or float8_e4m3fn, any strides with a dense last
            dimension; Hq is a multiple of Hkv, page_size 1 .. 256. D and Dv: on CUDA
            D = Dv of 64, 80, 96, 128, 192 or 256, or (192, 128), (64, 128), (128, 64); on the CPU any
            multiples of 16 up to 256.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, dtype of k_cache.
        block_table: int32 ``[B, P]``. A place whose page is negative or not in the cache, or beyond
            column P, is visible to no row. Columns behind the last place are never read.
        cu_rows: int32 ``[B+1]``, non-decreasing; a request may have no rows.
        seq_lens: int32 ``[B]``, all places of the request including this pass's rows, which are the
            last ones. Places below 0 do not exist.
        max_rows: at least the largest number of rows of a request; rows past it are not computed: 0 and
            -inf.
        scale: factor of the scores; None is ``D ** -0.5``.
        mask: "causal" (a row sees the places up to its own), "full" (all rows of the request see all
            its places) or "tree" (a row sees the places before the pass and the rows of tree_mask).
        tree_mask: int32 ``[R, W]``, for "tree" only, ``32 * W >= max_rows``: bit ``j % 32`` of word
            ``j // 32`` of a row is set where it sees row j of its request: its ancestors and itself.
            Bits are taken literally; those of rows that the request does not have are ignored.
        positions: int32 or int64 ``[R]``, positions of the rows for the window; None: their places.
            A place before the pass is its own position.
        window: a row sees only what lies at positions p with ``|p - own position| < window``; -1: no
            window. "tree" with a window needs positions.
        softcap: c > 0 turns every ``s_t`` into ``c * tanh(s_t / c)``; 0 does not.
        sinks: float32 ``[Hq]``, a score per query head that is not capped and has no value: it takes part
            in lse and in the sum of the weights of rows that see any place. -inf is no sink.
        k_scale, v_scale: float32 ``[1]`` or ``[Hkv]``, for float8 caches only: k_t and v_t are what is
            stored times the scale, as ``append_kv`` with the same scales has stored them. None is 1. They
            are data like K and V: 0 and negative ones scale as they say, NaN makes the head's rows NaN.

    Returns:
        out ``[R, Hq, Dv]`` in the dtype of q, and lse float32 ``[R, Hq]`` (natural logarithm). A row
        that sees no place, or belongs to no request, gets 0 and -inf. Values that some row of a
        request sees must be finite; everything else in the cache may be NaN.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.verify_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_rows,
        seq_lens,
        max_rows=max_rows,
        scale=scale,
        mask=mask,
        tree_mask=tree_mask,
        positions=positions,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@fake(
    "verify_attention",
    q="float [R, Hq, D]",
    k_cache="cache [num_pages, page_size, Hkv, D]",
    v_cache="k_cache [num_pages, page_size, Hkv, Dv]",
    seq_lens="int32 [B]",
    block_table="int32 [B, P]",
    cu_rows="int32 [B+1]",
    tree_mask="int32 [R, any]",
    positions="index [R]",
    sinks="float32 [Hq]",
    k_scale="float32 [any]",
    v_scale="float32 [any]",
)
def _verify_attention_fake(
    q,
    k_cache,
    v_cache,
    block_table,
    cu_rows,
    seq_lens,
    *,
    max_rows,
    scale=None,
    mask="causal",
    tree_mask=None,
    positions=None,
    window=-1,
    softcap=0.0,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    if k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise RuntimeError(
            f"specdec::verify_attention: k_cache: wanted dtype {str(q.dtype)[6:]} or float8_e4m3fn, "
            f"got {str(k_cache.dtype)[6:]}"
        )
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, v_cache.shape[3])
    return out, q.new_empty(rows, heads, dtype=torch.float32)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer for the few rows of a verification pass: ``y = x @ weight.T (+ bias)``.

    Row r of y is bitwise the result of a call with that row alone, whatever the number of rows, the
    other rows, strides and threads, so a pass over drafts computes what decoding one by one computes.
    Sums are float32 in one fixed order over K, rounded once, after the bias. Up to 64 rows share one
    pass over the weights; more are taken in tiles of 64.

    Args:
        x: ``[R, K]`` float32, float16 or bfloat16, last dimension dense.
        weight: ``[N, K]``, dtype of x, last dimension dense.
        bias: ``[N]``, dtype of x, contiguous, or None.

    Returns:
        y ``[R, N]``, dtype of x. NaN and infinities follow the sums of their own row and output.
        CPU and CUDA round differently; on the CPU all instruction sets give the same bits.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    return _ops.row_linear(x, weight, bias)


@fake("row_linear", x="float [R, K]", weight="x [N, K]", bias="x [N]")
def _row_linear_fake(x, weight, bias=None):
    return x.new_empty(x.shape[0], weight.shape[0])


class SamplingControls(TypedDict, total=False):
    """Keyword arguments of every op that has a law: sample, verify_chain, verify_tree. All optional.

    Per request (B; per row of ``sample``), mixed freely in one batch, read on the device. Order:
    penalties, bias, bitmask, temperature, top-k, top-p, min-p. Ids of equal processed logit rank by id,
    lowest first. An off value is bitwise the same as an absent argument.
    """

    #: float32 [B], 1 where absent; below 1e-5 the request is greedy: argmax, lowest id on ties.
    temperature: Tensor | None
    #: int32 [B], keeps the k most probable ids; off when <= 0 or >= vocab_size; 1 is greedy.
    top_k: Tensor | None
    #: float32 [B], keeps ids while the mass of those before is below it; off from 1; <= 0 keeps one id.
    top_p: Tensor | None
    #: float32 [B], keeps ids with p >= min_p * max p; off when <= 0.
    min_p: Tensor | None
    #: float32 [B], on ids with a count or in the prompt: logit / r if positive, else logit * r; off at 1.
    repetition_penalty: Tensor | None
    #: float32 [B], minus frequency * count on ids with a count; off at 0. Penalties need token_counts.
    frequency_penalty: Tensor | None
    #: float32 [B], minus presence on ids with a count; off at 0.
    presence_penalty: Tensor | None
    #: int32 [B, >= V], counts of committed tokens including the anchor; the drafts before a row count too.
    token_counts: Tensor | None
    #: int32 [B, >= ceil(V / 32)], bit per id of the prompt, for the repetition penalty.
    prompt_mask: Tensor | None
    #: int32 [B + 1], offsets into bias_ids and bias_values.
    bias_offsets: Tensor | None
    #: int32 or int64 [n]; foreign ids are ignored, repeated ids add.
    bias_ids: Tensor | None
    #: float32 [n], added to the logit; -inf bans.
    bias_values: Tensor | None
    #: int32 [M, >= ceil(V / 32)], bit per id, lowest first, 1 allows (xgrammar's layout).
    token_bitmask: Tensor | None
    #: int32 [R], row of token_bitmask of each row, -1 unconstrained; outside 0..M-1 allows nothing. Absent:
    #: row r, and M must be R.
    bitmask_rows: Tensor | None
    #: "sequential" (default: top-p on the renormalised top-k) or "joint" (top-p on the law before top-k).
    filter_order: str
    #: n from 0 to 1024 reports log-probabilities of the emitted tokens and of the n most probable ids;
    #: default -1.
    num_logprobs: int
    #: "raw" (default: log-softmax of the logits as given) or "processed" (of the law under all controls;
    #: greedy requests at temperature 1).
    logprobs_mode: str


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    **controls: Unpack[SamplingControls],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw one token per row from the row's law under its sampling controls.

    By inverse CDF in vocabulary order with one uniform number per row: Philox of (seed, position,
    stream SAMPLE), see docs/conventions.md; greedy rows take the argmax, lowest id on ties. A row's
    result depends on that row alone, bit for bit.

    Args:
        logits: ``[R, >= vocab_size]`` float32, float16 or bfloat16, last dimension dense; columns past
            vocab_size are ignored.
        seeds: int64 ``[R]``, the seed of the request that the row belongs to.
        positions: int32 or int64 ``[R]``, absolute position of the token fed at the row.
        vocab_size: V.
        controls: see `SamplingControls`, one value per row.

    Returns:
        tokens: int64 ``[R]``.
        logprob: float32 ``[R]``, log-probability of the token, raw or processed (``logprobs_mode``).
        lse: float32 ``[R]``, natural logarithm of the sum of exp(raw logits).
        status: int32 ``[R]``; 1 TARGET_NAN (a row with NaN or +inf or without a finite logit: the token
            is the finite argmax of the raw row among the allowed ids, among all where the bitmask allows
            none; without a finite one the lowest allowed id, else 0; lse is 0), 8 EMPTY_SUPPORT (the
            controls allow nothing: with a bitmask row the lowest id that it allows, if any, else the
            argmax of the raw row).
        top_ids: int64 ``[R, n]``, the n most probable ids, padded with -1.
        top_logprobs: float32 ``[R, n]``, padded with 0.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.sample(logits, seeds, positions, vocab_size=vocab_size, **controls)


@fake(
    "sample",
    logits="float [B, >= vocab_size]",
    seeds="int64 [B]",
    positions="index [B]",
    **{**CONTROLS, "bitmask_rows": "int32 [B]"},
)
def _sample_fake(logits, seeds, positions, *, vocab_size, num_logprobs=-1, **controls):
    rows, top = logits.shape[0], torch.sym_max(num_logprobs, 0)
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty((rows, top), dtype=torch.int64),
        logits.new_empty((rows, top), dtype=torch.float32),
    )


def verify_chain(
    target_logits: Tensor,
    input_ids: Tensor,
    cu_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
    *,
    vocab_size: int,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_is_one_hot: Tensor | None = None,
    d2t: Tensor | None = None,
    d2t_is_offset: bool = True,
    draft_controls: bool = False,
    method: str = "token",
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    markov: tuple[Tensor, Tensor, Tensor] | None = None,
    **controls: Unpack[SamplingControls],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept a prefix of each request's drafts, then draw one token: the output has the target's law.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1``: its anchor, then its
    ``K_b = min(rows - 1, max_drafts)`` drafts. p is the law of a target row under the request's controls
    (the drafts before the row count in its penalties), q = softmax(draft row / draft_temperature). With
    method "token" (Leviathan et al. 2023, Chen et al. 2023), draft x of row j is accepted iff
    ``u * q(x) < p(x)``; at the first rejection the token is drawn from ``max(p - q, 0)`` (from p when
    its mass is below 1e-6), after K_b accepted drafts from p of the last row. A greedy request accepts
    while the draft is the argmax. Random numbers: Philox of (seed, position of the anchor, draft number,
    purpose), see docs/conventions.md. A request's result depends on that request alone, bit for bit.

    For sampled requests the law is the target's only if q is the law that the drafts were drawn
    from: drafts chosen without chance (argmax, prompt lookup) need the one-hot form.

    Args:
        target_logits: ``[R, >= vocab_size]`` float32, float16 or bfloat16, last dimension dense.
            Rows past ``cu_rows[B]`` (graph padding) are not read.
        input_ids: int32 or int64 ``[R]``. A draft of -1 ends its request's chain: the next token comes
            from that row's target law, as if there were no rows behind it.
        cu_rows: int32 ``[B+1]``, non-decreasing; clamped to 0..R. A request without rows is inactive.
        seeds: int64 ``[B]``.
        positions: int32 or int64 ``[B]``, absolute position of the anchor.
        max_drafts: K, at least 0.
        vocab_size: V.
        draft_logits: ``[B', K, >= vocab_size]`` float32, float16 or bfloat16: row j is the one that
            draft j+1 was drawn from. None: every draft is one-hot (q(x) = 1).
        markov: ``(w1, w2, base_logits)`` of a vanilla ``markov_draft`` in place of draft_logits: q is recomputed
            from them along the drafts, with the bits of its ``logits``, in one pass over w2. base_logits
            ``[B', K, V']``, with draft_rows and d2t as for draft_logits.
        draft_rows: int32 ``[B]``, row of draft_logits of each request; -1, and any number outside
            ``0 .. B'-1``, is one-hot. None: row b.
        draft_temperature: float32 ``[B]``; None is 1, below 1e-5 the draft is one-hot.
        draft_is_one_hot: bool ``[B]``, requests whose drafts were chosen without chance.
        d2t: int64 ``[Vd]`` for drafters with a reduced vocabulary: target id of draft id i is
            ``i + d2t[i]`` (``d2t[i]`` with ``d2t_is_offset=False``); draft rows then have Vd columns in
            use. Target ids must be distinct; one outside the vocabulary never comes out.
        draft_controls: the request's controls act on the draft rows too (for drafts drawn by `sample`
            with the same controls and draft_temperature); False: q has only its temperature.
        method: "token"; "block" (Sun et al. 2024: never accepts fewer); "sampled" (draws the target's
            token at every row and goes on while it equals the draft: the output does not depend on the
            drafts); "typical" (Medusa: accepts p(x) > min(threshold, alpha e^-entropy); lossy).
        posterior_threshold, posterior_alpha: of "typical".
        controls: see `SamplingControls`.

    Returns:
        tokens: ``[B, K+1]`` in the dtype of input_ids: accepted drafts, the token after them, then -1.
        num_accepted: int32 ``[B]``.
        status: int32 ``[B]``, of what verification reached: 1 TARGET_NAN (the last token is the finite
            argmax, as in `sample`), 2 DRAFT_NAN (the chain ends before that draft), 4 BAD_ID (a draft id outside the
            vocabulary other than -1, taken as -1), 8 EMPTY_SUPPORT (the controls allow nothing: as in
            `sample`).
        logprobs: float32 ``[B, K+1]``, of the emitted tokens under the target row that decided them;
            zeros unless ``num_logprobs >= 0``.
        top_ids: ``[B, K+1, n]`` in the dtype of input_ids, most probable ids per row, padded with -1.
        top_logprobs: float32 ``[B, K+1, n]``, padded with 0.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.verify_chain(
        target_logits,
        input_ids,
        cu_rows,
        seeds,
        positions,
        max_drafts,
        vocab_size=vocab_size,
        draft_logits=draft_logits,
        draft_rows=draft_rows,
        draft_temperature=draft_temperature,
        draft_is_one_hot=draft_is_one_hot,
        d2t=d2t,
        d2t_is_offset=d2t_is_offset,
        draft_controls=draft_controls,
        method=method,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
        markov=markov,
        **controls,
    )


@fake(
    "verify_chain",
    target_logits="float [R, >= vocab_size]",
    input_ids="index [R]",
    cu_rows="int32 [B+1]",
    seeds="int64 [B]",
    positions="index [B]",
    draft_logits="float [any, max_drafts, any]",
    draft_rows="int32 [B]",
    draft_temperature="float32 [B]",
    draft_is_one_hot="bool [B]",
    d2t="int64 [Vd]",
    **CONTROLS,
)
def _verify_chain_fake(
    target_logits,
    input_ids,
    cu_rows,
    seeds,
    positions,
    max_drafts,
    *,
    vocab_size,
    num_logprobs=-1,
    markov=None,
    **options,
):
    for tensor in markov or ():
        if tensor.device != target_logits.device:
            raise RuntimeError(
                "specdec::verify_chain: markov: wanted the device of target_logits, "
                f"got {tensor.device}"
            )
    batch, width, top = cu_rows.shape[0] - 1, max_drafts + 1, torch.sym_max(num_logprobs, 0)
    return (
        target_logits.new_empty((batch, width), dtype=input_ids.dtype),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty((batch, width), dtype=torch.float32),
        target_logits.new_empty((batch, width, top), dtype=input_ids.dtype),
        target_logits.new_empty((batch, width, top), dtype=torch.float32),
    )


def verify_tree(
    target_logits: Tensor,
    input_ids: Tensor,
    parents: Tensor,
    cu_rows: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_depth: int,
    *,
    vocab_size: int,
    draft_logits: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    children: str = "deterministic",
    method: str = "token",
    d2t: Tensor | None = None,
    d2t_is_offset: bool = True,
    draft_controls: bool = False,
    **controls: Unpack[SamplingControls],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept a path of each request's draft tree, then draw one token: the output has the target's law.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1``; row u is node u, node 0 the anchor. Target row
    u is the law of the token after node u. The order of the nodes is the order in which siblings were
    drawn. A tree in which every node has one child gives bitwise the result of `verify_chain`.

    Args:
        target_logits, input_ids, cu_rows, seeds, positions: as in `verify_chain`.
        vocab_size, d2t, d2t_is_offset, draft_controls, controls: as in `verify_chain`.
        parents: int32 ``[R]``, node number of the parent within the request, -1 for node 0, every
            parent before its children.
        max_depth: most drafts on a path; deeper nodes are treated as absent.
        draft_logits: ``[R, >= vocab_size]``: row u is the law that the children of node u were drawn
            from; needed unless children are deterministic, not read at leaves.
        draft_temperature: float32 ``[B]``; None is 1; below 1e-5 the request's children are
            deterministic.
        children: how siblings were chosen. "deterministic": without chance, e.g. the k most probable
            ids (one coin per node against their cumulative p); "sampled": drawn from q without
            replacement (Gumbel top-k); "sampled_with_replacement": drawn independently from q.
        method: "token" (recursive rejection, root to leaf: SpecInfer, RSD) or "traversal" (leaf to
            root, arXiv 2505.12398: never accepts fewer in expectation; with deterministic children
            the same as "token").

    Returns:
        tokens: ``[B, max_depth+1]`` in the dtype of input_ids: accepted drafts, the token after them,
            then -1.
        path: int32 ``[B, max_depth+1]``: 0, then the accepted nodes, then -1.
        num_accepted: int32 ``[B]``.
        status: int32 ``[B]``, as in `verify_chain`, of the nodes on the path; 16 BAD_TREE: some parent
            is not before its child or not in the tree (the valid part is used).
        logprobs, top_ids, top_logprobs: as in `verify_chain`, along the path.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.verify_tree(
        target_logits,
        input_ids,
        parents,
        cu_rows,
        seeds,
        positions,
        max_depth,
        vocab_size=vocab_size,
        draft_logits=draft_logits,
        draft_temperature=draft_temperature,
        children=children,
        method=method,
        d2t=d2t,
        d2t_is_offset=d2t_is_offset,
        draft_controls=draft_controls,
        **controls,
    )


@fake(
    "verify_tree",
    target_logits="float [R, >= vocab_size]",
    input_ids="index [R]",
    parents="int32 [R]",
    cu_rows="int32 [B+1]",
    seeds="int64 [B]",
    positions="index [B]",
    draft_logits="float [R, any]",
    draft_temperature="float32 [B]",
    d2t="int64 [Vd]",
    **CONTROLS,
)
def _verify_tree_fake(
    target_logits,
    input_ids,
    parents,
    cu_rows,
    seeds,
    positions,
    max_depth,
    *,
    vocab_size,
    num_logprobs=-1,
    **options,
):
    batch, width, top = cu_rows.shape[0] - 1, max_depth + 1, torch.sym_max(num_logprobs, 0)
    return (
        target_logits.new_empty((batch, width), dtype=input_ids.dtype),
        target_logits.new_empty((batch, width), dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty((batch, width), dtype=torch.float32),
        target_logits.new_empty((batch, width, top), dtype=input_ids.dtype),
        target_logits.new_empty((batch, width, top), dtype=torch.float32),
    )


def expand_tree(
    logits: Tensor,
    parent_scores: Tensor,
    topk: int,
    *,
    vocab_size: int,
    d2t: Tensor | None = None,
    d2t_is_offset: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Expand a draft tree by one depth, as EAGLE-2 and EAGLE-3 do (arXiv 2406.16858, section 4.1).

    Every frontier node f has topk candidates: the first tokens of its row by (logit descending, column
    ascending), with score ``parent_scores[b, f] + log_softmax(logits[b, f])[token]``, float32 of one rounding.
    The first topk of all F * topk candidates by (score descending, place ascending) win: they are the next
    frontier. All candidates stay eligible for `build_tree`. Logits are read once; scores have the same bits alone
    and in any batch, on the CPU and on CUDA.

    A row with NaN or +inf or nothing finite, a parent score of -inf or NaN, and places behind the last token of
    finite logit give candidates with token -1 and score -inf, which come last.

    Args:
        logits: ``[B, F, V']`` float32, float16 or bfloat16, last dimension dense. Columns past vocab_size (past
            the length of d2t) are ignored. Depth 1 of a tree is F = 1 with parent scores 0.
        parent_scores: float32 ``[B, F]``, cumulative log-probabilities, any strides.
        topk: candidates of a node and winners of a request, 1 to 32.
        vocab_size: ids of the target.
        d2t: int64 ``[Vd]``: column i is the target id ``i + d2t[i]`` (``d2t[i]`` without d2t_is_offset). A column
            whose id is outside the vocabulary is no candidate, but the softmax is over all columns.

    Returns:
        tokens: int64 ``[B, topk]``, target ids of the winners.
        parent_slot: int32 ``[B, topk]``, the frontier node that each one continues (-1 where F is 0): gather
            hidden states by it.
        scores: float32 ``[B, topk]``, the next parent_scores.
        candidate_tokens: int64 ``[B, F * topk]``, candidate i of node f at ``f * topk + i``.
        candidate_scores: float32 ``[B, F * topk]``.
        candidate_index: int32 ``[B, topk]``, place of each winner among the candidates (-1 where F is 0).

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.expand_tree(
        logits,
        parent_scores,
        topk,
        vocab_size=vocab_size,
        d2t=d2t,
        d2t_is_offset=d2t_is_offset,
    )


@fake(
    "expand_tree",
    logits="float [B, F, any]",
    d2t="int64 [any]",
    parent_scores="float32 [B, F]",
)
def _expand_tree_fake(logits, parent_scores, topk, *, vocab_size, d2t=None, d2t_is_offset=True):
    batch, nodes = logits.shape[:2]

    def new(count, dtype):
        return logits.new_empty((batch, count), dtype=dtype)

    return (
        new(topk, torch.int64),
        new(topk, torch.int32),
        new(topk, torch.float32),
        new(nodes * topk, torch.int64),
        new(nodes * topk, torch.float32),
        new(topk, torch.int32),
    )


def build_tree(
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    anchor_ids: Tensor,
    positions: Tensor,
    num_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build a draft tree of the best candidates, in one launch: EAGLE-2's rerank (arXiv 2406.16858, section 4.2).

    The ``num_nodes - 1`` best usable candidates by (score descending, index ascending) are chosen; a candidate
    with a token below 0 or a score of -inf or NaN is not usable. Node 0 is the anchor; the others are numbered by
    ascending candidate index, but a child waits for its parent. A chosen candidate without a whole path of chosen
    ones to the root (a parent out of range, not chosen, or in a cycle) is dropped and not replaced.

    Args:
        candidate_tokens: ``[B, C]`` int32 or int64, C at most 2048, any strides: the candidates of all depths.
        candidate_scores: float32 ``[B, C]``, any strides: cumulative scores, children not above their parents.
        candidate_parents: int32 ``[B, C]``, any strides: the candidate that each one continues, -1: the anchor.
        anchor_ids: ``[B]`` int32 or int64, the last committed tokens.
        positions: ``[B]`` int32 or int64, absolute positions of the anchors.
        num_nodes: N, nodes of a tree with its root, 1 to 256; W = ceil(N / 32).

    Returns:
        input_ids: ``[B, N]``, dtype of candidate_tokens.
        parents: int32 ``[B, N]``, node numbers, -1 for the root; every parent before its children.
        tree_mask: int32 ``[B, N, W]``: bit j % 32 of word j // 32 says that node j is the row's or an ancestor.
        node_positions: int64 ``[B, N]``, position of the anchor plus depth.
        first_child, next_sibling: int32 ``[B, N]``, as in `tree_links`.
        status: int32 ``[B]``, 16 (BAD_TREE) where there are fewer than num_nodes nodes. Behind the last node:
            ids, parents and links -1, of the mask the own bit, the anchor's position.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names op, argument, wanted, got.
    """
    return _ops.build_tree(
        candidate_tokens, candidate_scores, candidate_parents, anchor_ids, positions, num_nodes
    )


def _new_trees(like, ids, batch, num_nodes):
    """Results of build_tree."""
    shape = (batch, num_nodes)
    return (
        like.new_empty(shape, dtype=ids.dtype),
        like.new_empty(shape, dtype=torch.int32),
        like.new_empty((*shape, (num_nodes + 31) // 32), dtype=torch.int32),
        like.new_empty(shape, dtype=torch.int64),
        like.new_empty(shape, dtype=torch.int32),
        like.new_empty(shape, dtype=torch.int32),
        like.new_empty(batch, dtype=torch.int32),
    )


@fake(
    "build_tree",
    candidate_tokens="index [B, C]",
    candidate_scores="float32 [B, C]",
    candidate_parents="int32 [B, C]",
    anchor_ids="index [B]",
    positions="index [B]",
)
def _build_tree_fake(
    candidate_tokens, candidate_scores, candidate_parents, anchor_ids, positions, num_nodes
):
    return _new_trees(candidate_tokens, candidate_tokens, candidate_tokens.shape[0], num_nodes)


def block_tree(
    logits: Tensor,
    anchor_ids: Tensor,
    positions: Tensor,
    num_nodes: int,
    topk: int,
    *,
    vocab_size: int,
    d2t: Tensor | None = None,
    d2t_is_offset: bool = True,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the most probable draft tree from the logits of a block drafter (DFlash, DSpark's parallel stage).

    The law of position g, ``softmax(logits[b, g] / temperature[b])``, does not depend on the path, so the
    probability of a path is the product of its tokens' probabilities, and the best tree of num_nodes nodes holds the
    num_nodes - 1 best paths (best-first search, as in DDTree). At every position the topk first tokens by (logit
    descending, column ascending) take part. A path's score is the float32 sum of its log-probabilities from the
    anchor on; ties go by depth, then by the number of the parent, then by rank. Nodes are numbered in this order:
    the first n nodes are the tree of n nodes. Logits are read once; the result has the same bits alone and in any
    batch, on the CPU and on CUDA.

    Verify with ``verify_tree(children="deterministic")``: siblings are chosen, not drawn.

    Args:
        logits: ``[B, G, V']`` float32, float16 or bfloat16, last dimension dense, G at most 64: row g is the law of
            the token at position anchor + 1 + g. Columns past vocab_size (past the length of d2t) are ignored.
        anchor_ids: ``[B]`` int32 or int64, the last committed tokens.
        positions: ``[B]`` int32 or int64, absolute positions of the anchors.
        num_nodes: N, nodes of a tree with its root, 1 to 256; W = ceil(N / 32).
        topk: tokens of a position, 1 to 32.
        vocab_size: ids of the target.
        d2t: int64 ``[Vd]``, as in `expand_tree`.
        temperature: float32 ``[B]``; below 1e-5, negative or NaN is 1. None is 1.

    Returns:
        input_ids: ``[B, N]``, dtype of anchor_ids; the other six as `build_tree` returns them. Of status: 16
        (BAD_TREE) where there are fewer than num_nodes nodes, 2 (DRAFT_NAN) where a position has NaN or +inf or
        nothing finite, and no nodes from there on.

    Raises:
        RuntimeError: wrong shape, dtype, device, stride or option; names op, argument, wanted, got.
    """
    return _ops.block_tree(
        logits,
        anchor_ids,
        positions,
        num_nodes,
        topk,
        vocab_size=vocab_size,
        d2t=d2t,
        d2t_is_offset=d2t_is_offset,
        temperature=temperature,
    )


@fake(
    "block_tree",
    logits="float [B, G, any]",
    d2t="int64 [any]",
    anchor_ids="index [B]",
    positions="index [B]",
    temperature="float32 [B]",
)
def _block_tree_fake(logits, anchor_ids, positions, num_nodes, topk, **options):
    return _new_trees(logits, anchor_ids, logits.shape[0], num_nodes)


def tree_links(
    parents: Tensor, cu_rows: Tensor, max_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ancestor masks, depths and child links of the draft trees of a batch, in one launch.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1``; a node's number is its row within the
    request. Node 0 is the root, every other parent comes before its children. Bit ``j % 32`` of word
    ``j // 32`` of a mask row is set iff node j is the row's node or one of its ancestors, which is
    the ``tree_mask`` of verification attention. The absolute position of a node is that of the
    root plus its depth.

    Args:
        parents: int32 ``[R]``, the parent's number within the request, -1 for the root. Any stride.
        cu_rows: int32 ``[B+1]``, non-decreasing; clamped to 0..R. A request may have no rows.
        max_nodes: capacity of a tree, at least 0; W = ceil(max_nodes / 32).

    Returns:
        tree_mask: int32 ``[R, W]``.
        depth: int32 ``[R]``, 0 for the root.
        first_child: int32 ``[R]``, the node's lowest child, or -1.
        next_sibling: int32 ``[R]``, the next higher child of the node's parent, or -1.
        status: int32 ``[B]``, 16 (BAD_TREE) where nodes are outside the tree: those whose parent is
            not before them (themselves, a later node, any but the first -1), not a node, or itself
            outside, and nodes at or past max_nodes. They have depth -1, no links, and of the mask
            their own bit only. A root that names a parent stays the root and sets the bit, too.
            Rows of no request: depth and links -1, mask 0.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    return _ops.tree_links(parents, cu_rows, max_nodes)


@fake("tree_links", parents="int32 [R]", cu_rows="int32 [B+1]")
def _tree_links_fake(parents, cu_rows, max_nodes):
    rows, batch = parents.shape[0], cu_rows.shape[0] - 1
    return (
        parents.new_empty((rows, (max_nodes + 31) // 32)),
        parents.new_empty(rows),
        parents.new_empty(rows),
        parents.new_empty(rows),
        parents.new_empty(batch),
    )


def tree_from_mask(
    tree_mask: Tensor, cu_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Parents, depths and child links of draft trees, from their ancestor masks: tree_links' inverse.

    The parent of a node is its highest ancestor below it. A row must be its parent's row plus its
    own bit, the first row of a request its own bit alone.

    Args:
        tree_mask: int32 ``[R, W]``, last dimension dense, any row stride: bit ``j % 32`` of word
            ``j // 32`` says that node j is the row's node or one of its ancestors. Bits past the
            rows of a request are ignored.
        cu_rows: int32 ``[B+1]``, non-decreasing; clamped to 0..R. A request may have no rows.

    Returns:
        parents: int32 ``[R]``, the parent's number within the request, -1 for the root.
        depth: int32 ``[R]``, 0 for the root.
        first_child: int32 ``[R]``, the node's lowest child, or -1.
        next_sibling: int32 ``[R]``, the next higher child of the node's parent, or -1.
        status: int32 ``[B]``, 16 (BAD_TREE) where nodes are outside the tree: those whose row is not
            as above, their descendants, and nodes that have no bit (``>= 32 * W``). They have -1 in
            all four outputs, and so have rows of no request.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    return _ops.tree_from_mask(tree_mask, cu_rows)


@fake("tree_from_mask", tree_mask="int32 [R, W]", cu_rows="int32 [B+1]")
def _tree_from_mask_fake(tree_mask, cu_rows):
    rows, batch = tree_mask.shape[0], cu_rows.shape[0] - 1
    return (*(tree_mask.new_empty(rows) for _ in range(4)), tree_mask.new_empty(batch))


# No op has a derivative. Below autograd's own fallback, outputs would claim one and fail in backward();
# past it they say what they are: results without a graph.
_library = torch.library.Library("specdec", "IMPL")
for _name in op_names():
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
