"""Results of sample and verify_chain on this process's instruction set: see instruction_sets.py and test_sample.py."""

import torch

import specdec_ext


def results():
    g = torch.Generator().manual_seed(0)
    out = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for vocab in (1, 7, 33, 4096, 9001):
            logits = (torch.randn(24, vocab, generator=g) * 4).to(dtype)
            logits[torch.rand(24, vocab, generator=g) < 0.02] = -float("inf")
            logits[3, vocab // 2] = float("nan")
            draft = (torch.randn(6, 3, vocab, generator=g) * 4).to(dtype)
            draft[1] = logits[4:7]  # equal logits
            seeds = torch.arange(24)
            temperature = torch.tensor([1.0, 0.6, 0.0, 2.5] * 6)
            name = f"{dtype} {vocab}"
            sampled = specdec_ext.sample(
                logits, seeds, seeds, vocab_size=vocab, temperature=temperature
            )
            ids = torch.randint(0, vocab, (24,), generator=g)
            verified = specdec_ext.verify_chain(
                logits,
                ids,
                torch.arange(0, 25, 4, dtype=torch.int32),
                seeds[:6],
                seeds[:6],
                3,
                vocab_size=vocab,
                draft_logits=draft,
                temperature=temperature[:6],
            )
            for i, t in enumerate(list(sampled[:4]) + list(verified[:3])):
                out[f"{name} result {i}"] = t
    return out
