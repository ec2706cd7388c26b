"""examples/dlpack.py: arrays of other libraries, without a copy. The program asserts what it claims."""

import importlib.util

import numpy as np
import pytest
import tiny_llama  # noqa: F401  (puts examples/ on the path)
import torch

import dlpack
import specdec_ext


def test_numpy_arrays_are_read_and_written_in_place():
    assert dlpack.numpy_round().shape == (1, 4)


def test_jax_arrays_are_read():
    pytest.importorskip("jax")
    assert dlpack.jax_sample().shape == (4,)


def test_the_program_runs(capsys):
    assert dlpack.main() == 0
    out = capsys.readouterr().out
    assert out.startswith("NumPy: [[") and ("not installed" in out) == (
        importlib.util.find_spec("jax") is None
    )


def test_an_array_of_another_type_gets_the_operator_error():
    logits = torch.from_dlpack(np.zeros((1, 5)))
    with pytest.raises(RuntimeError, match="sample: logits: wanted dtype .* got float64"):
        specdec_ext.sample(logits, torch.tensor([1]), torch.tensor([0]), vocab_size=5)
