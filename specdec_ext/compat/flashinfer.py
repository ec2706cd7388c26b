"""Sampling and merging of FlashInfer (0.7.4), by its signatures: docs/compat_flashinfer.md.

Random numbers are this library's: Philox of (seed, offset), see docs/conventions.md. With one seed per row nothing
else enters, not the row's place in the batch; one seed for all rows is told apart by the row's number.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from specdec_ext._checks import check, fail
from specdec_ext.ops import sample, verify_chain

_IDS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SEEDS = (torch.int64, torch.uint64)
_STEP = (
    0x9E3779B97F4A7C15 - 2**64
)  # between the seeds of rows that share one: odd, so that no two are equal
_DIAGNOSTIC = 0x5DEECE66D  # keeps the draws of a diagnostic off the streams that choose tokens


def _name(function):
    return f"compat.flashinfer.{function}"


def _signed(value):
    """An integer as int64 has it: modulo 2^64."""
    return (int(value) + 2**63) % 2**64 - 2**63


def _stream(function, rows, device, generator, seed, offset):
    """Seeds and positions, int64 ``[rows]``, of the peer's three ways to say where random numbers come from."""
    if seed is None or offset is None:
        low, high = -(2**63), 2**63 - 1
        seeds = torch.randint(low, high, (rows,), device=device, generator=generator)
        return seeds, torch.zeros_like(seeds)
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        got = f"{type(seed).__name__} and {type(offset).__name__}"
        fail(function, "seed, offset", "two tensors or two integers", got)
    if not isinstance(seed, Tensor):
        seeds = torch.full((1,), _signed(seed), dtype=torch.int64, device=device)
        positions = torch.full((1,), _signed(offset), dtype=torch.int64, device=device)
    else:
        for argument, t in (("seed", seed), ("offset", offset)):
            check(function, argument, t, "[1] or [B]", _SEEDS)
            if t.shape[0] not in (1, rows):
                fail(function, argument, f"1 or {rows} elements", t.shape[0])
            if t.device != device:
                fail(function, argument, f"device {device}", t.device)
        seeds, positions = seed.view(torch.int64), offset.view(torch.int64)
    if seeds.shape[0] != rows:
        seeds = seeds + _STEP * torch.arange(rows, device=device)
    return seeds, positions.expand(rows)


def _filter(function, argument, value, rows, device, dtypes):
    """A filter value: None where it is off for all rows, a scalar, or a column of one value per row."""
    if not isinstance(value, Tensor):
        off = value >= 1 if argument == "top_p" else value <= 0
        return None if off else value
    check(function, argument, value, "[B]", dtypes, [(0, rows, "rows")])
    if value.device != device:
        fail(function, argument, f"device {device}", value.device)
    return value[:, None]


def _kept(weights, top_k=None, top_p=None):
    """Which weights ``[B, V]`` the filters keep: those with fewer than top_k larger ones, and with a mass of larger
    ones below top_p of the whole. Equal weights stay or go together; the largest always stay."""
    ordered, order = weights.sort(dim=-1, descending=True)
    place = torch.arange(weights.shape[-1], device=weights.device)
    begins = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    larger = torch.where(begins, place, 0).cummax(1).values
    keep = torch.ones_like(begins)
    if top_k is not None:
        keep &= larger < top_k
        if isinstance(top_k, Tensor):
            keep |= top_k <= 0
    if top_p is not None:
        mass = ordered.double()
        cdf = mass.cumsum(1)
        inside = (cdf - mass).gather(1, larger) < top_p * cdf[:, -1:]
        if isinstance(top_p, Tensor):
            inside |= top_p >= 1
        keep &= inside
    return torch.zeros_like(keep).scatter_(1, order, keep | (larger == 0))


def _renormalised(probs, keep):
    kept = torch.where(keep, probs.float(), 0)
    total = kept.double().sum(-1, keepdim=True)
    return (kept / torch.where(total > 0, total, 1)).float()


def top_k_renorm_probs(
    probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False
) -> Tensor:
    """Probabilities with all but the top_k largest set to 0, renormalised; those equal to the smallest kept are kept.

    Tensor code (a sort): no op returns probabilities.

    Args:
        probs: ``[B, V]`` float32, float16 or bfloat16.
        top_k: an integer, or int32 or int64 ``[B]``; 0 and below are off.
        is_deterministic: no effect.

    Returns:
        ``[B, V]``, dtype of probs.

    Raises:
        RuntimeError: wrong shape, dtype or device; names function, argument, wanted, got.
    """
    name = _name("top_k_renorm_probs")
    check(name, "probs", probs, "[B, V]", _FLOATS)
    top_k = _filter(name, "top_k", top_k, probs.shape[0], probs.device, _IDS)
    return _renormalised(probs, _kept(probs, top_k=top_k)).to(probs.dtype)


def top_p_renorm_probs(
    probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False
) -> Tensor:
    """Probabilities with the tail behind a mass of top_p set to 0, renormalised.

    Kept are the fewest largest ones with a mass of at least top_p (of the row's), and those equal to the smallest
    of them. Tensor code (a sort): no op returns probabilities.

    Args:
        probs: ``[B, V]`` float32, float16 or bfloat16.
        top_p: a number, or float32 ``[B]``; 1 and above are off, 0 and below keep the largest.
        is_deterministic: no effect.

    Returns:
        float32 ``[B, V]``.

    Raises:
        RuntimeError: wrong shape, dtype or device; names function, argument, wanted, got.
    """
    name = _name("top_p_renorm_probs")
    check(name, "probs", probs, "[B, V]", _FLOATS)
    top_p = _filter(name, "top_p", top_p, probs.shape[0], probs.device, (torch.float32,))
    return _renormalised(probs, _kept(probs.float(), top_p=top_p))


top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs


def _sampled(name, logits, indices, generator, check_nan, seed, offset):
    if check_nan and torch.isnan(logits).any():
        raise ValueError(f"specdec_ext.{name}: logits: wanted no NaN, got NaN")
    if indices is not None:
        logits = logits.index_select(0, indices)
    rows = logits.shape[0]
    seeds, positions = _stream(name, rows, logits.device, generator, seed, offset)
    tokens = sample(logits, seeds, positions, vocab_size=logits.shape[1])[0]
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def _check_logits(name, logits, indices):
    check(name, "logits", logits, "[B, V]", _FLOATS)
    if indices is not None:
        check(name, "indices", indices, "[B]", _IDS, (), ("logits", logits))


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """One token per row from softmax(logits): `sample`.

    Args:
        logits: ``[U, V]`` float32, float16 or bfloat16, last dimension dense.
        indices: int32 or int64 ``[B]``, the row of logits that each output is drawn from; None: row b.
        deterministic: no effect.
        generator: of logits' device, the source of seeds where seed or offset is None.
        check_nan: raise ValueError where logits has NaN. This waits for the device. Without it a row with NaN gives
            its finite argmax.
        seed, offset: integers, or int64 or uint64 ``[1]`` or ``[B]`` on logits' device.

    Returns:
        ``[B]``, int32 or the dtype of indices.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("sampling_from_logits")
    _check_logits(name, logits, indices)
    return _sampled(name, logits, indices, generator, check_nan, seed, offset)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    top_k_max: int | None = None,
) -> Tensor:
    """One token per row from softmax(logits) under top-k and top-p.

    The filters are tensor code (sorts) that keeps equal logits together, as the peer does; the draw is `sample`.
    `sample` with its own ``top_k``, ``top_p`` and ``filter_order`` does all of it in one pass without a sort, and
    breaks ties by id.

    Args:
        logits, indices, deterministic, generator, check_nan, seed, offset: as in `sampling_from_logits`.
        top_k: an integer, or int32 or int64 ``[U]``, per row of logits; 0 and below are off.
        top_p: a number, or float32 ``[U]``; 1 and above are off, 0 and below keep the largest.
        filter_apply_order: "top_k_first" (top-p of the mass that top-k left) or "joint" (both on the same law).
        top_k_max: no effect: no bound on top_k is needed.

    Returns:
        ``[B]``, int32 or the dtype of indices.

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("top_k_top_p_sampling_from_logits")
    _check_logits(name, logits, indices)
    rows, device = logits.shape[0], logits.device
    top_k = _filter(name, "top_k", top_k, rows, device, _IDS)
    top_p = _filter(name, "top_p", top_p, rows, device, (torch.float32,))
    if filter_apply_order not in ("top_k_first", "joint"):
        fail(name, "filter_apply_order", '"top_k_first" or "joint"', repr(filter_apply_order))
    ill = torch.isnan(logits).any(1, keepdim=True)  # left to `sample`
    if filter_apply_order == "top_k_first":
        if top_k is not None:
            logits = logits.masked_fill(~(_kept(logits, top_k=top_k) | ill), -torch.inf)
        top_k = None
    if top_k is not None or top_p is not None:
        law = logits.float().softmax(1)
        logits = logits.masked_fill(~(_kept(law, top_k, top_p) | ill), -torch.inf)
    return _sampled(name, logits, indices, generator, check_nan, seed, offset)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each chain of drafts, then draw one token: `verify_chain` on the logarithms.

    A draft is accepted iff ``u * draft_prob < target_prob``; the token after the accepted ones is drawn from the
    residual, or from the last target row. A draft id of -1 ends the chain there.

    Args:
        draft_probs: float32 ``[B, S, V]``, rows of sum 1: the laws that the drafts were drawn from.
        draft_token_ids: int32 or int64 ``[B, S]``.
        target_probs: float32 ``[B, S + 1, V]``, rows of sum 1.
        maybe_output_accepted_token_num: an integer type ``[B]``, added to in place: drafts that pass their own test, also
            behind the first rejection (a diagnostic, with coins of its own there).
        maybe_output_emitted_draft_token_num: an integer type ``[B]``, added to in place: accepted drafts.
        deterministic: no effect.
        generator: of the tensors' device, the source of seeds where seed or offset is None.
        seed, offset: integers, or int64 or uint64 ``[1]`` or ``[B]``; offset stands for the anchor's position.

    Returns:
        tokens: int32 ``[B, S + 1]``: accepted drafts, one more token, -1.
        accepted, emitted: the two tensors that were added to (new int32 ones, where None).

    Raises:
        RuntimeError: wrong shape, dtype, device or option; names function, argument, wanted, got.
    """
    name = _name("chain_speculative_sampling")
    check(name, "draft_probs", draft_probs, "[B, S, V]", _FLOATS)
    batch, drafts, vocab = draft_probs.shape
    like = ("draft_probs", draft_probs)
    rows = [(0, batch, "B of draft_probs")]
    sizes = [*rows, (1, drafts, "S of draft_probs")]
    check(name, "draft_token_ids", draft_token_ids, "[B, S]", _IDS, sizes, like)
    sizes = [*rows, (1, drafts + 1, "S + 1"), (2, vocab, "V of draft_probs")]
    check(name, "target_probs", target_probs, "[B, S + 1, V]", _FLOATS, sizes, like)
    counts = []
    for argument, t in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        if t is not None:
            check(name, argument, t, "[B]", _IDS, rows, like)
        counts.append(draft_probs.new_zeros(batch, dtype=torch.int32) if t is None else t)
    device = draft_probs.device
    seeds, positions = _stream(name, batch, device, generator, seed, offset)

    ids = draft_token_ids.to(torch.int32)
    anchors = torch.nn.functional.pad(ids, (1, 0))  # the id of an anchor is not read
    cu_rows = torch.arange(batch + 1, device=device, dtype=torch.int32) * (drafts + 1)
    tokens, emitted, *_ = verify_chain(
        target_probs.float().log().flatten(0, 1),
        anchors.flatten(),
        cu_rows,
        seeds,
        positions,
        drafts,
        vocab_size=vocab,
        draft_logits=draft_probs.float().log(),
    )

    # The diagnostic: every draft behind the first rejection is tested by a draw from (pass, fail).
    usable = (ids >= 0) & (ids < vocab)
    at = ids.long().clamp(0, max(vocab - 1, 0))[:, :, None]
    p, q = (t.float().gather(2, at)[:, :, 0] for t in (target_probs[:, :-1], draft_probs))
    passes = torch.where(usable & (p > 0), torch.where(q > p, p / q, 1.0), 0.0)
    tests = torch.stack([passes, 1 - passes], 2).log().flatten(0, 1)
    place = torch.arange(drafts, device=device)
    others = (seeds ^ _DIAGNOSTIC)[:, None].expand(batch, drafts).flatten()
    tested = sample(tests, others, (positions[:, None] + place).flatten(), vocab_size=2)[0]
    more = ((tested.view(batch, drafts) == 0) & (place > emitted[:, None])).sum(1)
    counts[0].add_(emitted + more)
    counts[1].add_(emitted)
    return tokens, counts[0], counts[1]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from the attention over each.

    Tensor code. ``s`` is the logarithm to base 2, as FlashInfer returns it; the ``lse`` of `verify_attention` is the
    natural one: multiply it by log2(e). Two empty sets give 0 and -inf.

    Args:
        v_a, v_b: ``[R, H, D]`` float32, float16 or bfloat16.
        s_a, s_b: float32 ``[R, H]``.

    Returns:
        v ``[R, H, D]``, dtype of v_a, and s float32 ``[R, H]``.

    Raises:
        RuntimeError: wrong shape, dtype or device; names function, argument, wanted, got.
    """
    name = _name("merge_state")
    check(name, "v_a", v_a, "[R, H, D]", _FLOATS)
    like = ("v_a", v_a)
    sizes = [(dim, v_a.shape[dim], f"{what} of v_a") for dim, what in enumerate("RHD")]
    check(name, "v_b", v_b, "[R, H, D]", _FLOATS, sizes, like)
    for argument, t in (("s_a", s_a), ("s_b", s_b)):
        check(name, argument, t, "[R, H]", _FLOATS, sizes[:2], like)
    s_a, s_b = s_a.float(), s_b.float()
    top = torch.maximum(s_a, s_b)
    a, b = (torch.where(s == -torch.inf, 0, torch.exp2(s - top)) for s in (s_a, s_b))
    total = a + b
    a, b = (torch.where(total > 0, part / total, 0)[:, :, None] for part in (a, b))
    return (a * v_a.float() + b * v_b.float()).to(v_a.dtype), total.log2() + top
