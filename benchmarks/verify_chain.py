"""verify_chain against transformers' _speculative_sampling: the same decision from the same logits."""

import torch
from compare import DECISION_BAND, assert_decisions
from oracles import verify_chain as oracle

import specdec_ext

VOCAB, DRAFTS = 151936, 7


def bench(harness):
    from transformers.generation.utils import _speculative_sampling

    on = harness.device
    g = torch.Generator().manual_seed(0)
    cu_rows = torch.tensor([0, DRAFTS + 1], dtype=torch.int32, device=on)
    position = torch.zeros(1, dtype=torch.int64, device=on)

    def ours(c):
        return specdec_ext.verify_chain(
            c["target"],
            c["ids"],
            cu_rows,
            c["seed"],
            position,
            DRAFTS,
            vocab_size=VOCAB,
            draft_logits=c["draft"],
        )

    def theirs(c):
        return _speculative_sampling(c["ids"][None], c["draft"], DRAFTS, c["target"][None])

    # Drafters of four qualities: noise on the target's logits. Without any, all rows of both are read.
    for noise in (0.0, 0.3, 1.0, 3.0):
        cases = []
        for i in range(24):
            target = torch.randn(DRAFTS + 1, VOCAB, generator=g) * 3
            draft = target[:DRAFTS] + noise * torch.randn(DRAFTS, VOCAB, generator=g)
            ids = torch.multinomial(torch.softmax(draft, -1), 1, generator=g)[:, 0]
            cases.append(
                {
                    "target": target.to(on),
                    "draft": draft[None].to(on),
                    "ids": torch.cat([torch.zeros(1, dtype=torch.int64), ids]).to(on),
                    "seed": torch.tensor([i], device=on),
                }
            )

        def check(cases=cases):
            got, allowed = [], []
            for c in cases:
                tokens, accepted, status, *_ = (t.cpu() for t in ours(c))
                got.append((int(accepted), int(tokens[0, int(accepted)]), int(status)))
                arguments = [c["target"], c["ids"], cu_rows, c["seed"], position]
                allowed += oracle.outcomes(
                    *(a.cpu() for a in arguments),
                    DRAFTS,
                    vocab_size=VOCAB,
                    draft_logits=c["draft"].cpu(),
                    band=DECISION_BAND,
                )
            assert_decisions(got, allowed)

        # At least: the rows up to the first rejection once, and both of its rows again.
        counts = [int(ours(c)[1]) for c in cases]
        rows = [2 * a + 4 if a < DRAFTS else 2 * DRAFTS + 1 for a in counts]
        accepted, rows = sum(counts) / len(cases), sum(rows) / len(cases)
        harness.case(
            "verify_chain",
            f"K={DRAFTS}, V={VOCAB} float32, accepts {accepted:.1f}",
            inputs=cases,
            ours=ours,
            peers={"transformers _speculative_sampling": theirs},
            bytes=rows * VOCAB * 4,
            check=check,
            target=10.0,
            warm=True,
        )
