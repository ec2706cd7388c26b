"""Regenerates the golden file of tensor-core layouts from CuTe, or compares it with CuTe.

    pip install --no-deps nvidia-cutlass==4.2.0.0
    python tools/cute_layouts.py            write the golden file
    python tools/cute_layouts.py --check    exit 1 if it differs, 77 if CuTe or CUDA headers are missing

CuTe is read from PyPI's nvidia-cutlass and evaluated on the host. Its headers need those of the CUDA
runtime and of CCCL: from CUDA_HOME, from the toolkit that nvcc belongs to, or from the PyPI packages
nvidia-cuda-runtime and nvidia-cuda-cccl.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tools" / "cute_layouts.cpp"
GOLDEN = ROOT / "cpp_tests" / "cuda_on_cpu" / "tests" / "golden" / "cute_layouts.json"
MISSING = 77


def cute_include():
    found = importlib.util.find_spec("cutlass_library")
    if found is None or not found.origin:
        return None
    folder = pathlib.Path(found.origin).parent / "source" / "include"
    return folder if (folder / "cute").is_dir() else None


def cuda_includes():
    """Folders that hold cuda_runtime_api.h and cuda/std, or None."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.append(pathlib.Path(nvcc).resolve().parent.parent)
    site = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [pathlib.Path(home) / "include" for home in homes if home]
    folders += sorted(site.glob("*/include"))
    folders += [folder / "cccl" for folder in folders]
    chosen = []
    for header in ("cuda_runtime_api.h", "cuda/std/utility"):
        holder = next((folder for folder in folders if (folder / header).exists()), None)
        if holder is None:
            return None
        chosen.append(holder)
    return chosen


def evaluate():
    """The layouts as CuTe has them; None with a reason where CuTe cannot be compiled."""
    cute, cuda = cute_include(), cuda_includes()
    if cute is None:
        return None, "nvidia-cutlass is not installed"
    if cuda is None:
        return None, "no headers of the CUDA runtime and CCCL"
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "cute_layouts"
        includes = [f"-I{path}" for path in [cute, *cuda]]
        subprocess.run(
            [compiler, "-std=c++17", "-w", *includes, str(SOURCE), "-o", str(program)], check=True
        )
        text = subprocess.run([program], check=True, text=True, capture_output=True).stdout
    return json.loads(text), ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    layouts, reason = evaluate()
    if layouts is None:
        print(f"cute_layouts: {reason}", file=sys.stderr)
        sys.exit(MISSING)
    if not check:
        GOLDEN.parent.mkdir(exist_ok=True)
        lines = [f'  "{name}": {json.dumps(rows)}' for name, rows in layouts.items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"wrote {GOLDEN.relative_to(ROOT)}")
        return
    golden = json.loads(GOLDEN.read_text())
    different = sorted(
        name for name in golden.keys() | layouts.keys() if golden.get(name) != layouts.get(name)
    )
    if different:
        sys.exit(f"cute_layouts: the golden file and CuTe differ in {', '.join(different)}")
    print(f"cute_layouts: {len(golden)} layouts agree with CuTe")


main()
