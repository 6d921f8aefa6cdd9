# Two commands do everything on a machine with Python >= 3.10 and a C++ compiler: `make train`, `make test`.
# Each makes .venv, installs pinned versions, builds csrc/ and runs. VENV=dir, PYTHON=python3.12,
# TORCH_INDEX=address (of PyTorch's CPU wheels, for a machine without an NVIDIA GPU), WORKERS= (tests
# one after another) and FOLDER=engine (tests/engine only; several in quotes) are yours to set.

SHELL := bash
unexport PYTHONDONTWRITEBYTECODE  # with it every process that a test starts compiles fastpar/ again
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt
BUILD_INPUTS := pyproject.toml setup.py .ci/constraints.txt $(wildcard csrc/* csrc/torch/*)
ARGS ?=
# The best settings of `python -m bench study main_job` so far; RECIPE= leaves them to --config or --resume.
RECIPE ?= --n-embd 192 --optimizer muon --lr 0.015 --lr-schedule linear --batch-size 16 --max-steps 1310
WORKERS ?= -n logical --maxprocesses 4 --dist worksteal
TORCH_INDEX ?=
FOLDER :=
FOLDERS := $(sort $(patsubst tests/%/,%,$(dir $(wildcard tests/*/test_*.py))))
ifneq ($(filter-out $(FOLDERS),$(FOLDER)),)
$(error expected FOLDER= a folder of tests/, got FOLDER=$(FOLDER); choose of $(FOLDERS))
endif

# The CUDA kernels' source as C++, which tests run: built before them, because a test's time is limited.
EMULATED = @echo "== set-up: csrc/ with its CUDA kernels compiled for the CPU"; mkdir -p build; \
  FASTPAR_CUDA=emulated $(BIN)/python setup.py -q build_ext --build-lib build/emulated > build/emulated.log 2>&1 || \
  { cat build/emulated.log; exit 1; }

.PHONY: train test test-slow bench report lint docs aot cuda-check gpu gpu-pack clean

train: $(VENV)/train.done  ## train GPT-2 on the text that ships with a dependency, two ranks, 5 to 8 minutes on two cores
	$(BIN)/fastpar train --nproc 2 $(RECIPE) $(ARGS)

test: $(VENV)/dev.done  ## the default tests, 7 to 10 minutes on two cores; FOLDER=engine: only tests/engine
	$(EMULATED)
	$(BIN)/python -m pytest $(WORKERS) $(addprefix tests/,$(FOLDER)) $(ARGS)

test-slow: $(VENV)/dev.done  ## the slow tests, an hour on two cores; FOLDER=engine: less than 15 minutes
	$(EMULATED)
	$(BIN)/python -m pytest $(WORKERS) -m slow $(addprefix tests/,$(FOLDER)) $(ARGS)

bench: $(VENV)/dev.done  ## microbenchmarks and the training step against plain PyTorch
	$(BIN)/python -m bench $(ARGS)

report: $(VENV)/dev.done  ## README tables from the results in bench/results
	$(BIN)/python -m bench report $(ARGS)

lint: $(VENV)/dev.done  ## format, lint, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.c* csrc/torch/*
	$(BIN)/python .ci/types.py

docs: $(VENV)/docs.done  ## a site of all guides and the public names: build/docs/site/index.html
	$(BIN)/python .ci/docs/pages.py

aot: $(VENV)/dev.done build/triton-3.6.done  ## compile every Triton kernel for sm_80 and sm_90, the largest for sm_89 and sm_120, without a GPU: registers, spills, SASS
	$(BIN)/python -m bench.compiler.aot $(ARGS)

cuda-check: $(VENV)/dev.done  ## compile every CUDA kernel for sm_80 and sm_90a, without a GPU: registers, spills, SASS (skips without nvcc)
	$(BIN)/python -m bench.compiler.cuda_check $(ARGS)

gpu:  ## on a machine with an NVIDIA GPU and no network: is it right, is it fast; a report into build/gpu
	bash bench/gpu.sh

gpu-pack: build/pack.done  ## without a GPU: what `bench/gpu.sh` need not compile there; PYTHON=python3.12, nvcc
	PYTHON=$(CURDIR)/build/pack_venv/bin/python bash bench/gpu.sh pack

build/pack.done:
	@echo "== set-up: Python of a GPU's machine: torch 2.11.0, triton 3.6.0 (several GB)"
	$(PYTHON) -m venv build/pack_venv
	build/pack_venv/bin/python -m pip install --quiet torch==2.11.0 numpy pybind11 ninja setuptools safetensors
	touch $@

clean:
	rm -rf $(VENV) build kernels/_C.*.so kernels/_C.py *.egg-info

$(VENV)/torch.done: .ci/constraints.txt .ci/torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "make: expected Python >= 3.10, got $$($(PYTHON) --version 2>&1); call make PYTHON=python3.12"; exit 2; }
	@[ "$$FASTPAR_CPP" = 0 ] || command -v $${CXX:-c++} >/dev/null || \
	  { echo "make: expected a C++ compiler, got no $${CXX:-c++}; install g++, set CXX, or set FASTPAR_CPP=0 (torch then computes everything)"; exit 2; }
	@echo "== set-up 1/3: virtual environment and torch"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@TORCH_INDEX='$(TORCH_INDEX)' .ci/torch $(PIP)
	touch $@

$(VENV)/train.done: $(VENV)/torch.done $(BUILD_INPUTS)
	@echo "== set-up 2/3: build tools"
	$(PIP) setuptools wheel pybind11 ninja
	@echo "== set-up 3/3: install fastpar and what the trainer needs; $$($(BIN)/python setup.py -q describe_build)"
	$(PIP) --no-build-isolation -e '.[train]'
	touch $@

$(VENV)/dev.done: $(VENV)/train.done
	@echo "== set-up: test tools"
	$(PIP) --no-build-isolation -e '.[dev]' $$(nvidia-smi -L >/dev/null 2>&1 || echo 'triton==3.9.0')
	touch $@

$(VENV)/docs.done: $(VENV)/train.done
	@echo "== set-up: what writes the site"
	$(PIP) --no-build-isolation -e '.[docs]'
	touch $@

# The oldest Triton that the kernels are compiled with: the one that torch 2.11 comes with.
build/triton-3.6.done: | $(VENV)/dev.done
	@echo "== set-up: Triton 3.6.0 for make aot"
	rm -rf build/triton-3.6
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/triton-3.6 triton==3.6.0
	touch $@
