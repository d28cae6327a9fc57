# Needs nothing but Python 3.11+, pip and make. `make` alone lists the targets.
#
#   ARGS      more arguments for the command, such as ARGS="training.steps=50" or ARGS="-k mask"
#   PYTHON    the interpreter that .venv is made with (default: the first of 3.11 or newer)
#   THREADS   CPU threads of `make quickstart` (default: all)
#   WORKERS   processes of `make test`, `make test-fast` and `make test-vllm`

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
PEERS_VENV ?= .venv-peers
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
THREADS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS ?= 2
ARGS ?=

# One process and no questions: works without a saved accelerate configuration, on a CPU and on one GPU. Precision is
# the recipe's. For more processes: .venv/bin/accelerate launch --num_processes 8 train/eagle.py <recipe>
LAUNCH := $(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no \
	--dynamo_backend no --num_cpu_threads_per_process

.PHONY: docs help venv quickstart test test-fast test-vllm test-sglang test-real lint format compare bench bench-peers bench-gpu real-model check-gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.installed  ## make .venv and install the project with the pinned tools

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3.11 venv" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); the first time takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

quickstart: $(VENV)/.installed  ## train a head for the embedded target, export it, prove it
	$(LAUNCH) $(THREADS) train/eagle.py recipes/quickstart/eagle3.yaml $(ARGS)

# One thread per worker: several threads per process on a busy machine wait for each other most of the time.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(VENV)/.installed  ## run the whole test suite
	$(PYTEST) $(ARGS)

test-fast: $(VENV)/.installed  ## run the quick tests, about a minute (ARGS=tests/inference/engine: those of one package)
	$(PYTEST) -m "not slow and not integration and not gpu" $(ARGS)

test-vllm: $(VENV)/.installed  ## run the exports in real vLLM, on a CPU (makes .venv-vllm first: minutes, 4 GB)
	$(BIN)/python scripts/setup_vllm.py $(VLLM_VENV)
	DRAFTSMITH_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(PYTEST) tests/vllm $(ARGS)

test-sglang: $(VENV)/.installed  ## run the exports in real SGLang, on a CPU (makes .venv-sglang first: minutes, 7 GB)
	$(BIN)/python scripts/setup_sglang.py $(SGLANG_VENV)
	DRAFTSMITH_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(PYTEST) tests/sglang $(ARGS)

test-real: $(VENV)/.installed  ## run every method on SmolLM2-135M, which is fetched first (ten minutes)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet gguf
	DRAFTSMITH_REAL=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/real $(ARGS)

lint: $(VENV)/.installed  ## ruff (lint and format), import-linter and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: $(VENV)/.installed  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

compare: $(VENV)/.installed  ## train every family for the same time and put them side by side (about an hour)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/draftsmith compare $(wildcard recipes/quickstart/*.yaml) $(ARGS)

bench: $(VENV)/.installed  ## measure what docs/results.md shows (hours; ARGS=methods for one table)
	$(BIN)/python scripts/bench.py $(ARGS)

bench-peers: $(VENV)/.installed  ## training steps of EAGLE-3 and DFlash beside those of vLLM's speculators (makes .venv-peers first: 2 GB)
	$(BIN)/python scripts/bench_peers.py --venv $(PEERS_VENV) $(ARGS)

bench-gpu: $(VENV)/.installed  ## a step by phase and decoding beside what the GPU can do (ARGS="--device cpu": tiny)
	$(BIN)/python scripts/bench_gpu.py $(ARGS)

real-model: $(VENV)/.installed  ## heads for SmolLM2, trained and measured in an hour of a GPU (ARGS="--dry-run": minutes)
	$(BIN)/python scripts/real_model.py $(ARGS)

check-gpu: $(VENV)/.installed  ## the tests that need a GPU (ten minutes; ARGS="--device cpu" elsewhere)
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

docs: $(VENV)/.installed  ## build the documentation as a site, build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:  ## remove caches and build outputs; runs/ and the environments stay
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . \( -path ./$(VENV) -o -path ./$(VLLM_VENV) -o -path ./$(PEERS_VENV) \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
