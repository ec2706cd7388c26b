"""The backends that one parametrised test runs on, all with the same signatures:

cpu        torch.ops.specdec on CPU tensors
emu        torch.ops.specdec_emu: the CUDA kernels on the CPU emulator, plain build
emu_hooks  the same kernels under the race, bounds and initialisation detectors
emu_asan   the same kernels under the address and undefined-behaviour sanitizers (needs libasan
           preloaded: `make test-asan`)
cuda       torch.ops.specdec on a GPU

SPECDEC_BACKENDS=cpu,emu,... restricts them; a backend that is named but missing is an error.
"""

import ctypes
import json
import os
import pathlib

import torch

import specdec_ext  # noqa: F401  (registers torch.ops.specdec)

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMU_DIR = pathlib.Path(os.environ.get("SPECDEC_EMU_DIR", ROOT / "build" / "emu"))
NAMES = ["cpu", "emu", "emu_hooks", "emu_asan", "cuda"]
_FLAVOUR = {"emu": "plain", "emu_hooks": "hooks", "emu_asan": "asan"}


class Backend:
    def __init__(self, name):
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")
        self.lib = None
        if name in _FLAVOUR:
            path = EMU_DIR / f"_C_emu_{_FLAVOUR[name]}.so"
            torch.ops.load_library(str(path))
            self.lib = ctypes.CDLL(str(path))
            self.lib.emu_stats_json.restype = ctypes.c_char_p
            self.lib.emu_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
            self.ops = getattr(torch.ops, f"specdec_emu_{_FLAVOUR[name]}")
        else:
            self.ops = torch.ops.specdec

    @property
    def emulated(self):
        return self.lib is not None

    def call(self, op, positional, case):
        """Results of an op on the CPU. case: its arguments by name, those named in `positional` passed
        by place. Tensors keep their strides."""
        on = {k: v.to(self.device) if torch.is_tensor(v) else v for k, v in case.items()}
        return [t.cpu() for t in getattr(self.ops, op)(*[on.pop(k) for k in positional], **on)]

    def set(self, key, value):
        """An emulator setting, such as order or seed of the thread schedule."""
        self.lib.emu_set(key.encode(), value)

    def stats(self, call):
        """Runs call() and returns the emulator's counters of it (launches, bytes, sectors...)."""
        self.lib.emu_stats_reset()
        call()
        return json.loads(self.lib.emu_stats_json())

    def __repr__(self):
        return self.name


def _present(name):
    if name == "cpu":
        return True
    if name == "cuda":
        return specdec_ext.cuda_reason == ""
    if name == "emu_asan" and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        return False
    return (EMU_DIR / f"_C_emu_{_FLAVOUR[name]}.so").exists()


def available():
    """Names of the backends to test, in a fixed order."""
    wanted = os.environ.get("SPECDEC_BACKENDS")
    if wanted:
        names = [name.strip() for name in wanted.split(",")]
        for name in names:
            if name not in NAMES:
                raise ValueError(f"SPECDEC_BACKENDS: {name} is none of {', '.join(NAMES)}")
            if not _present(name):
                raise RuntimeError(f"SPECDEC_BACKENDS names {name}, which is not built or not here")
        return names
    return [name for name in NAMES if _present(name)]


_cache = {}


def get(name):
    if name not in _cache:
        _cache[name] = Backend(name)
    return _cache[name]
