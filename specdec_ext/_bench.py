"""`python -m specdec_ext bench`: a few ops against what torch has for the same, in seconds.

A first impression of a machine. benchmarks/ in the source tree has every op, floors, and the spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import specdec_ext

_TURNS = 9
_TURN_SECONDS = 0.02

Case = tuple[str, Callable[[], object], str, Callable[[], object]]


def cases(device: torch.device, scale: int = 1) -> Iterator[Case]:
    """(name, ours, name of the contender, contender); scale divides the sizes."""
    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g).to(device)

    vocab, drafts = 128_000 // scale, 7
    logits = random(1, vocab)
    seed, position = torch.tensor([1], device=device), torch.tensor([10], device=device)
    yield (
        f"sample, 1 x {vocab}",
        lambda: specdec_ext.sample(logits, seed, position, vocab_size=vocab),
        "softmax + multinomial",
        lambda: logits.softmax(-1).multinomial(1),
    )

    target, draft = random(drafts + 1, vocab), random(1, drafts, vocab)
    ids = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), draft[0].argmax(-1)])
    rows = torch.tensor([0, drafts + 1], dtype=torch.int32, device=device)

    def torch_verify():
        p, q = target.softmax(-1), draft[0].softmax(-1)
        at = torch.arange(drafts, device=device)
        accepted = torch.rand(drafts, device=device) * q[at, ids[1:]] < p[at, ids[1:]]
        n = int(accepted.int().cumprod(0).sum())
        rest = p[n] if n == drafts else (p[n] - q[n]).clamp(min=0)
        return rest.multinomial(1)

    yield (
        f"verify_chain, {drafts} drafts x {vocab}",
        lambda: specdec_ext.verify_chain(
            target, ids, rows, seed, position, drafts, vocab_size=vocab, draft_logits=draft
        ),
        "softmax, compare, multinomial",
        torch_verify,
    )

    length, heads, kv_heads, dim = 4096 // scale, 16, 4, 128
    q, kv = random(drafts + 1, heads, dim), random(2, length // 16, 16, kv_heads, dim)
    table = torch.arange(length // 16, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    k, v = (cache.view(1, length, kv_heads, dim).transpose(1, 2) for cache in kv)
    mask = torch.ones(drafts + 1, length, dtype=torch.bool, device=device).tril(length - drafts - 1)
    yield (
        f"verify_attention, {drafts + 1} rows x {length} places",
        lambda: specdec_ext.verify_attention(
            q, kv[0], kv[1], table, rows, lens, max_rows=drafts + 1
        ),
        "scaled_dot_product_attention",
        lambda: F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
        ),
    )

    x, weight = random(drafts + 1, 2048 // scale), random(2048 // scale, 2048 // scale)
    yield (
        f"row_linear, {drafts + 1} rows x {2048 // scale} x {2048 // scale}",
        lambda: specdec_ext.row_linear(x, weight),
        "linear",
        lambda: F.linear(x, weight),
    )


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / calls


def run(report: Callable[[str], None], devices: list[torch.device], scale: int = 1) -> None:
    """One line per case: our time, and how many times it the contender takes (medians of turns)."""
    report(f"{torch.get_num_threads()} threads, float32, warm; ratio = torch's time / ours")
    for device in devices:
        for name, ours, peer_name, peer in cases(device, scale):
            calls = []
            for call in (ours, peer):
                _seconds(call, 1, device)
                calls.append(max(1, int(_TURN_SECONDS / _seconds(call, 2, device))))
            turns = [
                [_seconds(call, n, device) for call, n in zip((ours, peer), calls, strict=True)]
                for _ in range(_TURNS)
            ]
            us = statistics.median(turn[0] for turn in turns) * 1e6
            ratio = statistics.median(turn[1] / turn[0] for turn in turns)
            report(f"{device}  {name:<44} {us:9.1f} us  {ratio:6.1f} x {peer_name}")
