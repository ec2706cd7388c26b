"""Builds the libraries with CMake and puts them into the wheel. Options are environment variables:

SPECDEC_CUDA=auto|0|1   CUDA kernels: if nvcc works and torch has CUDA (default), never, or fail without nvcc
SPECDEC_CUDA_ARCHS      CMake architecture list, default "80-real;90-real;100-real;120"
SPECDEC_PYBIND=0        without the pybind11 host module: the wheel then serves every Python (py3-none)
SPECDEC_TORCH_DIR       folder of the torch package to build against
MAX_JOBS, CMAKE_ARGS    passed on to CMake
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent.resolve()
WITH_PYBIND = os.environ.get("SPECDEC_PYBIND", "1") != "0"


def version():
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(specdec_ext VERSION ([0-9.]+)", text).group(1)


class CMakeBuild(build_ext):
    def run(self):
        target = pathlib.Path(self.build_lib).resolve()
        if self.inplace:  # editable install: the libraries go beside the sources
            target = ROOT
        for stale in (target / "specdec_ext").glob("*.so"):
            stale.unlink()  # else a CUDA library of an earlier build would leak into a CPU wheel
        build = ROOT / "build" / f"cmake-py{sys.version_info[0]}{sys.version_info[1]}"
        build.mkdir(parents=True, exist_ok=True)
        arguments = [
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={self.tool('ninja')}",
            f"-DSPECDEC_CUDA={os.environ.get('SPECDEC_CUDA', 'auto')}",
            f"-DSPECDEC_PYBIND={'ON' if WITH_PYBIND else 'OFF'}",
        ]
        if os.environ.get("SPECDEC_CUDA_ARCHS"):
            arguments.append(f"-DSPECDEC_CUDA_ARCHS={os.environ['SPECDEC_CUDA_ARCHS']}")
        if WITH_PYBIND:
            import pybind11

            # An isolated build has pybind11 in a new folder each time: forget the cached one.
            arguments += ["-Upybind11_DIR", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        cmake = self.tool("cmake")
        subprocess.run([cmake, "-S", ROOT, "-B", build, *arguments], check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run([cmake, "--build", build, "--parallel", jobs], check=True)
        subprocess.run(
            [cmake, "--install", build, "--prefix", target, "--component", "python"], check=True
        )

    def tool(self, name):
        found = shutil.which(name)
        if found is None:
            raise RuntimeError(f"building specdec_ext needs {name}: pip install {name}")
        return found

    def get_outputs(self):
        return []

    def get_source_files(self):
        return []


class AnyPythonWheel(bdist_wheel):
    """Stable ABI and no Python API in the op libraries: without _host one wheel serves all Pythons."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if WITH_PYBIND else ("py3", "none", platform)


setup(
    version=version(),
    ext_modules=[Extension("specdec_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
