"""Scratch of sample, verify_chain and verify_tree at a real size: at most a hundredth of the logits."""

import json
import pathlib
import subprocess
import sys

import backends
import pytest
import torch

VOCAB, DRAFTS = 151936, 7


def test_cpu_touches_little_fresh_memory():
    """In a process of its own, so that no memory is left over from other tests (fresh_memory.py)."""
    script = pathlib.Path(__file__).parent / "fresh_memory.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 28
    for *what, fresh, logits in lines:
        assert fresh <= logits / 100, f"{what}: {fresh} bytes beside {logits} of logits"
    assert any(fresh > 0 for *_, fresh, _ in lines), "nothing is seen at all"


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [n for n in backends.available() if n == "emu_hooks"])
def test_scratch_of_cuda(name, dtype, filters):
    """Its size comes from capacities alone, so nobody has to be active."""
    backend = backends.get(name)
    rows = DRAFTS + 1
    target, draft = (
        torch.zeros(rows, VOCAB, dtype=dtype),
        torch.zeros(1, DRAFTS, VOCAB, dtype=dtype),
    )
    one, ids = torch.ones(1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    nobody = torch.zeros(2, dtype=torch.int32)
    options = {"vocab_size": VOCAB, "num_logprobs": 20}
    if filters:
        options |= {"top_k": torch.tensor([50]).int(), "top_p": torch.tensor([0.9])}
        options |= {"frequency_penalty": torch.ones(1), "token_counts": torch.zeros(1, VOCAB).int()}

    def scratch(call):
        return backend.stats(call)["tensors"]["scratch"]["bytes"]

    for method in ("token", "block", "sampled", "typical"):
        used = scratch(
            lambda method=method: backend.ops.verify_chain(
                target, ids, nobody, one, one, DRAFTS, draft_logits=draft, method=method, **options
            )
        )
        assert 0 < used <= (target.nbytes + draft.nbytes) / 100, method
    parents = torch.arange(-1, DRAFTS, dtype=torch.int32)
    for children in ("deterministic", "sampled", "sampled_with_replacement"):
        more = {} if children == "deterministic" else {"draft_logits": target}
        for method in ("token", "traversal"):
            used = scratch(
                lambda more=more, children=children, method=method: backend.ops.verify_tree(
                    target, ids, parents, nobody, one, one, DRAFTS, children=children, method=method,
                    **more, **options,
                )
            )  # fmt: skip
            assert 0 < used <= target.nbytes * (1 + bool(more)) / 100, (children, method)
    used = scratch(lambda: backend.ops.sample(target[:1], one, one, **options))
    assert 0 < used <= target[:1].nbytes / 100
