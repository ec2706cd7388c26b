"""Random sampling controls for tests: everything mixed per request, off values among them."""

import torch

PER_REQUEST = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "token_counts",
    "prompt_mask",
]


def words(g, rows, vocab, density):
    """int32 [rows, ceil(vocab / 32)] with a share `density` of the bits set."""
    bits = torch.rand(rows, -(-vocab // 32) * 32, generator=g) < density
    weights = torch.tensor([2**i for i in range(32)])
    return (bits.view(rows, -1, 32) * weights).sum(-1).to(torch.int64).to(torch.int32)


def controls(g, batch, rows, vocab, *, chance=0.6):
    """Controls of `batch` requests with `rows` rows. Each kind is given with probability `chance`, and is
    off for some of the requests."""

    def some(kind, off):
        """kind [batch] with off values at random places."""
        return torch.where(torch.rand(batch, generator=g) < 0.3, torch.full_like(kind, off), kind)

    def maybe():
        return torch.rand(1, generator=g).item() < chance

    def uniform(low, high):
        return low + (high - low) * torch.rand(batch, generator=g)

    out = {}
    if maybe():
        out["temperature"] = some(some(uniform(0.4, 1.8), 1.0), 0.0)
    if maybe():
        k = torch.randint(0, max(2, min(vocab, 60)), (batch,), generator=g)
        out["top_k"] = some(k, vocab + 3).int()
    if maybe():
        out["top_p"] = some(some(uniform(0.1, 1.05), 1.0), 0.0)
    if maybe():
        out["min_p"] = some(uniform(0.0, 0.4), -1.0)
    if maybe():
        out["token_counts"] = torch.randint(0, 3, (batch, vocab), generator=g).int()
        out["token_counts"][torch.rand(batch, vocab, generator=g) < 0.7] = 0
        if maybe():
            out["repetition_penalty"] = some(uniform(0.7, 1.6), 1.0)
        if maybe():
            out["frequency_penalty"] = some(uniform(-0.5, 0.8), 0.0)
        if maybe():
            out["presence_penalty"] = some(uniform(-0.5, 0.8), 0.0)
        if maybe():
            out["prompt_mask"] = words(g, batch, vocab, 0.2)
    if maybe():
        counts = torch.randint(0, 6, (batch,), generator=g)
        out["bias_offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        n = int(out["bias_offsets"][-1]) + 1
        out["bias_ids"] = torch.randint(-1, vocab + 1, (n,), generator=g)
        out["bias_values"] = torch.randn(n, generator=g)
        out["bias_values"][torch.rand(n, generator=g) < 0.2] = float("-inf")
    if maybe():
        some_masks = 5
        out["token_bitmask"] = words(g, some_masks, vocab, 0.6)
        out["token_bitmask"][0] = -1
        if torch.rand(1, generator=g).item() < 0.3:
            out["token_bitmask"][1] = 0
        out["bitmask_rows"] = torch.randint(-1, some_masks, (rows,), generator=g).int()
        if torch.rand(1, generator=g).item() < 0.2:
            out["bitmask_rows"][0] = some_masks
    if maybe():
        out["filter_order"] = "joint"
    if maybe():
        out["num_logprobs"] = int(torch.randint(0, 6, (1,), generator=g))
        out["logprobs_mode"] = "processed" if maybe() else "raw"
    return out
