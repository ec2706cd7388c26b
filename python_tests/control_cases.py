"""Sampling controls for random cases, of sample, verify_chain and verify_tree alike, and what results
under them are compared with.

`random_controls` gives every request of a batch controls of its own, each on for some and off for
others. `check_sample` and `check_chain` hold the ops to the oracles in everything that they return.
"""

import chains
import torch
from compare import DECISION_BAND, assert_close, assert_decisions, assert_same
from oracles import sample as sample_oracle
from oracles import verify_chain as chain_oracle

INF = float("inf")
EDITS = ["penalties", "bias", "bitmask"]
FILTERS = ["top_k", "top_p", "min_p"]


def random_controls(
    batch, rows, vocab, *, seed=0, edits=EDITS, filters=FILTERS, temperature=True, joint=False
):
    """Controls of `batch` requests over `rows` rows of logits. edits, filters: which kinds there are."""
    g = torch.Generator().manual_seed(1000 + seed)

    def randint(low, high, shape):
        return torch.randint(low, high, shape, generator=g)

    def some_off(values, off):
        """The values, `off` in a third of the places."""
        return torch.where(randint(0, 3, values.shape) == 0, torch.full_like(values, off), values)

    out = {}
    if temperature:
        t = torch.rand(batch, generator=g) * 1.5 + 0.3
        out["temperature"] = torch.where(randint(0, 6, (batch,)) == 0, torch.zeros(batch), t)
    if "top_k" in filters:
        sizes = torch.tensor([1, 2, 3, 10, 50, 400, vocab - 1, vocab, 2 * vocab])
        k = sizes[randint(0, len(sizes), (batch,))].clamp(min=1)
        out["top_k"] = some_off(k, -1).int()
    if "top_p" in filters:
        out["top_p"] = some_off(torch.rand(batch, generator=g), 1.0)
        out["top_p"][randint(0, batch, (1 + batch // 8,))] = 0.999
    if "min_p" in filters:
        out["min_p"] = some_off(torch.rand(batch, generator=g) ** 3, 0.0)
    if filters and joint:
        out["filter_order"] = "joint"
    if "penalties" in edits:
        out["repetition_penalty"] = some_off(torch.rand(batch, generator=g) + 0.5, 1.0)
        out["frequency_penalty"] = some_off(torch.randn(batch, generator=g) * 0.5, 0.0)
        out["presence_penalty"] = some_off(torch.randn(batch, generator=g) * 0.5, 0.0)
        out["token_counts"] = (randint(0, 4, (batch, vocab + 3)) - 2).clamp(min=0).int()
        if seed % 2:
            out["prompt_mask"] = randint(-(2**31), 2**31, (batch, (vocab + 31) // 32 + 1)).int()
    if "bias" in edits:
        lengths = randint(0, 6, (batch,)) * randint(0, 2, (batch,))
        out["bias_offsets"] = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
        n = int(lengths.sum())
        ids = randint(0, vocab, (n,))
        ids[randint(0, 8, (n,)) == 0] = vocab + 5  # foreign ids are ignored
        for i in range(1, n):  # repeated ids add
            if randint(0, 4, (1,)) == 0:
                ids[i] = ids[i - 1]
        out["bias_ids"] = ids
        out["bias_values"] = torch.randn(n, generator=g) * 2
        out["bias_values"][randint(0, 10, (n,)) == 0] = -INF
    if "bitmask" in edits:
        masks = max(rows // 2, 1)
        words = randint(-(2**31), 2**31, (masks, (vocab + 31) // 32)).int()
        out["token_bitmask"] = words
        chosen = randint(-1, masks, (rows,))
        chosen[randint(0, 3, (rows,)) == 0] = -1
        out["bitmask_rows"] = chosen.int()
    return out


# --- sample -----------------------------------------------------------------------------------------
SAMPLE_NAMES = ["tokens", "logprob", "lse", "status", "top_ids", "top_logprobs"]


def run_sample(backend, case):
    return backend.call("sample", ["logits", "seeds", "positions"], case)


def assert_logprobs(got, wanted, ids=None, wanted_ids=None, what=""):
    """Log-probabilities against the oracle; ids bit for bit."""
    if ids is not None:
        assert_same(ids.long(), wanted_ids.long(), f"{what}: top ids")
    assert_close(got, wanted, what=f"{what}: log-probabilities", magnitude=_magnitude(wanted))


def _magnitude(values):
    finite = values[torch.isfinite(values)]
    return max(float(finite.abs().max()) if finite.numel() else 1.0, 32.0)


def check_sample(backend, case):
    out = run_sample(backend, case)
    tokens, logprob, lse, status, top_ids, top_logprobs = out
    options = {k: v for k, v in case.items() if k not in ("logits", "seeds", "positions")}
    decisions = {k: v for k, v in options.items() if k not in ("num_logprobs", "logprobs_mode")}
    allowed = sample_oracle.allowed(
        case["logits"], case["seeds"], case["positions"], **decisions, band=DECISION_BAND
    )
    assert_decisions(tokens.tolist(), allowed, "row")
    wanted = sample_oracle.statistics(case["logits"], tokens, **options)
    assert_same(status, wanted[2], "status")
    assert_close(lse, wanted[1], what="lse", magnitude=_magnitude(wanted[1]))
    assert_logprobs(logprob, wanted[0], what="logprob")
    assert_logprobs(top_logprobs, wanted[4], top_ids, wanted[3], "top")
    return out


# --- verify_chain -----------------------------------------------------------------------------------
def check_chain(backend, case):
    """verify_chain against the oracle: decisions first, then the log-probabilities of what came out."""
    out = chains.run(backend, case)
    chains.assert_allowed(out, case)
    tokens, accepted = out[:2]
    wanted, wanted_ids, wanted_top = chain_oracle.logprobs(tokens, accepted, case)
    assert out[4].dtype == case["input_ids"].dtype
    assert_logprobs(out[3], wanted, what="logprobs")
    assert_logprobs(out[5], wanted_top, out[4], wanted_ids, "top")
    return out


def with_d2t(case, draft_vocab, *, seed=0, increasing=True, offset=True):
    """The case with a draft vocabulary of its own: columns map to distinct target ids."""
    g = torch.Generator().manual_seed(seed)
    vocab = case["vocab_size"]
    ids = torch.randperm(vocab, generator=g)[:draft_vocab]
    if increasing:
        ids = ids.sort().values
    out = dict(case)
    out["draft_logits"] = case["draft_logits"][..., :draft_vocab].contiguous()
    out["d2t"] = ids - torch.arange(draft_vocab) if offset else ids
    out["d2t_is_offset"] = offset
    # Drafts that have a draft id, mostly.
    tokens = out["input_ids"].clone()
    foreign = torch.randint(0, 5, tokens.shape, generator=g) == 0
    valid = (tokens >= 0) & (tokens < vocab) & ~foreign
    tokens[valid] = ids[tokens[valid] % draft_vocab]
    out["input_ids"] = tokens
    return out
