"""Arrays of other libraries go into the operators as they are, without a copy, through DLPack.

    python examples/dlpack.py            NumPy, and JAX where it is installed

`torch.from_dlpack` makes a tensor of the same memory: an operator that writes into its argument (a cache)
writes into the array. torch has no read-only tensors: an array that must not change (all of JAX's are such) may only
stand where an operator reads. Results go back through the other library's `from_dlpack`.
"""

import importlib.util
import sys

import numpy as np
import torch

import specdec_ext


def numpy_round() -> np.ndarray:
    """A verified chain and the cache of its pass, all of it in NumPy. Returns the tokens [B, K+1]."""
    rng = np.random.default_rng(0)
    vocab_size, num_drafts = 100, 3
    logits = rng.standard_normal((num_drafts + 1, vocab_size), dtype=np.float32)
    best = logits.argmax(-1)
    input_ids = np.array(
        [7, best[0], best[1], (best[2] + 1) % vocab_size]
    )  # the last draft is wrong
    cu_rows = np.array([0, num_drafts + 1], dtype=np.int32)

    cache = np.zeros((2, 4, 8, 2, 64), dtype=np.float32)  # K and V: 4 pages of 8 places, 2 heads
    rows = rng.standard_normal((num_drafts + 1, 2, 64), dtype=np.float32)
    slots = np.array([8, 9, 10, 11])
    specdec_ext.append_kv(*map(torch.from_dlpack, (rows, rows, cache[0], cache[1], slots)))
    assert (cache[:, 1, :4] == rows).all()  # page 1: the operator wrote into NumPy's memory

    tokens, num_accepted, *_ = specdec_ext.verify_chain(
        *map(torch.from_dlpack, (logits, input_ids, cu_rows, np.array([1]), np.array([30]))),
        num_drafts,
        vocab_size=vocab_size,
        temperature=torch.from_dlpack(np.zeros(1, dtype=np.float32)),
    )
    result = np.from_dlpack(tokens)
    assert result.ctypes.data == tokens.data_ptr()  # the way back is no copy either
    assert num_accepted.tolist() == [2]
    assert result.tolist() == [[*best[:3].tolist(), -1]]
    return result


def jax_sample() -> np.ndarray:
    """Logits of a JAX model sampled by `sample`; the tokens go back to JAX."""
    import jax
    import jax.numpy as jnp

    logits = jax.random.normal(jax.random.key(0), (4, 100))
    tokens, *_ = specdec_ext.sample(
        torch.from_dlpack(logits),
        torch.arange(4),
        torch.full((4,), 30),
        vocab_size=100,
        temperature=torch.zeros(4),
    )
    back = jnp.from_dlpack(tokens.int())
    assert (back == logits.argmax(-1)).all()
    return np.asarray(back)


def main() -> int:
    print("NumPy:", numpy_round().tolist())
    if importlib.util.find_spec("jax"):
        print("JAX:  ", jax_sample().tolist())
    else:
        print("JAX:   not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
