"""Cases of verify_chain for the tests: building them, running the op, comparing with the oracle."""

import functools

import numpy as np
import torch
from compare import DECISION_BAND, assert_decisions, assert_same
from oracles import verify_chain as oracle

from specdec_ext._philox import philox4x32

NAMES = ["tokens", "num_accepted", "status", "logprobs", "top_ids", "top_logprobs"]
POSITIONAL = ["target_logits", "input_ids", "cu_rows", "seeds", "positions", "max_drafts"]
_PER_REQUEST = ["draft_temperature", "draft_is_one_hot", "draft_rows", "temperature"]


def coins(seeds, position, index, purpose):
    """uniform(seed, position, index, purpose) for an array of seeds."""
    seeds = np.asarray(seeds).astype(np.uint64)
    low, high = int(position) & 0xFFFFFFFF, int(position) >> 32
    counter = np.broadcast_to(
        np.array([low, index, 0, purpose + 8 * high], dtype=np.uint64), (*seeds.shape, 4)
    )
    key = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=-1)
    return (philox4x32(counter, key)[..., 0] >> np.uint32(8)) * 2.0**-24


def logits_of(probabilities):
    """float32 logits of given probabilities; 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.asarray(probabilities, dtype=np.float64))).float()


def repeated(p, drafts, seeds, q=None, **options):
    """The same request once per seed: p [K+1, V] and q [K, V] are probabilities."""
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    batch, rows = len(seeds), len(drafts) + 1
    case = {
        "target_logits": logits_of(p).repeat(batch, 1),
        "input_ids": torch.tensor([0, *drafts]).repeat(batch),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * rows,
        "seeds": seeds,
        "positions": torch.zeros(batch, dtype=torch.int64),
        "max_drafts": len(drafts),
        "vocab_size": len(p[0]),
        **options,
    }
    if q is not None:
        case["draft_logits"] = logits_of(q).repeat(batch, 1, 1)
    return case


def run(backend, case):
    """Results on the CPU. Tensors keep their strides."""
    return backend.call("verify_chain", POSITIONAL, case)


def assert_equal(got, wanted, what=""):
    for name, mine, theirs in zip(NAMES, got, wanted, strict=True):
        assert_same(mine, theirs, f"{name} {what}")


def check(backend, case):
    """The op against the oracle given its random numbers; returns the op's results."""
    out = run(backend, case)
    tokens, num_accepted, status, logprobs, top_ids, top_logprobs = out
    batch, width = case["cu_rows"].shape[0] - 1, case["max_drafts"] + 1
    assert tokens.dtype == top_ids.dtype == case["input_ids"].dtype
    assert num_accepted.dtype == status.dtype == torch.int32
    assert tokens.shape == logprobs.shape == (batch, width)
    assert top_ids.shape == top_logprobs.shape == (batch, width, 0)
    assert (logprobs == 0).all() and logprobs.dtype == top_logprobs.dtype == torch.float32
    assert_allowed(out, case)
    return out


def assert_allowed(out, case):
    """Decisions and padding of given results against the oracle."""
    tokens, num_accepted, status = out[:3]
    batch, width = tokens.shape
    positional = [case[name] for name in POSITIONAL]
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    allowed = oracle.outcomes(*positional, **options, band=DECISION_BAND)
    got = []
    num_rows = case["target_logits"].shape[0]
    for b in range(batch):
        begin, a = int(case["cu_rows"][b].clamp(0, num_rows)), int(num_accepted[b])
        row = tokens[b].tolist()
        if allowed[b] == [None]:
            assert (row, a, int(status[b])) == ([-1] * width, 0, 0), f"inactive request {b}"
            got.append(None)
            continue
        # Accepted drafts, one token more, then padding; an id of the vocabulary in any case.
        assert row[:a] == case["input_ids"][begin + 1 : begin + 1 + a].tolist(), f"request {b}"
        assert row[a + 1 :] == [-1] * (width - a - 1), f"request {b}"
        assert all(0 <= token < case["vocab_size"] for token in row[: a + 1]), f"request {b}"
        got.append((a, row[a], int(status[b])))
    assert_decisions(got, allowed, "request")


def random_case(
    batch, vocab, max_drafts, *, seed=0, dtype=torch.float32, draft_dtype=None, scale=2.0
):
    """Ragged requests with everything mixed: greedy and sampled, one-hot and drawn drafts, padding
    rows, inactive requests, placeholders and foreign ids."""
    g = torch.Generator().manual_seed(seed)

    def randint(low, high, shape):
        return torch.randint(low, high, shape, generator=g)

    rows_b = randint(0, max_drafts + 3, (batch,))
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), rows_b.cumsum(0)]).int()
    rows = int(cu_rows[-1]) + 2
    target = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
    draft = torch.randn(batch + 1, max_drafts, vocab, generator=g) * scale
    ids = randint(0, vocab, (rows,))
    draft_rows = torch.randperm(batch + 1, generator=g)[:batch].int()
    draft_rows[randint(0, batch, (batch // 5,))] = -1
    draft_temperature = torch.rand(batch, generator=g) + 0.5
    draft_temperature[randint(0, batch, (batch // 6,))] = 0.0
    temperature = torch.rand(batch, generator=g) + 0.5
    temperature[randint(0, batch, (batch // 4,))] = 0.0
    temperature[randint(0, batch, (batch // 4,))] = 1.0
    for b in range(batch):
        for j in range(min(int(rows_b[b]) - 1, max_drafts)):
            row = int(cu_rows[b]) + j
            if randint(0, 2, (1,)):  # a drafter that often agrees
                draft[draft_rows[b], j] = (
                    target[row].float() + torch.randn(vocab, generator=g) * 0.3
                )
            law = torch.softmax(draft[draft_rows[b], j] / max(float(draft_temperature[b]), 0.1), -1)
            ids[row + 1] = torch.multinomial(law, 1, generator=g)
            if temperature[b] == 0 and randint(0, 4, (1,)):
                ids[row + 1] = target[row].float().argmax()
            if randint(0, 12, (1,)) == 0:
                ids[row + 1] = [-1, vocab, -7, 2**40][int(randint(0, 4, (1,)))]
    return {
        "target_logits": target,
        "input_ids": ids,
        "cu_rows": cu_rows,
        "seeds": randint(-(2**63), 2**63 - 1, (batch,)),
        "positions": randint(0, 2**40, (batch,)),
        "max_drafts": max_drafts,
        "vocab_size": vocab,
        "draft_logits": draft.to(draft_dtype or dtype),
        "draft_rows": draft_rows,
        "draft_temperature": draft_temperature,
        "draft_is_one_hot": randint(0, 6, (batch,)) == 0,
        "temperature": temperature,
    }


def take(case, order):
    """The same requests in another order, or some of them."""
    cu = case["cu_rows"].tolist()
    rows = [torch.arange(cu[b], cu[b + 1]) for b in order]
    out = dict(case)
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    out["target_logits"] = case["target_logits"][index]
    out["input_ids"] = case["input_ids"][index]
    lengths = torch.tensor([0] + [len(r) for r in rows])
    out["cu_rows"] = lengths.cumsum(0).int()
    for name in ["seeds", "positions", *_PER_REQUEST]:
        if case.get(name) is not None:
            out[name] = case[name][list(order)]
    if case.get("draft_logits") is not None and case.get("draft_rows") is None:
        out["draft_logits"] = case["draft_logits"][list(order)]
    return out


@functools.lru_cache
def seeds_with(position, index, purpose, low, high, count=1):
    """The first `count` seeds whose uniform number lies in [low, high)."""
    found = np.zeros(0, dtype=np.int64)
    start, step = 0, 1 << 16
    while len(found) < count:
        seeds = np.arange(start, start + step)
        u = coins(seeds, position, index, purpose)
        found = np.concatenate([found, seeds[(low <= u) & (u < high)]])
        start += step
    return found[:count].tolist()
