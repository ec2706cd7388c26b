"""sample against softmax and multinomial of torch, at the vocabulary of Qwen3."""

import torch
from compare import DECISION_BAND, assert_decisions
from oracles import sample as oracle

import specdec_ext

VOCAB = 151936


def bench(harness):
    g = torch.Generator().manual_seed(0)
    on = harness.device
    for dtype, rows in [(torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 1)]:
        # More than 64 MB of rows, so that none waits in a cache.
        count = max(2, (1 << 26) // (rows * VOCAB * dtype.itemsize))
        logits = (torch.randn(count, rows, VOCAB, generator=g) * 3).to(dtype)
        inputs = list(logits.to(on))
        seeds = torch.arange(rows, device=on)
        for temperature in (1.0, 0.8):
            t = torch.full((rows,), temperature, device=on)

            def ours(x, t=t, seeds=seeds):
                return specdec_ext.sample(x, seeds, seeds, vocab_size=VOCAB, temperature=t)

            def multinomial(x, temperature=temperature):
                return torch.multinomial(torch.softmax(x.float() / temperature, -1), 1)

            def race(x, temperature=temperature):
                p = torch.softmax(x.float() / temperature, -1)
                return (p / torch.empty_like(p).exponential_()).argmax(-1)

            def check(ours=ours, t=t, seeds=seeds, logits=logits, inputs=inputs):
                tokens = ours(inputs[0])[0].cpu()
                allowed = oracle.allowed(
                    logits[0],
                    seeds.cpu(),
                    seeds.cpu(),
                    vocab_size=VOCAB,
                    temperature=t.cpu(),
                    band=DECISION_BAND,
                )
                assert_decisions(tokens.tolist(), allowed)

            harness.case(
                "sample",
                f"{rows} x {VOCAB} {str(dtype)[6:]}, T={temperature}",
                inputs=inputs,
                ours=ours,
                peers={"torch softmax + multinomial": multinomial, "torch exponential race": race},
                bytes=rows * VOCAB * dtype.itemsize,
                check=check,
                target=50.0 if (rows, dtype) == (1, torch.float32) else None,
            )
