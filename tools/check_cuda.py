"""Compiles every CUDA kernel for a list of architectures and checks what ptxas says.

Fails on any spill, on machine code that lacks what it is written for (check_sass.py), and on a CUDA library
that does not register every op. Prints registers per kernel. Without nvcc it says so and succeeds: the
kernels' logic is tested on the emulator.

    python tools/check_cuda.py --archs "80-real;90-real;100-real;120"
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import check_sass

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"


def build(archs):
    """Builds _C_cuda from scratch objects (ptxas output of cached objects would be lost)."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path, "CCACHE_DISABLE": "1"}
    env.pop("MAKEFLAGS", None)  # names a job server of make that ninja cannot reach from here
    configure = [
        "cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
        "-DSPECDEC_CUDA=1", "-DSPECDEC_PYBIND=OFF", f"-DSPECDEC_CUDA_ARCHS={archs}",
    ]  # fmt: skip
    subprocess.run(configure, check=True, env=env, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["cmake", "--build", BUILD, "--target", "clean"],
        check=True,
        env=env,
        stdout=subprocess.DEVNULL,
    )
    # ninja prints the compilers' output; ptxas reports there.
    done = subprocess.run(
        ["cmake", "--build", BUILD, "--target", "_C_cuda"],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        sys.exit(done.stdout)
    return done.stdout


def parse(log):
    """(kernel, architecture, registers, spill bytes, stack bytes) of every compiled function."""
    found = []
    name = arch = None
    spills = stack = 0
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            name, arch = m.groups()
            spills = stack = 0
        elif m := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spills = int(m.group(1)), int(m.group(2)) + int(m.group(3))
        elif (m := re.search(r"Used (\d+) registers", line)) and name:
            found.append((name, arch, int(m.group(1)), spills, stack))
            name = None
    return found


def short(name):
    """A kernel's name without the namespaces that all of them share."""
    return re.sub(r"specdec::|cuda::|\(anonymous namespace\)::", "", name)[:100]


def check_registrations():
    """The library loads beside a CPU torch and registers a CUDA kernel for every op."""
    import torch

    import specdec_ext

    torch.ops.load_library(str(BUILD / "_C_cuda.so"))
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = [n for n in specdec_ext.op_names() if not has(f"specdec::{n}", "CUDA")]
    if missing:
        sys.exit(f"check_cuda: no CUDA kernel registered for {', '.join(missing)}")
    print(f"CUDA registrations: {len(specdec_ext.op_names())} ops")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archs", default="80-real;90-real;100-real;120")
    archs = parser.parse_args().archs
    if not shutil.which("nvcc") and not os.environ.get("CUDACXX"):
        print("check_cuda: SKIPPED, no nvcc on this machine; kernels were not compiled for a GPU")
        return
    functions = parse(build(archs))
    if not functions:
        sys.exit("check_cuda: ptxas reported no kernel; is -Xptxas=-v still among the flags?")
    nice = check_sass.demangle(sorted({f[0] for f in functions}))
    wanted_archs = {"sm_" + a.split("-")[0] for a in archs.split(";")}
    seen_archs = {f[1].rstrip("af") for f in functions}
    if not wanted_archs <= seen_archs:
        sys.exit(f"check_cuda: nothing compiled for {', '.join(sorted(wanted_archs - seen_archs))}")
    print(f"{'registers':>9} {'spill B':>8} {'stack B':>8}  {'arch':<7} kernel")
    for name, arch, registers, spills, stack in sorted(functions, key=lambda f: (nice[f[0]], f[1])):
        print(f"{registers:>9} {spills:>8} {stack:>8}  {arch:<7} {short(nice[name])}")
    spilled = [f for f in functions if f[3] > 0]
    if spilled:
        sys.exit(f"check_cuda: {len(spilled)} functions spill registers")
    print(f"check_cuda: {len(functions)} functions, no spills")
    check_sass.check(BUILD / "_C_cuda.so", archs)
    check_registrations()


main()
