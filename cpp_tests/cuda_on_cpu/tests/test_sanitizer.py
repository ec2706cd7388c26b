"""Bugs that the sanitizer build reports by ending the process, so each runs in one of its own."""

import pathlib
import re
import subprocess
import sys

import emulator
import pytest

HERE = pathlib.Path(__file__).parent
CASES = {
    "register_array_index": "out of bounds",
    "shift_of_mask": "shift exponent 40 is too large",
    "float_to_int_overflow": "outside the range of representable values",
    "signed_overflow": "signed integer overflow",
    "tensor_end": "heap-buffer-overflow",
    "shared_end": "use-after-poison",
    "misaligned_vector": "misaligned address",
}
SCRIPT = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
sys.exit(lib.sanitizer_run(sys.argv[2].encode(), int(sys.argv[3])))
"""


def run(case, bug):
    library = emulator.EMU_DIR / "emu_tests_asan.so"
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, library, case, str(bug)],
        text=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize("case", CASES)
def test_reported_with_its_line(case):
    if "asan" not in emulator.flavours():
        pytest.skip("needs the sanitizer runtime preloaded")
    clean = run(case, 0)
    assert clean.returncode == 0, clean.stderr
    bug = run(case, 1)
    assert bug.returncode != 0
    assert CASES[case] in bug.stderr, bug.stderr
    text = HERE.joinpath("sanitizer.cu").read_text().splitlines()
    line = next(i for i, t in enumerate(text, 1) if re.search(rf"@{case}\b", t))
    assert f"sanitizer.cu:{line}" in bug.stderr, bug.stderr
