#!/bin/sh
# Runs a Python command with the sanitizer runtime preloaded, as the emu_asan backend needs it.
# libstdc++ is preloaded too: without it the sanitizer cannot intercept C++ exceptions.
set -eu
cxx=${CXX:-g++}
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)"
export LD_PRELOAD
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
export SPECDEC_BACKENDS=emu_asan
exec "$@"
