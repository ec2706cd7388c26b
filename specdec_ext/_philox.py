"""Philox4x32-10 and the library's counter layout, for reference and tests (not on any hot path)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

DRAFT, ACCEPT, RESIDUAL, BONUS, SAMPLE = range(5)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox4x32-10 block(s): four 32-bit words per counter.

    Args:
        counter: four integers, or an array ``[..., 4]``, taken modulo 2**32.
        key: two integers, or an array ``[..., 2]``.

    Returns:
        uint32 array ``[..., 4]``.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    mask = np.uint64(0xFFFFFFFF)
    c = [
        np.asarray(word).astype(np.uint64) & mask
        for word in np.moveaxis(np.asarray(counter), -1, 0)
    ]
    k = [np.asarray(word).astype(np.uint64) & mask for word in np.moveaxis(np.asarray(key), -1, 0)]
    shift = np.uint64(32)
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c[0]
        product1 = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (product1 >> shift) ^ c[1] ^ k[0],
            product1 & mask,
            (product0 >> shift) ^ c[3] ^ k[1],
            product0 & mask,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(np.broadcast_arrays(*c), axis=-1).astype(np.uint32)


def uniform(seed, position, index, purpose):
    """The uniform in [0, 1), a multiple of 2**-24, that kernels draw for these coordinates."""
    seed, position = int(seed) & (2**64 - 1), int(position) & (2**64 - 1)
    counter = [
        position & 0xFFFFFFFF,
        int(index) & 0xFFFFFFFF,
        0,
        (int(purpose) + 8 * (position >> 32)) & 0xFFFFFFFF,
    ]
    word = philox4x32(counter, [seed & 0xFFFFFFFF, seed >> 32])[0]
    return float(int(word) >> 8) * 2.0**-24
