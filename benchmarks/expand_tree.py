"""expand_tree against torch's log_softmax, topk and a topk over the candidates, as drafters compose one depth of an
EAGLE tree: on the logits' own type where torch ranks the same candidates, else on float32."""

import torch
from compare import assert_close, assert_same
from oracles import expand_tree as oracle

import specdec_ext

TOPK = 10


def from_torch(logits, parent_scores, topk):
    """The same results, one operation after the other; without ties, dead rows and maps."""
    logprob = torch.log_softmax(logits.float(), -1)
    value, token = logprob.topk(topk, -1)
    candidate_scores = (parent_scores[..., None] + value).flatten(1)
    candidate_tokens = token.flatten(1)
    scores, index = candidate_scores.topk(topk, -1)
    slot = torch.div(index, topk, rounding_mode="floor").int()
    tokens = candidate_tokens.gather(1, index)
    return tokens, slot, scores, candidate_tokens, candidate_scores, index.int()


def bench(harness):
    on = harness.device
    for batch, nodes, vocab, dtype in [
        (1, 1, 32000, torch.bfloat16),
        (1, TOPK, 32000, torch.bfloat16),
        (1, TOPK, 32000, torch.float32),
        (8, TOPK, 32000, torch.bfloat16),
        (1, TOPK, 151936, torch.bfloat16),
    ]:
        g = torch.Generator().manual_seed(nodes)
        size = batch * nodes * vocab * dtype.itemsize
        inputs = []
        for _ in range(max(2, (1 << 27) // size) if on.type == "cpu" else 8):
            # Whole rows apart in value, so that no two logits tie and every order is the one order.
            rows = torch.stack([torch.randperm(vocab, generator=g) for _ in range(batch * nodes)])
            logits = (rows.view(batch, nodes, vocab) * (16.0 / vocab) - 8.0).to(dtype)
            scores = -3.0 * torch.rand(batch, nodes, generator=g)
            inputs.append((logits.to(on), scores.to(on)))
            if len(inputs) == 64:
                break

        def ours(case, vocab=vocab):
            return specdec_ext.expand_tree(*case, TOPK, vocab_size=vocab)

        def torch_ops(case):
            return from_torch(*case, TOPK)

        def check(ours=ours, case=inputs[0], vocab=vocab):
            logits, scores = (t.cpu() for t in case)
            tokens, values = oracle.candidates(logits, scores, TOPK, vocab_size=vocab)
            out = [t.cpu() for t in ours(case)]
            assert_same(out[3], tokens)
            assert_close(out[4], values, magnitude=32.0)
            assert_close(from_torch(*case, TOPK)[4].cpu(), values, magnitude=32.0)

        harness.case(
            "expand_tree",
            f"{batch} x {nodes} nodes, top {TOPK} of {vocab} {str(dtype)[6:]}",
            inputs=inputs,
            ours=ours,
            peers={"torch log_softmax + topk + topk": torch_ops},
            bytes=size + 12 * batch * nodes * TOPK + 20 * batch * TOPK,
            check=check,
            target=20.0,
            warm=True,
        )
