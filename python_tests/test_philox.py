"""Philox4x32-10 against the vectors published with Random123, in Python and in C++."""

import numpy as np
import pytest

import specdec_ext
from specdec_ext._philox import uniform

# counter, key -> block (Random123's kat_vectors, philox4x32 with 10 rounds)
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, block", VECTORS)
def test_known_answers(counter, key, block):
    assert specdec_ext.philox4x32(counter, key).tolist() == block


def test_host_module_computes_what_python_does():
    host = pytest.importorskip("specdec_ext._host")
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, size=(1000, 4), dtype=np.uint32)
    keys = rng.integers(0, 2**32, size=(1000, 2), dtype=np.uint32)
    assert (host.philox4x32(counters, keys) == specdec_ext.philox4x32(counters, keys)).all()
    for counter, key, block in VECTORS:
        assert host.philox4x32([counter], [key]).tolist() == [block]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345])
@pytest.mark.parametrize("position", [0, 7, 2**32 + 3, 2**40])
def test_counter_layout(seed, position):
    """Word 3 carries purpose and the high half of the position; u is 24 bits of word 0."""
    host = pytest.importorskip("specdec_ext._host")
    for index in (0, 1, 15):
        for purpose in range(5):
            counter = [position % 2**32, index, 0, purpose + 8 * (position >> 32)]
            unsigned = seed % 2**64
            word = specdec_ext.philox4x32(counter, [unsigned % 2**32, unsigned >> 32])[0]
            expected = int(word >> 8) / 2**24
            assert uniform(seed, position, index, purpose) == expected
            assert host.uniform(seed, position, index, purpose) == expected
