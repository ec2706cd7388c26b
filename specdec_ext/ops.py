"""Typed wrappers of torch.ops.specdec.*, each followed by its fake kernel (shapes and dtypes only).

Conventions shared by all ops (sizes, ragged layout, slots, status bits): docs/conventions.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.specdec


def op_names() -> list[str]:
    """Names of all public ops, as registered under torch.ops.specdec."""
    return [
        "append_kv",
        "sample",
        "tree_from_mask",
        "tree_links",
        "verify_attention",
        "verify_chain",
    ]


def cpu_isa() -> str:
    """Instruction set of the CPU kernels in this process: "baseline", "avx2" or "avx512".

    SPECDEC_CPU_ISA forces one (it must be supported by the CPU); results are bitwise the same.
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


@torch.library.register_fake("specdec::append_kv")
def _append_kv_fake(k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None):
    return None


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
        k_cache: ``[num_pages, page_size, Hkv, D]``, dtype of q, any strides with a dense last
            dimension; Hq is a multiple of Hkv, page_size 1 .. 256. D and Dv: 64 or 128 on CUDA, any
            multiple of 16 up to 256 on the CPU.
        v_cache: ``[num_pages, page_size, Hkv, Dv]``, dtype of q.
        block_table: int32 ``[B, P]``. A place whose page is negative or not in the cache, or beyond
            column P, is visible to no row. Columns behind the last place are never read.
        cu_rows: int32 ``[B+1]``, non-decreasing; a request may have no rows.
        seq_lens: int32 ``[B]``, all places of the request including this pass's rows, which are the
            last ones. Places below 0 do not exist.
        max_rows: at least the largest number of rows of a request.
        scale: factor of the scores; None is ``D ** -0.5``.
        mask: "causal" (a row sees the places up to its own) or "full" (all rows of the request see
            all its places).

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
    )


@torch.library.register_fake("specdec::verify_attention")
def _verify_attention_fake(
    q, k_cache, v_cache, block_table, cu_rows, seq_lens, *, max_rows, scale=None, mask="causal"
):
    rows, heads, _ = q.shape
    out = q.new_empty(rows, heads, v_cache.shape[3])
    return out, q.new_empty(rows, heads, dtype=torch.float32)


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    vocab_size: int,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw one token per row from ``softmax(logits / temperature)``, in one pass over the logits.

    ``tokens[r]`` is the id at u of the row's cumulative law in vocabulary order (half-open buckets),
    with the one uniform u of (``seeds[r]``, ``positions[r]``, SAMPLE). Below temperature 1e-5 it is
    the argmax, lowest id on ties. A row's result depends on that row alone, bit for bit.

    Args:
        logits: ``[R, >= vocab_size]`` float32, float16 or bfloat16, last dimension dense, any row
            stride. Columns past vocab_size are ignored. -inf is a token of probability 0.
        seeds: int64 ``[R]``, the seed of the request that the row belongs to.
        positions: int32 or int64 ``[R]``, absolute position of the token fed at the row.
        vocab_size: V.
        temperature: float32 ``[R]``, None is 1. Greedy and sampled rows mix freely.

    Returns:
        tokens: int64 ``[R]``.
        logprob: float32 ``[R]``, log-probability of the token at temperature 1.
        lse: float32 ``[R]``, natural logarithm of the sum of exp(logits).
        status: int32 ``[R]``; 1 (TARGET_NAN) for a row with NaN or +inf or without a finite logit:
            its token is the finite argmax (0 when there is none), its logprob and lse are 0.
        top_ids, top_logprobs: ``[R, 0]``.

    Raises:
        RuntimeError: wrong shape, dtype, device or stride; names op, argument, wanted, got.
    """
    return _ops.sample(logits, seeds, positions, vocab_size=vocab_size, temperature=temperature)


@torch.library.register_fake("specdec::sample")
def _sample_fake(logits, seeds, positions, *, vocab_size, temperature=None):
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.int32),
        logits.new_empty((rows, 0), dtype=torch.int64),
        logits.new_empty((rows, 0), dtype=torch.float32),
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
    method: str = "token",
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Accept a prefix of each request's drafts, then draw one token: the output has the target's law.

    Request b owns rows ``cu_rows[b] .. cu_rows[b+1]-1``: its anchor, then its
    ``K_b = min(rows - 1, max_drafts)`` drafts. With p = softmax(target row / temperature) and
    q = softmax(draft row / draft_temperature), draft x of row j is accepted iff ``u * q(x) < p(x)``;
    at the first rejection the token is drawn from ``max(p - q, 0)`` (from p when its mass is below
    1e-6), after K_b accepted drafts from p of the last row. A greedy request (temperature < 1e-5)
    accepts while the draft is the argmax, lowest id on ties. Random numbers: Philox of (seed,
    position of the anchor, draft number, purpose), see docs/conventions.md. A request's result
    depends on that request alone, bit for bit.

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
        draft_rows: int32 ``[B]``, row of draft_logits of each request, -1 for one-hot. None: row b.
        draft_temperature: float32 ``[B]``; None is 1, below 1e-5 the draft is one-hot.
        draft_is_one_hot: bool ``[B]``, requests whose drafts were chosen without chance.
        method: "token".
        temperature: float32 ``[B]``; None is 1. Greedy and sampled requests mix freely.

    Returns:
        tokens: ``[B, K+1]`` in the dtype of input_ids: accepted drafts, the token after them, then -1.
        num_accepted: int32 ``[B]``.
        status: int32 ``[B]``, of what verification reached: 1 TARGET_NAN (the last token is the finite
            argmax), 2 DRAFT_NAN (the chain ends before that draft), 4 BAD_ID (a draft id outside the
            vocabulary other than -1, taken as -1).
        logprobs: float32 ``[B, K+1]``, zeros.
        top_ids, top_logprobs: ``[B, K+1, 0]``.

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
        method=method,
        temperature=temperature,
    )


@torch.library.register_fake("specdec::verify_chain")
def _verify_chain_fake(
    target_logits,
    input_ids,
    cu_rows,
    seeds,
    positions,
    max_drafts,
    *,
    vocab_size,
    draft_logits=None,
    draft_rows=None,
    draft_temperature=None,
    draft_is_one_hot=None,
    method="token",
    temperature=None,
):
    batch, width = cu_rows.shape[0] - 1, max_drafts + 1
    return (
        target_logits.new_empty((batch, width), dtype=input_ids.dtype),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty((batch, width), dtype=torch.float32),
        target_logits.new_empty((batch, width, 0), dtype=input_ids.dtype),
        target_logits.new_empty((batch, width, 0), dtype=torch.float32),
    )


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


@torch.library.register_fake("specdec::tree_links")
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


@torch.library.register_fake("specdec::tree_from_mask")
def _tree_from_mask_fake(tree_mask, cu_rows):
    rows, batch = tree_mask.shape[0], cu_rows.shape[0] - 1
    return (*(tree_mask.new_empty(rows) for _ in range(4)), tree_mask.new_empty(batch))
