#!/bin/sh
# Everything that needs a GPU, in one call, on a machine with torch (CUDA), nvcc and no internet:
# builds from source, runs all tests with the real CUDA kernels beside oracle, CPU and emulated
# results, compute-sanitizer where it is installed, and times the ops.
#
#   tools/gpu_check.sh RESULTS_FOLDER [build|tests|sanitizer|bench]...     default: all parts
#
# Uses the python3 on the PATH (or $PYTHON) and what is installed in it; nothing is downloaded.
# Needs of Python packages: torch, numpy, pytest; hypothesis (tests that use it are skipped without
# it); cmake and ninja or make as commands.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
results=${1:?usage: tools/gpu_check.sh RESULTS_FOLDER [part...]}
shift
parts=${*:-build tests sanitizer bench}
mkdir -p "$results"
results=$(cd "$results" && pwd)
log="$results/gpu_check.log"
failed=""
arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || {
    echo "gpu_check: $python has no torch with a CUDA device" >&2
    exit 1
}
# wgmma-class features are not used: sm_90 code also serves sm_90a devices.
archs="${SPECDEC_CUDA_ARCHS:-$arch-real}"

generator=Ninja
command -v ninja >/dev/null 2>&1 || generator="Unix Makefiles"
jobs=$(nproc)

step() { # name command...
    name=$1
    shift
    echo "== $name: $*" | tee -a "$log"
    start=$(date +%s)
    if "$@" >"$results/$name.txt" 2>&1; then state=passed; else state=FAILED; failed="$failed $name"; fi
    echo "== $name: $state in $(($(date +%s) - start)) s" | tee -a "$log"
    tail -n 3 "$results/$name.txt" | tee -a "$log"
}

build() {
    cmake -S . -B build/gpu -G "$generator" -DPython_EXECUTABLE="$(command -v "$python")" \
        -DSPECDEC_CUDA=1 -DSPECDEC_CUDA_ARCHS="$archs" -DSPECDEC_PYBIND=OFF -DSPECDEC_EMU=ON \
        -DSPECDEC_EMU_FLAVOURS=plain &&
        cmake --build build/gpu --parallel "$jobs" &&
        cmake --install build/gpu --prefix "$(pwd)" --component python &&
        "$python" -m specdec_ext
}

tests() {
    SPECDEC_EMU_DIR="$(pwd)/build/gpu" SPECDEC_BACKENDS=cpu,emu,cuda "$python" -m pytest python_tests -p no:cacheprovider
}

graphs() { "$python" -m pytest python_tests -p no:cacheprovider -m gpu; }

sanitizer() {
    for tool in memcheck racecheck initcheck; do
        SPECDEC_BACKENDS=cuda PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex kns=specdec \
            "$python" -m pytest python_tests -p no:cacheprovider -k "cuda and matches_oracle" -x || return 1
    done
}

{
    date -u +"gpu_check %Y-%m-%dT%H:%MZ"
    git log -1 --format=%h 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv
    nvcc --version | tail -n 2
    "$python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
} >"$log" 2>&1
cat "$log"

export PYTHONPATH=. PYTHONUNBUFFERED=1
for part in $parts; do
    case "$part" in
        build) step build build ;;
        tests) step tests tests && step graphs graphs ;;
        sanitizer)
            if command -v compute-sanitizer >/dev/null 2>&1; then
                step sanitizer sanitizer
            else
                echo "== sanitizer: SKIPPED, compute-sanitizer is not installed" | tee -a "$log"
            fi
            ;;
        bench) step bench "$python" benchmarks/run.py --device cuda --out "$results" ;;
        *) echo "gpu_check: unknown part $part" >&2; exit 2 ;;
    esac
done
nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu --format=csv >>"$log" 2>&1
if [ -n "$failed" ]; then
    echo "gpu_check: FAILED:$failed" | tee -a "$log"
    exit 1
fi
echo "gpu_check: all parts passed" | tee -a "$log"
