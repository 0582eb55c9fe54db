# Everything runs in .venv, which the first target that needs it creates; all it takes is Python 3.11 or newer. `make` alone prints the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# the first of these that is new enough; `make PYTHON=/some/python3 ...` overrules it
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCHMARKS = $(sort $(filter-out tests/benchmarks/_%,$(wildcard tests/benchmarks/*.py)))

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# a change of either file installs again into the same environment
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "PDSL needs Python 3.11 or newer: none found. Say which with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PDSL and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,vision]"
	@touch $@

.PHONY: install
install: $(STAMP) ## create .venv with PDSL and all tools

.PHONY: demo
demo: $(STAMP) ## train a small language model on four local processes, about a minute
	@mkdir -p runs
	$(BIN)/pdsl run pdsl/examples/quickstart.pdsl --metrics runs/quickstart.jsonl

.PHONY: test
test: lint ## lint, then run all tests
	@$(BIN)/python -m pytest -q

.PHONY: lint
lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check . || true; echo "repair with: make format" >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

.PHONY: format
format: $(STAMP) ## repair what ruff can repair
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP) ## run every script of tests/benchmarks
	@$(foreach script,$(BENCHMARKS),echo "== $(script)"; $(BIN)/python $(script);)

.PHONY: equality
equality: $(STAMP) ## four hundred combinations of mesh, schedule, loss, precision and recomputation against one process
	$(BIN)/python -m tests.product --count 400

.PHONY: chaos
chaos: $(STAMP) ## a hundred runs with random faults, each compared with an undisturbed one
	$(BIN)/pdsl chaos pdsl/examples/resilient.pdsl --runs 50
	$(BIN)/pdsl chaos pdsl/examples/two_losses.pdsl --runs 50

.PHONY: clean
clean: ## remove caches, build products and run outputs; keeps .venv
	@rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
