"""Results of markov_draft on this process's instruction set: see instruction_sets.py and test_markov_draft.py."""

import torch
from oracles import markov_draft as oracle

import specdec_ext


def results():
    out = {}
    for seed, head in enumerate(["vanilla", "gated", "rnn"] * 2):
        for weights in (torch.float32, torch.float16, torch.bfloat16):
            g = torch.Generator().manual_seed(seed)
            case = oracle.random_case(
                g, (1, 11)[seed // 3], 3, vocab=1100, rank=(37, 256)[seed // 3], depth=45,
                head=head, weights=weights, dtype=weights, columns=(None, 900)[seed % 2],
            )  # fmt: skip
            greedy = case | {"temperature": torch.zeros(len(case["seeds"])), "return_logits": False}
            table = specdec_ext.prepare_markov(case["w2"])
            pruned = specdec_ext.markov_draft(**greedy, prepared=table, return_logprobs=False)
            dense = specdec_ext.markov_draft(**greedy)
            assert torch.equal(pruned[0], dense[0]) and torch.equal(pruned[3], dense[3])
            results = specdec_ext.markov_draft(**case)
            for name, tensor in zip(oracle.NAMES, results, strict=True):
                out[f"{seed} {head} {weights} {name}"] = tensor
    return out
