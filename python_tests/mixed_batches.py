"""Random mixed batches of sample, verify_chain and verify_tree: ragged requests, controls that are on for
some and off for others, all methods, placeholders, foreign ids and rows with NaN.

`random_batch(seed)` is one batch; `compare(...)` holds one backend's results to another's.
"""

import random

import chains
import torch
import trees
from compare import DECISION_BAND, assert_close
from control_cases import EDITS, FILTERS, SAMPLE_NAMES, random_controls, run_sample, with_d2t
from oracles import sample as sample_oracle
from oracles import verify_chain as chain_oracle
from oracles import verify_tree as tree_oracle

# No multiples of anything that kernels step by; 4099 has a second tile of three entries.
VOCABS = [1, 2, 3, 5, 7, 11, 13, 29, 31, 37, 61, 67, 101, 127, 251, 257]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHAIN_METHODS = ["token", "block", "sampled", "typical"]
TREE_RULES = [
    (children, method)
    for children in ("deterministic", "sampled", "sampled_with_replacement")
    for method in ("token", "traversal")
]
NAN, INF = float("nan"), float("inf")
FLOAT_NAMES = {"logprob", "logprobs", "lse", "top_logprobs"}


def random_batch(seed):
    """(op, its arguments by name)."""
    rng = random.Random(seed)
    vocab = 4099 if rng.random() < 0.01 else rng.choice(VOCABS)
    op = rng.choice(["sample", "verify_chain", "verify_chain", "verify_tree", "verify_tree"])
    make = {"sample": _sample, "verify_chain": _chain, "verify_tree": _tree}[op]
    return op, make(rng, seed, vocab)


def _controls(rng, seed, batch, rows, vocab):
    some = random_controls(
        batch,
        rows,
        vocab,
        seed=seed,
        edits=[name for name in EDITS if rng.random() < 0.4],
        filters=[name for name in FILTERS if rng.random() < 0.4],
        joint=rng.random() < 0.5,
    )
    some["num_logprobs"] = rng.choice([-1, -1, 0, 1, 3, min(2 * vocab, 1024)])
    some["logprobs_mode"] = rng.choice(["raw", "processed"])
    return some


def _damage(rng, logits, chance):
    """Some rows with NaN or infinities: one lane, or all."""
    rows = logits.flatten(0, -2)
    for row in rows:
        if rng.random() < chance:
            value = rng.choice([NAN, NAN, INF, -INF])
            if rng.random() < 0.5:
                row[rng.randrange(len(row))] = value
            else:
                row[:] = value


def _sample(rng, seed, vocab):
    g = torch.Generator().manual_seed(seed)
    rows = rng.randint(1, 6)
    logits = (torch.randn(rows, vocab, generator=g) * rng.choice([0.3, 2.0, 6.0])).to(
        rng.choice(DTYPES)
    )
    _damage(rng, logits, 0.1)
    return {
        "logits": logits,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        "positions": torch.randint(0, 2**40, (rows,), generator=g),
        "vocab_size": vocab,
        **_controls(rng, seed, rows, rows, vocab),
    }


def _chain(rng, seed, vocab):
    batch = rng.randint(1, 4)
    case = chains.random_case(
        batch,
        vocab,
        rng.randint(0, 4),
        seed=seed,
        dtype=rng.choice(DTYPES),
        draft_dtype=rng.choice(DTYPES),
        scale=rng.choice([0.7, 2.0]),
    )
    case.update(_controls(rng, seed, batch, case["target_logits"].shape[0], vocab))
    case["method"] = rng.choice(CHAIN_METHODS)
    kind = rng.random()
    if kind < 0.2:
        case = {k: v for k, v in case.items() if not k.startswith("draft_")}
    else:
        case["draft_controls"] = rng.random() < 0.4
        if kind < 0.5:
            case = with_d2t(
                case,
                rng.randint(1, vocab),
                seed=seed,
                increasing=rng.random() < 0.5,
                offset=rng.random() < 0.5,
            )
        _damage(rng, case["draft_logits"], 0.03)
    _damage(rng, case["target_logits"], 0.04)
    return case


def _tree(rng, seed, vocab):
    children, method = rng.choice(TREE_RULES)
    batch = rng.randint(2, 4)
    case = trees.random_case(
        batch,
        vocab,
        rng.randint(1, 9),
        seed=seed,
        dtype=rng.choice(DTYPES),
        children=children,
        method=method,
        reduced=rng.random() < 0.4,
        with_controls=False,
        scale=rng.choice([0.7, 2.0]),
    )
    case.update(_controls(rng, seed, batch, case["target_logits"].shape[0], vocab))
    if case.get("draft_logits") is not None:
        _damage(rng, case["draft_logits"], 0.03)
    _damage(rng, case["target_logits"], 0.04)
    return case


def run(backend, op, case):
    call = {"sample": run_sample, "verify_chain": chains.run, "verify_tree": trees.run}[op]
    return call(backend, case)


def names_of(op):
    return {"sample": SAMPLE_NAMES, "verify_chain": chains.NAMES, "verify_tree": trees.NAMES}[op]


def compare(op, case, got, wanted, what=""):
    """Ids, counts, paths and status bit for bit, log-probabilities within rounding. Returns the number of
    requests (rows of `sample`) whose decision differs; each of these must lie within the oracle's band,
    on both sides, or this raises."""
    names = names_of(op)
    exact = [(n, a, b) for n, a, b in zip(names, got, wanted, strict=True) if n not in FLOAT_NAMES]
    count = got[0].shape[0]
    same = torch.ones(count, dtype=torch.bool)
    for name, mine, theirs in exact:
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), f"{what}: {name}"
        same &= (mine == theirs).flatten(1).all(1) if mine.dim() > 1 else mine == theirs
    crossings = (~same).nonzero()[:, 0].tolist()
    if crossings:
        allowed = _allowed(op, case)
        for b in crossings:
            mine, theirs = _decision(op, got, b), _decision(op, wanted, b)
            assert mine != theirs and {mine, theirs} <= set(allowed[b]), (
                f"{what}: {op} request {b}: {mine} and {theirs}, wanted one of {allowed[b]}"
            )
    for name, mine, theirs in zip(names, got, wanted, strict=True):
        if name in FLOAT_NAMES:
            magnitude = max(
                32.0, float(theirs.abs().nan_to_num(0, 0, 0).max()) if theirs.numel() else 0
            )
            assert_close(mine[same], theirs[same], what=f"{what}: {name}", magnitude=magnitude)
    return len(crossings)


def _allowed(op, case):
    names = {"sample": ["logits", "seeds", "positions"], "verify_chain": chains.POSITIONAL}.get(
        op, trees.POSITIONAL
    )
    positional = [case[name] for name in names]
    options = {k: v for k, v in case.items() if k not in names}
    if op == "sample":
        options = {k: v for k, v in options.items() if k not in ("num_logprobs", "logprobs_mode")}
        return sample_oracle.allowed(*positional, **options, band=DECISION_BAND)
    oracle = chain_oracle if op == "verify_chain" else tree_oracle
    return oracle.outcomes(*positional, **options, band=DECISION_BAND)


def _decision(op, results, b):
    by_name = dict(zip(names_of(op), results, strict=True))
    tokens = by_name["tokens"]
    if op == "sample":
        return int(tokens[b])
    a = int(by_name["num_accepted"][b])
    reached = tuple(by_name["path"][b].tolist()[: a + 1]) if op == "verify_tree" else a
    return (reached, int(tokens[b, a]), int(by_name["status"][b]))
