"""Strategies of hypothesis for inputs of sample, verify_chain, verify_tree, tree_links and tree_from_mask.

Every request (row of `sample`) of a batch is drawn by itself: its rows, ids, parents, controls and logits,
none of which depends on another request. So a batch of n requests is n inputs. Contents are drawn as bytes
that choose from tables in which NaN, infinities, huge numbers, foreign ids and absurd controls are frequent.
"""

import numpy as np
import torch
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")
REQUESTS = 10  # of a batch
MAX_DRAFTS = 3
MAX_NODES = 7

_ODD = [NAN, INF, 3e38, -3e38, 1e-40, -1e-40, 0.0, -0.0, 1e4, -1e4]
LOGITS = np.array(_ODD + [-INF] * 16 + [5.0] * 8 + list(np.linspace(-6, 6, 222)), dtype=np.float32)
SANE_LOGITS = np.where(np.isfinite(LOGITS), LOGITS, np.float32(1.0))
assert len(LOGITS) == 256
FOREIGN_IDS = [-1, -1, -1, -7, 2**31 - 1, -(2**31)]
TEMPERATURES = [1.0, 0.7, 0.0, 1e-6, 1.1e-5, 50.0, 1e30, INF, NAN, -1.0, -INF]
TOP_KS = [-1, 0, 1, 2, 3, 5, 9, 2**31 - 1, -(2**31)]
FRACTIONS = [0.0, 1e-9, 0.1, 0.3, 0.6, 0.9, 1.0, 2.0, -1.0, NAN, INF]
PENALTIES = [1.0, 0.0, 0.5, 1.7, -0.4, NAN, INF, -INF, 3e38, 1e-40]
COUNTS = [0, 0, 0, 1, 2, 7, -3, 2**31 - 1, -(2**31)]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345678901]
POSITIONS = [0, 5, 2**31 - 1, 2**32 + 1, 2**63 - 1, -1, -(2**63)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Bytes:
    """Numbers of one request, taken one after the other from its bytes."""

    def __init__(self, data):
        self.data, self.at = np.frombuffer(data, dtype=np.uint8), 0

    def take(self, n):
        # Later ones again from the start: a short string is as good as a long one.
        some = np.take(self.data, np.arange(self.at, self.at + n), mode="wrap")
        self.at += n
        return some.astype(np.int64)

    def of(self, table, n=1):
        return np.asarray(table)[self.take(n) % len(table)]

    def logits(self, n):
        table = LOGITS if self.take(1)[0] % 4 == 0 else SANE_LOGITS
        return table[self.take(n)]

    def ids(self, n, vocab):
        low = self.take(n)
        foreign = self.of([*FOREIGN_IDS, vocab], n)
        return np.where(low % 16 == 15, foreign, (low // 16 + low) % vocab)


def _requests(size):
    return st.lists(
        st.binary(min_size=size, max_size=size), min_size=REQUESTS, max_size=REQUESTS
    ).map(lambda some: [Bytes(data) for data in some])


def _stack(parts, dtype):
    return torch.from_numpy(np.stack(parts)).to(dtype)


def _joined(parts, dtype):
    return torch.from_numpy(np.concatenate(parts)).to(dtype)


def _numbers(requests, table, dtype=torch.float32):
    return _joined([r.of(table) for r in requests], dtype)


def _controls(draw, requests, row_owner, vocab):
    """Any set of controls for requests; row_owner: the request that each row of logits belongs to."""
    on = draw(st.integers(0, 2**9 - 1))
    words = (vocab + 31) // 32
    out = {}
    for bit, (name, table) in enumerate(
        [("temperature", TEMPERATURES), ("top_p", FRACTIONS), ("min_p", FRACTIONS)]
    ):
        if on >> bit & 1:
            out[name] = _numbers(requests, table)
    if on >> 3 & 1:
        out["top_k"] = _numbers(requests, TOP_KS, torch.int32)
    if on >> 4 & 1:
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            out[name] = _numbers(requests, PENALTIES)
        out["token_counts"] = _stack([r.of(COUNTS, vocab) for r in requests], torch.int32)
    if on >> 5 & 1:
        out["prompt_mask"] = _stack([r.take(words) * 0x01010101 for r in requests], torch.int32)
    if on >> 6 & 1:
        lengths = [int(r.take(1)[0]) % 4 for r in requests]
        out["bias_offsets"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        out["bias_ids"] = _joined(
            [r.ids(n, vocab) for r, n in zip(requests, lengths, strict=True)], torch.int64
        )
        out["bias_values"] = _joined(
            [r.logits(n) for r, n in zip(requests, lengths, strict=True)], torch.float32
        )
    if on >> 7 & 1 and row_owner:
        out["token_bitmask"] = _stack(
            [requests[b].take(words) * 0x10204081 for b in row_owner], torch.int32
        )
        if on >> 8 & 1:
            rows = [requests[b].of([0, 1, -1, 2, -5, 2**31 - 1]) for b in row_owner]
            out["bitmask_rows"] = _joined(rows, torch.int32)
    out["filter_order"] = draw(st.sampled_from(["sequential", "joint"]))
    out["num_logprobs"] = draw(st.sampled_from([-1, -1, 0, 2, 1024]))
    out["logprobs_mode"] = draw(st.sampled_from(["raw", "processed"]))
    return out


@st.composite
def sample_cases(draw):
    requests, vocab = draw(_requests(96)), draw(st.integers(1, 40))
    return {
        "logits": _stack([r.logits(vocab) for r in requests], draw(st.sampled_from(DTYPES))),
        "seeds": _numbers(requests, SEEDS, torch.int64),
        "positions": _numbers(requests, POSITIONS, torch.int64),
        "vocab_size": vocab,
        **_controls(draw, requests, list(range(REQUESTS)), vocab),
    }


def _offsets(draw, lengths):
    """cu_rows of requests of these lengths; sometimes not what anybody may pass."""
    cu_rows = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    if draw(st.integers(0, 7)) == 0:
        wrong = draw(
            st.lists(st.sampled_from([-5, 0, 3, 7, 100, 2**31 - 1]), min_size=2, max_size=2)
        )
        cu_rows[draw(st.integers(0, REQUESTS))], cu_rows[draw(st.integers(0, REQUESTS))] = wrong
    return cu_rows


def _verification(draw, requests, most_rows, vocab):
    """What chain and tree verification share; (case, lengths of the requests)."""
    lengths = [int(r.take(1)[0]) % (most_rows + 1) for r in requests]
    owner = [b for b, n in enumerate(lengths) for _ in range(n)] or [0]
    case = {
        "target_logits": _stack(
            [requests[b].logits(vocab) for b in owner], draw(st.sampled_from(DTYPES))
        ),
        "input_ids": _joined(
            [requests[b].ids(1, vocab) for b in owner],
            draw(st.sampled_from([torch.int32, torch.int64])),
        ),
        "cu_rows": _offsets(draw, lengths),
        "seeds": _numbers(requests, SEEDS, torch.int64),
        "positions": _numbers(requests, POSITIONS, torch.int64),
        "vocab_size": vocab,
        **_controls(draw, requests, owner, vocab),
    }
    if draw(st.booleans()):
        case["draft_temperature"] = _numbers(requests, TEMPERATURES)
    return case, owner


def _draft_columns(draw, case, vocab):
    """Columns of draft_logits, with or without a map of its own."""
    if not draw(st.booleans()):
        return vocab
    columns = draw(st.integers(1, vocab))
    ids = np.array(draw(st.permutations(range(vocab)))[:columns])
    if draw(st.integers(0, 3)) == 0:  # ids outside the vocabulary
        ids[draw(st.integers(0, columns - 1))] = draw(st.sampled_from([-1, vocab, 2**40, -(2**63)]))
    case["d2t"], case["d2t_is_offset"] = torch.from_numpy(ids), False
    return columns


@st.composite
def chain_cases(draw):
    requests, vocab = draw(_requests(192)), draw(st.integers(1, 20))
    case, _ = _verification(draw, requests, MAX_DRAFTS + 2, vocab)
    case["max_drafts"] = draw(st.integers(0, MAX_DRAFTS))
    case["method"] = draw(st.sampled_from(["token", "block", "sampled", "typical"]))
    if draw(st.integers(0, 3)):
        columns = _draft_columns(draw, case, vocab)
        rows = [[r.logits(columns) for _ in range(case["max_drafts"])] for r in requests]
        shape = (REQUESTS, case["max_drafts"], columns)
        case["draft_logits"] = torch.from_numpy(np.array(rows, np.float32).reshape(shape)).to(
            draw(st.sampled_from(DTYPES))
        )
        case["draft_controls"] = draw(st.booleans())
        if draw(st.booleans()):
            case["draft_rows"] = _numbers(
                requests, [0, 1, 9, -1, 10, 2**31 - 1, -(2**31)], torch.int32
            )
        if draw(st.booleans()):
            case["draft_is_one_hot"] = _numbers(requests, [True, False, False], torch.bool)
    return case


def _parents(request, count):
    """Mostly a tree."""
    some, kinds = request.take(count), request.take(count)
    odd = request.of([-1, -2, 2**31 - 1, -(2**31), MAX_NODES, 3], count)
    own = np.arange(count)
    tree = np.where(own > 0, some % np.maximum(own, 1), -1)
    return np.where(kinds % 16 == 15, odd, tree)


@st.composite
def tree_cases(draw):
    requests, vocab = draw(_requests(192)), draw(st.integers(1, 20))
    case, owner = _verification(draw, requests, MAX_NODES, vocab)
    lengths = [owner.count(b) for b in range(REQUESTS)]
    case["parents"] = _joined(
        [_parents(r, n) for r, n in zip(requests, lengths, strict=True)], torch.int32
    )
    case["max_depth"] = draw(st.integers(0, MAX_NODES))
    case["method"] = draw(st.sampled_from(["token", "traversal"]))
    case["children"] = draw(
        st.sampled_from(["deterministic", "sampled", "sampled_with_replacement"])
    )
    if case["children"] != "deterministic":
        columns = _draft_columns(draw, case, vocab)
        rows = [requests[b].logits(columns) for b in owner]
        case["draft_logits"] = _stack(rows, draw(st.sampled_from(DTYPES)))
        case["draft_controls"] = draw(st.booleans())
    return case


@st.composite
def links_cases(draw):
    requests = draw(_requests(64))
    lengths = [int(r.take(1)[0]) % (3 * MAX_NODES) for r in requests]
    parents = [_parents(r, n) for r, n in zip(requests, lengths, strict=True)]
    return {
        "parents": _joined(parents, torch.int32),
        "cu_rows": _offsets(draw, lengths),
        "max_nodes": draw(st.sampled_from([0, 1, 5, 20, 32, 33, 70])),
    }


@st.composite
def mask_cases(draw):
    """Masks of trees with some bits turned over, or any bits."""
    requests, words = draw(_requests(96)), draw(st.integers(1, 2))
    lengths = [int(r.take(1)[0]) % (3 * MAX_NODES) for r in requests]
    rows = []
    for r, n in zip(requests, lengths, strict=True):
        masks = np.zeros((n, words), dtype=np.int64)
        for u, parent in enumerate(_parents(r, n)):
            if 0 <= parent < u:
                masks[u] = masks[parent]
            masks[u, 0] |= 1 << u
        flips = r.take(n)
        masks[:, 0] ^= np.where(flips % 16 == 15, 1 << (flips % 23), 0)
        rows.append(np.where(r.take(1)[0] % 8 == 7, r.take(n * words).reshape(n, words), masks))
    return {"tree_mask": _joined(rows, torch.int32), "cu_rows": _offsets(draw, lengths)}


CASES = {
    "sample": sample_cases(),
    "verify_chain": chain_cases(),
    "verify_tree": tree_cases(),
    "tree_links": links_cases(),
    "tree_from_mask": mask_cases(),
}
