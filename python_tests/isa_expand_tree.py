"""Results of expand_tree on one instruction set, saved to the file named on the command line
(test_expand_tree.py compares them). Not a test by itself: SPECDEC_CPU_ISA is read once per process."""

import sys

import torch
from oracles import expand_tree as oracle

import specdec_ext


def results():
    out = {"isa": specdec_ext.cpu_isa()}
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for vocab in (1, 17, 300, 2048, 9001):
            case = oracle.random_case(g, 2, 3, min(vocab, 9), vocab, dtype)
            case["logits"][1, 1, vocab // 2 :] = 2.0
            for name, tensor in zip(oracle.NAMES, specdec_ext.expand_tree(**case), strict=True):
                out[f"{dtype} {vocab} {name}"] = tensor
    return out


if __name__ == "__main__":
    torch.save(results(), sys.argv[1])
