"""Fresh memory full of junk, so that an element that an op leaves unwritten is not by chance the right one."""

import contextlib
import ctypes

_M_PERTURB = -6  # of glibc's mallopt


@contextlib.contextmanager
def junk_memory(byte):
    """Inside, the C allocator fills all memory that it hands out with `byte`."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, ~byte & 0xFF) == 1
    try:
        yield
    finally:
        libc.mallopt(_M_PERTURB, 0)
