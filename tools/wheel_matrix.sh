#!/bin/sh
# One wheel, several torch versions: builds a py3-none wheel against torch 2.13.0, runs the test
# suite under 2.13.0, and imports and registers it under other versions. Downloads torch; run by
# `make wheel-matrix`, not by CI.
#
#   tools/wheel_matrix.sh [version...]     default: 2.11.0 2.14.1
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
python=${PYTHON:-python3}
work=build/wheel-matrix
versions=${*:-"2.11.0 2.14.1"}
rm -rf "$work"
mkdir -p "$work"

new_env() { # name torch-version
    "$python" -m venv "$work/$1"
    "$work/$1/bin/pip" install --quiet "torch==$2" numpy
}

echo "== building the wheel with torch 2.13.0"
new_env base 2.13.0
"$work/base/bin/pip" install --quiet setuptools wheel pybind11 cmake ninja pytest hypothesis
PATH="$root/$work/base/bin:$PATH" SPECDEC_PYBIND=0 SPECDEC_CUDA="${SPECDEC_CUDA:-0}" \
    "$work/base/bin/pip" wheel --quiet --no-build-isolation --no-deps -w "$work/dist" .
wheel=$(ls "$work"/dist/*.whl)
case "$wheel" in *-py3-none-*) ;; *) echo "not a py3-none wheel: $wheel"; exit 1 ;; esac
echo "== $wheel"
unzip -l "$wheel" | sed -n '4,$p'

echo "== torch 2.13.0: the whole test suite on the installed wheel"
"$work/base/bin/pip" install --quiet --no-deps "$wheel"
mkdir "$work/outside" # so that the source tree does not shadow the installed package
(cd "$work/outside" && SPECDEC_BACKENDS=cpu "$root/$work/base/bin/python" -m pytest \
    -c "$root/pyproject.toml" --rootdir "$root" "$root/python_tests" \
    --deselect python_tests/test_philox.py -p no:cacheprovider)

for version in $versions; do
    echo "== torch $version: import, register, run"
    new_env "torch-$version" "$version"
    "$work/torch-$version/bin/pip" install --quiet --no-deps "$wheel"
    (cd "$work/outside" && "$root/$work/torch-$version/bin/python" "$root/tools/smoke.py")
done
echo "== wheel matrix: all passed"
