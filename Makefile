# What to type. `make serve` and `make test` do everything on a fresh machine that has Python 3.11+, a C++ compiler and make.
# Each step leaves a stamp in the virtual environment and runs again only when what it depends on has changed: a C++ edit
# rebuilds the native library, a Python edit needs nothing (the install is editable).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help build serve test test-gpu properties lint fmt bench demo-model demo-eval wheel clean

VENV    ?= .venv
PYTHON  ?= python3
RANKS   ?=
PORT    ?= 8000
MODEL   ?= examples/demo_model/checkpoint
NAME    ?= $(if $(filter examples/demo_model/checkpoint,$(MODEL)),demo,$(if $(filter examples/demo_model/checkpoint_v4,$(MODEL)),demo-v4,$(notdir $(MODEL:/=))))
TORCH   ?= torch==2.13.0
ARGS    ?=
HALF    ?= all

PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip install -qq --disable-pip-version-check
SOURCES := $(shell find csrc -type f) CMakeLists.txt
CXX_FILES = find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'

# Programs of the virtual environment first (CURDIR is not abspath: it keeps spaces). Open MPI runs as root only with
# both variables; its other settings are written into $(VENV)/etc by `eprt env --configure-mpi`.
export PATH := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))/bin:$(PATH)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Servers and tests start many processes of the same code: the first compiles it, the others read.
unexport PYTHONDONTWRITEBYTECODE

# Requirements of pyproject.toml, one a line: eprt's own and those of the named extras.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = [requirement for name in sys.argv[1:] for requirement in project["optional-dependencies"][name]]
print(*project["dependencies"], *extras, sep="\n")
endef
export REQUIREMENTS

help:       ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

# A virtual environment holds absolute paths, so ours is made anew after the directory was moved; one that somebody else
# made is used as it is. torch comes first and by exact version: a range may resolve to a build of several gigabytes.
STAMP := $(CURDIR) $(TORCH)
STALE := $(shell test -f $(VENV)/.torch && test "$$(cat $(VENV)/.torch)" != "$(STAMP)" && echo stale)

$(VENV)/.torch: $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "eprt needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "[1/3] creating $(VENV) and installing $(TORCH)"
	@rm -rf build
	@{ test -z "$(STALE)" && { $(PY) -m pip --version || $(PY) -m ensurepip; } &> /dev/null; } || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) $(TORCH)
	@printf %s "$(STAMP)" > $@

.PHONY: stale
stale:
	@echo "$(VENV) was made in another directory or with another torch; making it anew"

$(VENV)/.libraries: $(VENV)/.torch pyproject.toml
	@echo "[2/3] installing libraries"
	@$(PY) -c "$$REQUIREMENTS" build mpi bench > $(VENV)/requirements.txt
	@$(PIP) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.native: $(VENV)/.libraries $(SOURCES)
	@command -v $${CXX:-c++} > /dev/null || { echo "no C++ compiler; on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	@echo "[3/3] building the native library"
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(VENV)/bin/eprt env --configure-mpi > /dev/null
	@touch $@

# Python compiles what of them it imports, which is little.
$(VENV)/.test: $(VENV)/.libraries
	@echo "[test] installing the test tools"
	@$(PY) -c "$$REQUIREMENTS" build mpi test lint > $(VENV)/requirements-test.txt
	@$(PIP) --no-compile -r $(VENV)/requirements-test.txt
	@touch $@

# Without a browser the page's tests are skipped, with the reason; the next run tries again.
$(VENV)/.browser: $(VENV)/.test
	@echo "[test] looking for a browser"
	@$(PY) -m tests.web.chromium && touch $@ || true

build: $(VENV)/.native    ## install eprt into .venv and build its native library
	@:

serve: $(VENV)/.native    ## demo model on CPUs, OpenAI-compatible: RANKS=4 PORT=8000 MODEL=DIR ARGS=...
	@exec $(PY) -m eprt.serve $(if $(RANKS),-n $(RANKS)) --model "$(MODEL)" --served-model-name "$(NAME)" --port $(PORT) $(ARGS)

# Two files at a time: many tests wait for processes, and each asserts what, never how fast. Beside each other: what
# compiles the library and what installs the tools; lint, of which pyright takes a minute, and the tests.
test:       ## lint, and every test that needs no GPU: ARGS="-k name"
	@$(MAKE) --no-print-directory -j2 $(VENV)/.native $(VENV)/.browser
	@( $(LINT) ) & lint=$$!; failed=0; \
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || failed=$$?; \
	wait $$lint || { echo "make lint fails" >&2; failed=1; }; exit $$failed

# PY=python3: with a Python that brings torch for CUDA, and in which eprt is installed (docs/gpu.md); nothing is installed.
test-gpu: $(if $(filter command,$(firstword $(origin PY))),,$(VENV)/.test $(VENV)/.native)  ## tests/gpu, dated in benchmarks/results/gpu_suite.json: HALF=quick|long PY=python3
	@$(PY) -m benchmarks.suite.gpu_suite --half $(HALF) $(ARGS)

# Some 8 minutes; every change is tested with 80 to 120 of each kind.
properties: $(VENV)/.test $(VENV)/.native ## 20,000 drawn problems of each kind for the planner, beyond what `make test` tries
	@$(PY) -m pytest tests/unit/balancer -m properties --hypothesis-profile=thorough $(ARGS)

lint: $(VENV)/.test $(VENV)/.native  ## ruff, pyright, clang-format (import layering and size limits are tests)
	@$(LINT)

LINT = ruff check -q . && ruff format -q --check . \
	&& { pyright --pythonpath $(PY) > $(VENV)/pyright.txt || { cat $(VENV)/pyright.txt; false; }; } \
	&& { $(CXX_FILES) | xargs -r clang-format --dry-run -Werror; } \
	&& $(PY) -m benchmarks.suite.gpu_suite --age

fmt: $(VENV)/.test        ## format everything in place
	@ruff check --fix-only -q . && ruff format -q .
	@$(CXX_FILES) | xargs -r clang-format -i

bench: $(VENV)/.test $(VENV)/.native ## benchmarks that need no GPU; tables here, JSON in benchmarks/results: ARGS=name, or ARGS=--list
	@$(PY) -m benchmarks $(ARGS)

demo-model: $(VENV)/.test $(VENV)/.native ## retrain the demo checkpoint
	@$(PY) -m examples.demo_model.train $(ARGS)

demo-eval: $(VENV)/.native ## accuracy of the demo model, through the HTTP server on 4 ranks
	@$(PY) -m examples.demo_model.evaluate --serve --ranks $(or $(RANKS),4) $(ARGS)

wheel: $(VENV)/.native    ## dist/eprt-*.whl
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	@ls -1 dist/*.whl

clean:      ## remove builds, caches and the virtual environment
	@rm -rf build dist $(VENV) .pytest_cache .ruff_cache .hypothesis
