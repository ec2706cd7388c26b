"""Prints, per op, method, dtype and with or without filters, how many bytes of memory one call on the CPU touches
for the first time, and how many its logits have, as lines of JSON.

All free memory of the process goes back to the system before the call, so whatever the op allocates, results
too, comes in fresh pages, each of which is one page fault. Memory that is allocated twice counts twice: an
upper bound. A call on half the vocabulary comes first, for code, threads and their stacks.
"""

import ctypes
import itertools
import json
import resource

import torch

import specdec_ext  # noqa: F401  (registers torch.ops.specdec)

VOCAB, DRAFTS = 151936, 7
METHODS = {
    "sample": [""],
    "verify_chain": ["token", "block", "sampled", "typical"],
    "verify_tree": ["token", "traversal"],
}
CONTROLS = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "frequency_penalty": 0.1}


def prepared(op, method, dtype, filters, vocab):
    """(a call without arguments, bytes of its logits)."""
    rows = DRAFTS + 1
    g = torch.Generator().manual_seed(1)
    target = (torch.randn(rows, vocab, generator=g) * 2).to(dtype)
    draft = (target[:DRAFTS].float() + 0.3).to(dtype)
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), target[:DRAFTS].float().argmax(-1)])
    one, num_bytes = torch.ones(1, dtype=torch.int64), target.numel() * target.element_size()
    batch = rows if op == "sample" else 1
    options = {"vocab_size": vocab, "num_logprobs": 20}
    if filters:
        options |= {
            name: torch.full((batch,), value, dtype=torch.int32 if name == "top_k" else None)
            for name, value in CONTROLS.items()
        }
        options["token_counts"] = torch.zeros(batch, vocab, dtype=torch.int32)
    ops = torch.ops.specdec
    if op == "sample":
        return lambda: ops.sample(target, one.expand(rows), one.expand(rows), **options), num_bytes
    cu_rows = torch.tensor([0, rows], dtype=torch.int32)
    options |= {"method": method, "draft_controls": bool(filters)}
    if op == "verify_chain":
        target[-2, ids[-1]] = -torch.inf  # the last draft is rejected, whatever the number
        arguments = (target, ids, cu_rows, one, one, DRAFTS)
        options["draft_logits"] = draft[None]
        return lambda: ops.verify_chain(*arguments, **options), num_bytes * 15 // 8
    parents = torch.tensor([-1, 0, 0, 1, 1, 3, 3, 5], dtype=torch.int32)
    target[3, ids[5:7]] = -torch.inf
    arguments = (target, ids, parents, cu_rows, one, one, 4)
    options |= {"draft_logits": torch.cat([draft, draft[:1]]), "children": "sampled"}
    return lambda: ops.verify_tree(*arguments, **options), num_bytes * 2


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main():
    release = ctypes.CDLL(None).malloc_trim
    for op, methods in METHODS.items():
        for method, dtype, filters in itertools.product(
            methods, (torch.float32, torch.bfloat16), (False, True)
        ):
            prepared(op, method, dtype, filters, VOCAB // 2)[0]()
            call, num_bytes = prepared(op, method, dtype, filters, VOCAB)
            faults()
            release(0)
            before = faults()
            call()
            fresh = (faults() - before) * resource.getpagesize()
            print(json.dumps([op, method, str(dtype), filters, fresh, num_bytes]))


main()
