"""markov_draft against a loop of torch over the drafts: gather, linear, add, softmax, multinomial (or argmax), at
the vocabulary and rank of Qwen3's DSpark heads. W2 is 78 MB of bf16, so no cache holds it. Greedy cases run a second
time with a prepared head, beside the call without one: which of the two is the faster depends on the machine."""

import torch
from compare import DECISION_BAND, assert_decisions
from oracles import markov_draft as oracle

import specdec_ext

VOCAB, RANK = 151936, 256


def bench(harness):
    on = harness.device
    for batch, drafts, dtype in (
        (1, 1, torch.bfloat16),
        (1, 7, torch.bfloat16),
        (8, 1, torch.bfloat16),
        (1, 1, torch.float32),
    ):
        for temperature, prunes in ((1.0, False), (0.0, False), (0.0, True)):
            g = torch.Generator().manual_seed(batch)
            case = oracle.random_case(
                g, batch, drafts, vocab=VOCAB, rank=RANK, confidence=False, weights=dtype,
                dtype=dtype, temperature=torch.full((batch,), temperature), return_logits=False,
            )  # fmt: skip
            case["base_logits"] = case["base_logits"][:, :, :VOCAB].contiguous()
            there = {k: v.to(on) if torch.is_tensor(v) else v for k, v in case.items()}
            table = specdec_ext.prepare_markov(there["w2"]) if prunes else None

            def ours(call, table=table):
                return specdec_ext.markov_draft(
                    **call, prepared=table, return_logprobs=table is None
                )

            def dense(call):
                return specdec_ext.markov_draft(**call, return_logprobs=False)

            def loop(call, temperature=temperature):
                before, out = call["anchor_ids"], []
                for k in range(call["base_logits"].shape[1]):
                    bias = torch.nn.functional.linear(call["w1"][before], call["w2"])
                    z = (call["base_logits"][:, k] + bias).float()
                    if temperature > 0:
                        law = torch.softmax(z / temperature, -1)
                        before = torch.multinomial(law, 1)[:, 0]
                    else:
                        before = z.argmax(-1)
                    out.append(before)
                return torch.stack(out, 1)

            def check(case=case, there=there, ours=ours):
                tokens = ours(there)[0].cpu()
                got, allowed = [], []
                for b in range(tokens.shape[0]):
                    request, before = oracle.Request(case, b), int(case["anchor_ids"][b])
                    step = request.step(0, before)
                    got.append(int(tokens[b, 0]))
                    allowed.append(request.choices(step, DECISION_BAND))
                assert_decisions(got, allowed)

            weights = VOCAB * (RANK + 12 if prunes else RANK * dtype.itemsize)
            harness.case(
                "markov_draft",
                f"{batch} x {drafts} drafts, {str(dtype)[6:]}, T={temperature}"
                + (", prepared" if prunes else ""),
                inputs=[there],
                ours=ours,
                peers={"torch linear, add, softmax, multinomial"
                       if temperature > 0 else "torch linear, add, argmax": loop}
                | ({"no table": dense} if prunes else {}),
                bytes=drafts * (weights + batch * VOCAB * dtype.itemsize),
                flops=0 if prunes else drafts * batch * 2 * VOCAB * RANK,
                check=check,
                target=8.0 if (batch, drafts, dtype) == (1, 1, torch.bfloat16)
                and (prunes or temperature > 0) else None,
            )  # fmt: skip
