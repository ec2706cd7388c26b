"""sample against softmax and multinomial of torch, and with filters against the warpers of transformers, at
the vocabulary of Qwen3."""

import torch
from compare import DECISION_BAND, assert_decisions
from oracles import sample as oracle

import specdec_ext

VOCAB = 151936


def bench(harness):
    g = torch.Generator().manual_seed(0)
    on = harness.device
    for dtype, rows in [(torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 1)]:
        # Many rows, so that none waits in a cache.
        count = max(2, (1 << 28) // (rows * VOCAB * dtype.itemsize))
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
                target=100.0 if (rows, dtype) == (1, torch.float32) else None,
                warm=True,
            )
    bench_filters(harness)


def bench_filters(harness, top_k=50, top_p=0.95, temperature=0.8):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    on = harness.device
    warpers = [
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
    ]
    logits = torch.randn(110, 1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    inputs, seeds = list(logits.to(on)), torch.zeros(1, dtype=torch.int64, device=on)
    controls = {
        "temperature": torch.tensor([temperature], device=on),
        "top_k": torch.tensor([top_k], dtype=torch.int32, device=on),
        "top_p": torch.tensor([top_p], device=on),
    }

    def ours(x):
        return specdec_ext.sample(x, seeds, seeds, vocab_size=VOCAB, **controls)

    def theirs(x):
        for warper in warpers:
            x = warper(None, x)
        return torch.multinomial(torch.softmax(x, -1), 1)

    def check():
        got = ours(inputs[0])[0].tolist()
        allowed = oracle.allowed(
            logits[0],
            seeds.cpu(),
            seeds.cpu(),
            vocab_size=VOCAB,
            band=DECISION_BAND,
            **{key: value.cpu() for key, value in controls.items()},
        )
        assert_decisions(got, allowed)

    harness.case(
        "sample",
        f"1 x {VOCAB} float32, T={temperature}, top-k {top_k}, top-p {top_p}",
        inputs=inputs,
        ours=ours,
        peers={"transformers warpers + multinomial": theirs},
        bytes=VOCAB * 4,
        check=check,
        target=80.0,
        warm=True,
    )
