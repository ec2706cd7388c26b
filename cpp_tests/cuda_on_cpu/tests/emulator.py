"""The libraries of test kernels, one per flavour of the emulator, through ctypes and NumPy."""

import contextlib
import ctypes
import json
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
EMU_DIR = pathlib.Path(os.environ.get("SPECDEC_EMU_DIR", ROOT / "build" / "emu"))
ORDERS = {"forward": 0, "reverse": 1, "random": 2, "skewed": 3}
_PRELOADED = "libasan" in os.environ.get("LD_PRELOAD", "")


def _library(flavour):
    return EMU_DIR / f"emu_tests_{flavour}.so"


def flavours():
    """Those that can be loaded here: the sanitizer build only with its runtime preloaded, and then it
    alone, because its checks are what that run is for."""
    return ["asan"] if _PRELOADED else [f for f in ("plain", "hooks") if _library(f).exists()]


class Emulator:
    def __init__(self, flavour):
        self.flavour = flavour
        self.lib = ctypes.CDLL(str(_library(flavour)))
        self.lib.emu_last_error.restype = ctypes.c_char_p
        self.lib.emu_stats_json.restype = ctypes.c_char_p
        self.lib.emu_switches.restype = ctypes.c_ulonglong
        self.lib.emu_register.argtypes = [
            ctypes.c_void_p,
            ctypes.c_longlong,
            ctypes.c_char_p,
            ctypes.c_int,
        ]

    def set(self, key, value):
        done = self.lib.emu_set(key.encode(), ctypes.c_longlong(int(value)))
        assert done == 0, f"emu_set refuses {key}={value}"

    @contextlib.contextmanager
    def settings(self, **values):
        """Settings for a while; the defaults come back afterwards."""
        defaults = {
            "order": 0, "seed": 1, "resident": 4, "allow_exited": 0, "cp_early": 0,
            "max_coop_blocks": 264,
        }  # fmt: skip
        for key, value in values.items():
            self.set(key, ORDERS.get(value, value))
        try:
            yield
        finally:
            for key in values:
                self.set(key, defaults[key])

    def call(self, entry, *args, read_only=()):
        """Runs an entry point with every array registered. Returns the error, "" if there was none."""
        converted = []
        for i, arg in enumerate(args):
            if hasattr(arg, "ctypes"):
                self.lib.emu_register(
                    arg.ctypes.data, arg.nbytes, f"arg{i}".encode(), int(i in read_only)
                )
                converted.append(ctypes.c_void_p(arg.ctypes.data))
            else:
                converted.append(ctypes.c_int(arg))
        try:
            code = getattr(self.lib, entry)(*converted)
        finally:
            self.lib.emu_unregister_all()
        error = self.lib.emu_last_error().decode()
        assert (code != 0) == (error != ""), (code, error)
        return error

    def run(self, entry, *args, read_only=()):
        error = self.call(entry, *args, read_only=read_only)
        assert error == "", error

    def stats(self):
        return json.loads(self.lib.emu_stats_json())


_loaded = {}


def get(flavour):
    if flavour not in _loaded:
        _loaded[flavour] = Emulator(flavour)
    return _loaded[flavour]
