"""`python -m specdec_ext selftest`: every op once, on small inputs, against plain torch on the CPU.

It answers "does this installation work on this machine" in seconds. Whether the ops are right in all their
corners is what the test suite is for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import specdec_ext
from specdec_ext._philox import SAMPLE, philox4x32

_CLOSE = 2e-4  # absolute, for float32 results of size 1
CHECKS: dict[str, Callable[[torch.device], None]] = {}


def _check(check):
    CHECKS[check.__name__] = check
    return check


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _on(device, *tensors):
    """Copies on the device, so that a reference never sees what an op wrote."""
    return [tensor.to(device, copy=True) for tensor in tensors]


def _same(what: str, got: Tensor, wanted) -> None:
    got, wanted = got.cpu(), torch.as_tensor(wanted)
    if got.shape != wanted.shape or not bool((got == wanted).all()):
        raise AssertionError(f"{what}: wanted {wanted.tolist()}, got {got.tolist()}")


def _close(what: str, got: Tensor, wanted: Tensor) -> None:
    error = (got.cpu().double() - wanted.double()).abs().max().item()
    if not error <= _CLOSE:  # NaN, too
        raise AssertionError(f"{what}: differs by {error:g}, wanted at most {_CLOSE:g}")


# --- Cache and rounds --------------------------------------------------------------------------------


@_check
def append_kv(device):
    k, v, caches = _random(4, 2, 64), _random(4, 2, 64, seed=1), torch.zeros(2, 3, 4, 2, 64)
    slots = torch.tensor([5, 0, -1, 11])
    k_cache, v_cache = _on(device, *caches)
    specdec_ext.append_kv(*_on(device, k, v), k_cache, v_cache, *_on(device, slots))
    for got, rows, wanted in ((k_cache, k, caches[0]), (v_cache, v, caches[1])):
        keep = slots >= 0
        wanted.view(12, 2, 64)[slots[keep]] = rows[keep]
        _same("cache", got, wanted)


@_check
def compact_kv(device):
    cache, slots = _random(2, 4, 1, 64), torch.tensor([6, 1, 3, 4])
    path, accepted = torch.tensor([[0, 2, 3]], dtype=torch.int32), _int32(2)
    (moved,) = _on(device, cache)
    specdec_ext.compact_kv([moved], [], *_on(device, slots, _int32(0, 4), path, accepted))
    flat = cache.view(8, 64)
    flat[slots[:3]] = flat[slots[path[0].long()]]
    _same("cache", moved, cache)


@_check
def inject_kv(device):
    rows, layers, heads, dim = 3, 2, 2, 64
    kv, norm = _random(rows, layers, 2, heads, dim), 1 + 0.1 * _random(layers, dim, seed=1)
    angle = torch.arange(9)[:, None] * 10 ** (-torch.arange(0, dim, 2) / dim)
    positions, slots = torch.tensor([2, 5, 8]), torch.tensor([3, 0, 7])
    k_caches, v_caches = (list(torch.zeros(layers, 2, 4, heads, dim).to(device)) for _ in "kv")
    specdec_ext.inject_kv(
        *_on(device, kv, norm, angle.cos(), angle.sin(), positions, slots),
        k_caches,
        v_caches,
        eps=1e-6,
    )
    for layer in range(layers):
        k = F.rms_norm(kv[:, layer, 0], (dim,), norm[layer], 1e-6)
        a, b = k.chunk(2, -1)
        cos, sin = (table[positions][:, None] for table in (angle.cos(), angle.sin()))
        k = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        _close("K", k_caches[layer].view(8, heads, dim)[slots], k)
        _same("V", v_caches[layer].view(8, heads, dim)[slots], kv[:, layer, 1])


@_check
def next_round(device):
    tokens, table = torch.tensor([[5, 6, 7, -1]]), torch.tensor([[3, 0]], dtype=torch.int32)
    out = specdec_ext.next_round(
        *_on(device, tokens, _int32(2), _int32(4), table),
        page_size=8,
        block_len=3,
        mask_token_id=9,
    )
    wanted = ([[7, 9, 9]], [[7, 8, 9]], [[31, 0, 1]], [7], [3], [False])
    names = ("input_ids", "positions", "slots", "seq_lens", "num_emitted", "finished")
    for name, got, want in zip(names, out, wanted, strict=True):
        _same(name, got, want)


# --- Verification ------------------------------------------------------------------------------------


@_check
def verify_attention(device):
    q, k, v = _random(3, 4, 64), _random(30, 2, 64, seed=1), _random(30, 2, 64, seed=2)
    caches = torch.zeros(2, 5, 8, 2, 64)
    table = torch.tensor([[4, 1, 3, 0]], dtype=torch.int32)
    places = torch.arange(30)
    slots = table[0, places // 8].long() * 8 + places % 8
    for cache, rows in zip(caches, (k, v), strict=True):
        cache.view(40, 2, 64)[slots] = rows
    out, lse = specdec_ext.verify_attention(
        *_on(device, q, *caches, table, _int32(0, 3), _int32(30)), max_rows=3
    )
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = torch.einsum("rhd,thd->rht", q, k) / 8
    hidden = torch.ones(3, 30, dtype=torch.bool).triu(28)
    scores.masked_fill_(hidden[:, None], -math.inf)
    _close("lse", lse, scores.logsumexp(-1))
    _close("out", out, torch.einsum("rht,thd->rhd", scores.softmax(-1), v))


@_check
def row_linear(device):
    x, weight, bias = _random(5, 96), _random(40, 96, seed=1) / 10, _random(40, seed=2)
    x, weight, bias = _on(device, x, weight, bias)
    out = specdec_ext.row_linear(x, weight, bias)
    _close("y", out, F.linear(x.cpu().double(), weight.cpu().double(), bias.cpu().double()))
    _same("a row alone", specdec_ext.row_linear(x[2:3], weight, bias), out[2:3].cpu())


def _drawn(law: Tensor, seed: int, position: int) -> int:
    """What `sample` draws: the inverse CDF of its one number."""
    uniform = (int(philox4x32([position, 0, 0, SAMPLE], [seed, 0])[0]) >> 8) * 2.0**-24
    return int((law.double().cumsum(0) <= uniform).sum())


@_check
def sample(device):
    logits, temperature = 2 * _random(3, 500), torch.tensor([0.0, 1.0, 0.7])
    seeds, positions = torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])
    tokens, logprob, lse, status, *_ = specdec_ext.sample(
        *_on(device, logits, seeds, positions),
        vocab_size=500,
        temperature=temperature.to(device),
    )
    wanted = [int(logits[0].argmax())]
    wanted += [_drawn((logits[i] / temperature[i]).softmax(0), i + 1, 10 * i + 10) for i in (1, 2)]
    _same("status", status, [0, 0, 0])
    _same("tokens", tokens, wanted)
    _close("lse", lse, logits.logsumexp(-1))
    _close("logprob", logprob, logits.log_softmax(-1)[range(3), wanted])


@_check
def verify_chain(device):
    """Greedy drafts of which the second is wrong, and drafts drawn from the target's own law."""
    logits = _random(8, 300)
    best = logits.argmax(-1)
    ids = torch.cat([torch.tensor([7]), best[:3], torch.tensor([8]), best[4:7]])
    ids[2] = (ids[2] + 1) % 300
    tokens, accepted, status, *_ = specdec_ext.verify_chain(
        *_on(device, logits, ids, _int32(0, 4, 8), torch.tensor([1, 2]), torch.tensor([3, 4])),
        3,
        vocab_size=300,
        draft_logits=torch.stack([logits[:3], logits[4:7]]).to(device),
        temperature=torch.tensor([0.0, 1.0], device=device),
    )
    _same("status", status, [0, 0])
    _same("num_accepted", accepted, [1, 3])  # p = q is always accepted
    _same("greedy tokens", tokens[0], [int(best[0]), int(best[1]), -1, -1])
    _same("accepted drafts", tokens[1, :3], ids[5:])


@_check
def verify_tree(device):
    """A greedy request on a tree with the right token behind the second child of the root."""
    logits, parents = _random(4, 300), _int32(-1, 0, 0, 2)
    best = logits.argmax(-1)
    ids = torch.stack([torch.tensor(7), (best[0] + 1) % 300, best[0], best[2]])
    tokens, path, accepted, status, *_ = specdec_ext.verify_tree(
        *_on(device, logits, ids, parents, _int32(0, 4), torch.tensor([1]), torch.tensor([3])),
        2,
        vocab_size=300,
        temperature=torch.zeros(1, device=device),
    )
    _same("status", status, [0])
    _same("num_accepted", accepted, [2])
    _same("path", path, [[0, 2, 3]])
    _same("tokens", tokens, [[int(best[0]), int(best[2]), int(best[3])]])


# --- Drafting ----------------------------------------------------------------------------------------


@_check
def fuse_features(device):
    parts, weight, norm = [_random(3, 40), _random(3, 56, seed=1)], _random(32, 96, seed=2), 1.5
    out = specdec_ext.fuse_features(
        _on(device, *parts), *_on(device, weight, torch.full((32,), norm)), eps=1e-6
    )
    wanted = F.linear(torch.cat(parts, 1).double(), weight.double())
    wanted = norm * wanted / (wanted.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    _close("features", out, wanted)


@_check
def markov_draft(device):
    base, w1, w2 = _random(2, 3, 200), _random(200, 16, seed=1), _random(200, 16, seed=2)
    anchors = torch.tensor([3, 5])
    tokens, logprob, *_ = specdec_ext.markov_draft(
        *_on(device, base, anchors, w1, w2, torch.tensor([1, 2]), torch.tensor([10, 20])),
        vocab_size=200,
        temperature=torch.zeros(2, device=device),
    )
    before = anchors
    for k in range(3):
        logits = base[:, k] + w1[before] @ w2.T
        before = logits.argmax(-1)
        _same(f"draft {k + 1}", tokens[:, k], before)
        _close("logprob", logprob[:, k], logits.log_softmax(-1)[range(2), before])


@_check
def schedule_prefix(device):
    confidence = torch.tensor([[0.9, 0.8, 0.3], [0.5, 0.4, 0.9]])
    steps = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.6, 0.5, 0.4, 0.4])
    num_drafts, cu_rows = specdec_ext.schedule_prefix(*_on(device, confidence, steps))
    _same("num_drafts", num_drafts, [2, 0])
    _same("cu_rows", cu_rows, [0, 3, 4])


@_check
def expand_tree(device):
    logits, scores = _random(1, 3, 200), -_random(1, 3, seed=1).abs()
    tokens, slot, won, *_ = specdec_ext.expand_tree(*_on(device, logits, scores), 4, vocab_size=200)
    best = (logits.log_softmax(-1) + scores[:, :, None]).flatten(1).topk(4)
    _same("tokens", tokens, best.indices % 200)
    _same("parent_slot", slot, best.indices // 200)
    _close("scores", won, best.values)


@_check
def build_tree(device):
    """Candidates of two depths; every score is below its parent's, so each chosen one has its parent."""
    tokens, parents = torch.arange(10, 18)[None], _int32(-1, -1, -1, 0, 0, 1, 1, 2)[None]
    scores = torch.tensor([[-0.1, -0.5, -2.0, -0.3, -3.0, -0.9, -0.6, -4.0]])
    ids, above, mask, where, *_, status = specdec_ext.build_tree(
        *_on(device, tokens, scores, parents, torch.tensor([7]), torch.tensor([30])), 6
    )
    chosen = scores[0].topk(5).indices.sort().values.tolist()
    node = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(chosen)}
    wanted = [-1] + [node[int(parents[0, c])] for c in chosen]
    _same("input_ids", ids, [[7] + [10 + c for c in chosen]])
    _same("parents", above, [wanted])
    _same("tree_mask", mask[0, :, 0], _masks(wanted))
    _same("node_positions", where, [[30 + m.bit_count() - 1 for m in _masks(wanted)]])
    _same("status", status, [0])


def _masks(parents):
    masks = []
    for node, parent in enumerate(parents):
        masks.append(1 << node | (masks[parent] if parent >= 0 else 0))
    return masks


@_check
def block_tree(device):
    logits = 2 * _random(1, 3, 50)
    ids, parents, *_, status = specdec_ext.block_tree(
        *_on(device, logits, torch.tensor([7]), torch.tensor([30])), 6, 3, vocab_size=50
    )
    best = logits[0].log_softmax(-1).topk(3)
    paths = [((), 0.0)]
    for values, tokens in zip(*(t.tolist() for t in best), strict=True):
        longest = max(len(path) for path, _ in paths)
        paths += [
            ((*path, token), score + value)
            for path, score in paths
            if len(path) == longest
            for value, token in zip(values, tokens, strict=True)
        ]
    wanted = sorted(paths, key=lambda path: -path[1])[:6]
    ids, parents = ids[0].tolist(), parents[0].tolist()
    got = [()]
    for node in range(1, 6):
        got.append((*got[parents[node]], ids[node]))
    if got != [path for path, _ in wanted] or status.item() != 0:
        raise AssertionError(f"paths: wanted {[path for path, _ in wanted]}, got {got}")


_PARENTS = _int32(-1, 0, 0, 1, 1, 2)
_LINKS = {
    "depth": [0, 1, 1, 2, 2, 2],
    "first_child": [1, 3, 5, -1, -1, -1],
    "next_sibling": [-1, 2, -1, 4, -1, -1],
}


@_check
def tree_links(device):
    mask, *links, status = specdec_ext.tree_links(*_on(device, _PARENTS, _int32(0, 6)), 6)
    _same("tree_mask", mask[:, 0], _masks(_PARENTS.tolist()))
    for (name, wanted), got in zip(_LINKS.items(), links, strict=True):
        _same(name, got, wanted)
    _same("status", status, [0])


@_check
def tree_from_mask(device):
    mask = _int32(*_masks(_PARENTS.tolist()))[:, None]
    parents, *links, status = specdec_ext.tree_from_mask(*_on(device, mask, _int32(0, 6)))
    _same("parents", parents, _PARENTS)
    for (name, wanted), got in zip(_LINKS.items(), links, strict=True):
        _same(name, got, wanted)
    _same("status", status, [0])


def devices() -> list[torch.device]:
    """The CPU, and every GPU whose kernels can run."""
    found = [torch.device("cpu")]
    if not specdec_ext.cuda_reason:
        found += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return found


def run(report: Callable[[str], None]) -> int:
    """Every check on every device; one line each. Returns how many failed."""
    failed = 0
    start = time.perf_counter()
    for device in devices():
        for op in specdec_ext.op_names():
            try:
                CHECKS[op](device)
            except Exception as error:  # whatever it is, the other checks still say something
                failed += 1
                report(f"{device}  {op:<17} FAILED  {type(error).__name__}: {error}")
            else:
                report(f"{device}  {op:<17} ok")
    checks = len(devices()) * len(specdec_ext.op_names())
    report(f"{checks - failed} of {checks} checks passed in {time.perf_counter() - start:.1f} s")
    return failed
