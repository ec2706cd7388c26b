#!/bin/sh
# Makes the virtual environment that the Makefile works in: tools/setup.sh PYTHON VENV
# A torch that PYTHON already has is used as it is; otherwise torch==2.13.0 is installed.
set -eu
python=$1
venv=$2

stop() {
    echo "specdec_ext set-up: $1" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || stop "$python not found; install Python 3.10 or newer (apt install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || stop "$python is $("$python" -V 2>&1); wanted 3.10 or newer"
command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || stop "no C++ compiler; install one (apt install g++)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || stop "$python has no venv module (apt install python3-venv)"
"$python" -c 'import sysconfig, pathlib, sys; sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())' \
    || stop "the headers of $python are missing (apt install python3-dev)"

mkdir -p build
if [ ! -x "$venv/bin/python" ]; then
    if "$python" -c 'import torch' 2>/dev/null; then
        echo "specdec_ext set-up: using the torch that $python has"
        "$python" -m venv --system-site-packages "$venv"
    else
        "$python" -m venv "$venv"
    fi
fi
# The build itself runs without isolation, so that repeated builds are quick.
"$venv/bin/pip" install --quiet --upgrade setuptools wheel pybind11 cmake ninja numpy
"$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/pip" install --quiet torch==2.13.0
