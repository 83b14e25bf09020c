# The verbs. `make serve` and `make test` do everything on a fresh machine that has Python 3.11+, g++ and make.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help install build serve test bench lint fmt demo-model demo-eval clean

VENV    ?= .venv
PYTHON  ?= python3
PY      := $(VENV)/bin/python
RANKS   ?= 4
PORT    ?= 8000
TORCH   ?= torch==2.13.0

# Open MPI: allowed as root, more ranks than cores, no UCX noise about windows. One OpenMP thread per rank unless a
# rank is bound to more cores (it then sizes its own threads).
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_osc := ^ucx
export PATH := $(abspath $(VENV))/bin:$(PATH)

help:                     ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

# torch first and by exact version: a range may resolve to a CUDA build of several gigabytes.
$(VENV)/.base:
	@echo "[1/3] creating $(VENV) and installing $(TORCH)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check $(TORCH)
	@$(PY) -m pip install -q --disable-pip-version-check "scikit-build-core>=1.1" cmake ninja
	@touch $@

NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h') CMakeLists.txt pyproject.toml

$(VENV)/.installed: $(VENV)/.base $(NATIVE)
	@echo "[2/3] building and installing eprt"
	@$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[mpi]"
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "[3/3] installing the test tools"
	@$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e ".[mpi,test,lint]"
	@touch $@

install build: $(VENV)/.installed   ## install eprt into .venv and build its native library

serve: $(VENV)/.installed ## demo model on 4 CPU ranks, OpenAI-compatible, http://127.0.0.1:8000
	@exec mpirun -n $(RANKS) $(PY) -m eprt.serve --model examples/demo_model/checkpoint --port $(PORT) $(ARGS)

test: $(VENV)/.test lint  ## every test that needs no GPU
	@$(PY) -m pytest $(ARGS)

lint: $(VENV)/.test       ## ruff, pyright, clang-format (import layering is a test)
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/pyright
	@git ls-files -co --exclude-standard 'csrc/**/*.cpp' 'csrc/**/*.h' 'csrc/**/*.cu' 'csrc/**/*.cuh' | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

fmt: $(VENV)/.test        ## format everything in place
	@$(VENV)/bin/ruff check --fix-only -q . && $(VENV)/bin/ruff format -q .
	@git ls-files -co --exclude-standard 'csrc/**/*.cpp' 'csrc/**/*.h' 'csrc/**/*.cu' 'csrc/**/*.cuh' | xargs -r $(VENV)/bin/clang-format -i

bench: $(VENV)/.test      ## every benchmark that needs no GPU; tables here, JSON in benchmarks/results
	@$(PY) -m benchmarks $(ARGS)

demo-model: $(VENV)/.test ## retrain the demo checkpoint
	@$(PY) -m examples.demo_model.train $(ARGS)

demo-eval: $(VENV)/.installed ## accuracy of the demo model, through the HTTP server on 4 ranks
	@$(PY) -m examples.demo_model.evaluate --serve --ranks $(RANKS) $(ARGS)

clean:                    ## remove builds, caches and the virtual environment
	@rm -rf build $(VENV) .pytest_cache .ruff_cache
