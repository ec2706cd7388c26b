#!/bin/sh
# Every way to install the package, each into a fresh environment, each followed by the self-test outside of the
# source tree. Builds the libraries once per path (minutes each); run by `make install-paths`, not by CI.
#
#   tools/install_paths.sh [path...]      default: all of those below
#
#   wheel          a wheel that was built before, no compiler
#   sdist          the source distribution, built in isolation
#   git            git+file:// of this repository (what is committed), built in isolation
#   isolated       pip install . with a torch in the environment: its headers are used
#   no-torch       pip install . in an environment without torch: the build gets torch 2.13.0 of its own
#   no-isolation   pip install --no-build-isolation .
#   editable       pip install --no-build-isolation --editable . of a copy
#   no-nvcc        as isolated, with every nvcc off the PATH and SPECDEC_CUDA=auto: a CPU build that says why
#   nvcc           as isolated, with the nvcc of the PATH (or CUDA_HOME) and SPECDEC_CUDA=1; left out without one
#
# TORCH=torch==2.13.0 is what is installed where a path needs a torch.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
work=$root/build/install-paths
paths=${*:-"wheel sdist git isolated no-torch no-isolation editable no-nvcc nvcc"}
mkdir -p "$work/outside"
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac

say() { echo "== $*"; }

new_env() { # name: a fresh environment without torch
    rm -rf "${work:?}/$1"
    "$python" -m venv "$work/$1"
    pip="$work/$1/bin/pip --disable-pip-version-check --quiet"
}

build_tools() { # for paths without build isolation
    $pip install setuptools wheel pybind11 cmake ninja
}

# A copy of the sources as they are here, without what is built or ignored: no path may lean on build/.
fresh_sources() { # folder
    rm -rf "$1"
    mkdir -p "$1"
    git ls-files -z --cached --others --exclude-standard | xargs -0 tar -cf - | tar -xf - -C "$1"
}

# PATH without any folder that holds an nvcc.
path_without_nvcc() {
    rest=
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        [ -x "$folder/nvcc" ] || rest=${rest:+$rest:}$folder
    done
    IFS=$old_ifs
    echo "$rest"
}

check() { # name [text that `python -m specdec_ext` must print]
    (
        cd "$work/outside"
        unset PYTHONPATH
        "$work/$1/bin/python" -m specdec_ext >"$work/$1.info"
        "$work/$1/bin/python" -m specdec_ext selftest >"$work/$1.selftest" || {
            cat "$work/$1.selftest"
            exit 1
        }
        "$work/$1/bin/python" -c 'import specdec_ext, sys; sys.exit(not specdec_ext.__file__.startswith(sys.argv[1]))' \
            "${3:-$work/$1}" || { echo "$1: another copy of the package was imported"; exit 1; }
    )
    if [ -n "${2:-}" ] && ! grep -q "$2" "$work/$1.info"; then
        echo "$1: 'python -m specdec_ext' does not say '$2':"
        cat "$work/$1.info"
        exit 1
    fi
    say "$1: $(tail -n 1 "$work/$1.selftest")"
}

for path in $paths; do
    say "$path"
    SPECDEC_CUDA=0
    export SPECDEC_CUDA
    case $path in
    wheel)
        # The wheel is built in one environment and installed in another, which has no tools.
        new_env wheel-builder
        $pip install "$torch" numpy
        build_tools
        fresh_sources "$work/wheel-source"
        rm -rf "$work/dist"
        PATH="$work/wheel-builder/bin:$PATH" $pip wheel --no-build-isolation --no-deps -w "$work/dist" "$work/wheel-source"
        new_env wheel
        $pip install "$torch" numpy
        $pip install --no-deps "$work"/dist/*.whl
        check wheel
        ;;
    sdist)
        new_env sdist
        $pip install "$torch" numpy build
        fresh_sources "$work/sdist-source"
        (cd "$work/sdist-source" && "$work/sdist/bin/python" -m build --sdist --outdir "$work/sdist-dist" . >"$work/sdist.log")
        $pip install "$work"/sdist-dist/*.tar.gz
        check sdist
        ;;
    git)
        new_env git
        $pip install "$torch" numpy
        $pip install "git+file://$root"
        check git
        ;;
    isolated)
        new_env isolated
        $pip install "$torch" numpy
        fresh_sources "$work/isolated-source"
        $pip install "$work/isolated-source"
        check isolated "SPECDEC_CUDA=0"
        ;;
    no-torch)
        new_env no-torch
        fresh_sources "$work/no-torch-source"
        $pip install --no-deps "$work/no-torch-source"
        $pip install "$torch" numpy
        check no-torch
        ;;
    no-isolation)
        new_env no-isolation
        $pip install "$torch" numpy
        build_tools
        fresh_sources "$work/no-isolation-source"
        PATH="$work/no-isolation/bin:$PATH" $pip install --no-build-isolation "$work/no-isolation-source"
        check no-isolation
        ;;
    editable)
        new_env editable
        $pip install "$torch" numpy
        build_tools
        fresh_sources "$work/editable-source"
        PATH="$work/editable/bin:$PATH" $pip install --no-build-isolation --editable "$work/editable-source"
        check editable "" "$work/editable-source"
        ;;
    no-nvcc)
        new_env no-nvcc
        $pip install "$torch" numpy
        fresh_sources "$work/no-nvcc-source"
        (
            unset CUDA_HOME CUDACXX CUDA_PATH
            PATH=$(path_without_nvcc) SPECDEC_CUDA=auto $pip install "$work/no-nvcc-source"
        )
        check no-nvcc "CUDA backend .*absent"
        ;;
    nvcc)
        if ! command -v nvcc >/dev/null 2>&1 && [ ! -x "${CUDA_HOME:-/nonexistent}/bin/nvcc" ]; then
            say "nvcc: left out, there is none"
            continue
        fi
        new_env nvcc
        $pip install "$torch" numpy
        fresh_sources "$work/nvcc-source"
        SPECDEC_CUDA=1 SPECDEC_CUDA_ARCHS="${SPECDEC_CUDA_ARCHS:-90-real}" $pip install "$work/nvcc-source"
        test -f "$work"/nvcc/lib/python*/site-packages/specdec_ext/_C_cuda.so || {
            echo "nvcc: no CUDA library was installed"
            exit 1
        }
        check nvcc
        ;;
    *)
        echo "$path is none of the paths; see the head of tools/install_paths.sh" >&2
        exit 2
        ;;
    esac
done
say "install paths: all passed ($paths)"
