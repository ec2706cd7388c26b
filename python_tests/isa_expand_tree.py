"""Results of expand_tree on this process's instruction set: see instruction_sets.py and test_expand_tree.py."""

import torch
from oracles import expand_tree as oracle

import specdec_ext


def results():
    out = {}
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for vocab in (1, 17, 300, 2048, 9001):
            case = oracle.random_case(g, 2, 3, min(vocab, 9), vocab, dtype)
            case["logits"][1, 1, vocab // 2 :] = 2.0
            # Likely columns of likely nodes: scores near 0 show the last bits of a row's sum.
            case["logits"][0, :, 0] = case["logits"][0].float().logsumexp(1) + 2.0
            case["parent_scores"][0] = 0.0
            for name, tensor in zip(oracle.NAMES, specdec_ext.expand_tree(**case), strict=True):
                out[f"{dtype} {vocab} {name}"] = tensor
    return out
