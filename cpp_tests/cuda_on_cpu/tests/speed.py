"""Prints what the emulator costs: CPU time per operation, by flavour. Not a test.

python cpp_tests/cuda_on_cpu/tests/speed.py [plain hooks]
"""

import sys
import time

import emulator
import numpy as np

# name, kernel, rounds, threads, operations per round of the whole block
CASES = [
    ("__syncthreads, 256 threads", 0, 2000, 256, 1),
    ("shuffle, 32 lanes", 1, 20000, 32, 1),
    ("mma m16n8k16, 8 warps", 2, 1000, 256, 8),
    ("float4 load and store", 3, 262144, 256, 1 / 4096),
]


def measure(emu, kernel, rounds, threads, per_round):
    x = np.ones(4 * 262144, np.float32)
    y = np.zeros_like(x)
    best = float("inf")
    for _ in range(3):
        before, begin = emu.lib.emu_switches(), time.process_time()
        emu.run("speed_run", kernel, rounds, threads, x, y)
        seconds, switches = time.process_time() - begin, emu.lib.emu_switches() - before
        best = min(best, seconds)
    operations = rounds * per_round if per_round >= 1 else rounds
    return best / operations * 1e9, best / max(switches, 1) * 1e9


def main():
    for flavour in sys.argv[1:] or ["plain", "hooks"]:
        emu = emulator.get(flavour)
        for name, *case in CASES:
            each, per_switch = measure(emu, *case)
            print(f"{flavour:<6} {name:<28} {each:9.1f} ns each, {per_switch:7.1f} ns per switch")


if __name__ == "__main__":
    main()
