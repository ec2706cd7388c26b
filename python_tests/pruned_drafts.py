"""Random calls of markov_draft with and without a table of w2."""

import torch
from oracles import markov_draft as oracle
from tree_cases import soil

import specdec_ext

POSITIONAL = ["base_logits", "anchor_ids", "w1", "w2", "seeds", "positions"]
KINDS = [
    "plain", "plain", "near", "near", "ties", "flat", "minus", "nan", "plus", "huge", "tiny", "w2 inf",
    "w1 nan", "anchor", "mixed", "outside",
]  # fmt: skip


def run(backend, case):
    """tokens and confidence; nothing else is asked for."""
    batch, drafts, _ = case["base_logits"].shape
    soil(batch * drafts, batch * drafts)
    prepared = case.get("prepared")
    if prepared is not None:
        prepared = [t.to(backend.device) for t in prepared]
    asked = {"return_logits": False, "return_logprobs": False, "prepared": prepared}
    tokens, logprob, lse, confidence, logits = backend.call(
        "markov_draft", POSITIONAL, case | asked
    )
    assert logprob.shape == lse.shape == logits.shape == (0,)
    return tokens, confidence


def table_of(w2):
    """On one thread: for tables this small, several only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return specdec_ext.prepare_markov(w2)
    finally:
        torch.set_num_threads(threads)


def pruned(backend, case):
    return run(backend, case | {"prepared": table_of(case["w2"])})


def random_case(seed, big=True):
    """Greedy, but for "mixed". "near": rows of w2 that differ by less than a step of their codes."""
    g = torch.Generator().manual_seed(seed)

    def pick(*some):
        return some[int(torch.randint(0, len(some), (1,), generator=g))]

    kind = pick(*KINDS)
    vocab = (
        600
        if kind == "outside"
        else pick(1, 5, 16, 17, 50, 511, 513, 700, *([1025, 1600] if big else []))
    )
    weights = pick(torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
    case = oracle.random_case(
        g,
        batch=pick(1, 2, 5, 9),
        drafts=pick(1, 2, 4),
        vocab=vocab,
        rank=pick(0, 1, 8, 31, 64, 64, 96, 256, 300),
        depth=pick(1, 12),
        head=pick("vanilla", "vanilla", "gated", "rnn"),
        dtype=pick(torch.float32, torch.bfloat16, torch.float16),
        weights=weights,
        confidence=pick(True, False),
        columns=300 if kind == "outside" else pick(None, None, max(1, vocab // 2)),
        scale=pick(0.0, 1.0, 5.0),
    )
    w1, w2, base = case["w1"], case["w2"], case["base_logits"]
    case["temperature"][:] = pick(0.0, -1.0, float("nan"))
    at = int(torch.randint(0, len(w2), (1,), generator=g))
    if kind == "near":
        noise = torch.randn(w2.shape, generator=g) * 2e-3
        case["w2"] = (w2[:1].float() + noise).to(w2.dtype)
        base.copy_(base[:, :, :1] + (base - base[:, :, :1]) * 1e-3)
    elif kind == "ties":
        case["w2"] = w2[torch.randint(0, min(3, len(w2)), (len(w2),), generator=g)]
        base.copy_(base.round() * 0.0 + 1.0)
    elif kind == "flat":
        w2.zero_()
        base.fill_(pick(0.0, -3.5))
    elif kind == "minus":
        base[:, :, ::2] = -float("inf")
        base[0] = -float("inf")
    elif kind in ("nan", "plus"):
        base[0, -1, at] = float(kind == "plus" and "inf" or "nan")
    elif kind == "huge":
        w2[at] = 1e4 if weights == torch.float16 else 1e20
    elif kind == "tiny":
        w2.mul_(1e-30)
        base.mul_(1e-30)
    elif kind == "w2 inf" and w2.shape[1]:
        w2[at, -1] = pick(float("inf"), -float("inf"), float("nan"))
    elif kind == "w1 nan" and w2.shape[1]:
        w1[at % len(w1), 0] = pick(float("nan"), float("inf"), 3e4)
        case["anchor_ids"][0] = at % len(w1)
    elif kind == "anchor":
        case["anchor_ids"][-1] = pick(-1, vocab)
    elif kind == "outside":  # a column without a target id, which would win by far
        case["d2t"][at], base[:, :, at] = 10**6, 90.0
    elif kind == "mixed":
        case["temperature"][-1] = 0.7
    return case
