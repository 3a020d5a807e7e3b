# `make demo` and `make test` need Python 3.11 to 3.13 and make, nothing else: they build .venv on first use.
# Another interpreter: `make test PYTHON=/path/to/python3.12`.

SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := python3.12 python3.11 python3.13 python3 python

# The first candidate that runs, is supported and can make virtual environments; empty when there is none.
PYTHON ?= $(shell for p in $(CANDIDATES); do $$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --dist loadfile
WORKERS := 2

# Lingvo's dependencies are not those that constraints.txt pins, so it has an environment of its own.
LINGVO_VENV := .venv-lingvo
LINGVO = $(or $(LINGVO_PYTHON),$(LINGVO_VENV)/bin/python)
LINGVO_MISSING := 3

# JAX's CUDA plugin takes gigabytes, and at every start it searches for a GPU.
CUDA_VENV := .venv-cuda

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-faults test-tpu test-cuda test-lingvo test-slurm lint check format docs reference notebooks pictures constraints clean

help: ## Show these targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/installed ## Install, train the recipe `tiny`, plot its loss curve, generate some text.
	$(BIN)/pax train tiny --run-dir runs/demo
	$(BIN)/pax plot runs/demo
	$(BIN)/pax decode runs/demo --prompt "def "

# Most of the time goes to compiling, so XLA optimizes little here. `make test-all` compiles as users do.
test: $(VENV)/installed-dev ## Run every test that is not marked slow, tpu, gpu or cuda.
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -n $(WORKERS) -m "not slow and not tpu and not gpu and not cuda"

test-all: $(VENV)/installed-dev ## Run the slow tests too, and Lingvo's where Lingvo can be loaded.
	$(PYTEST) -n $(WORKERS) -m "not tpu and not gpu and not cuda and not lingvo and not faults"
	@$(MAKE) --no-print-directory test-lingvo LINGVO_MISSING=0

# A tenth of the repetitions: make test-faults FAULTS_SCALE=0.1
FAULTS_SCALE := 1

test-faults: $(VENV)/installed-dev ## Do damage to many real runs: kills, signals, full disks, lost processes.
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -n 0 -m "faults or slow" --faults-scale $(FAULTS_SCALE) \
	  tests/faults tests/cli/test_restarts.py

# One compilation at a time: the largest take gigabytes of memory, and each takes minutes.
test-tpu: $(VENV)/installed-dev ## Compile every TPU recipe for its slices; takes hours, needs no TPU.
	$(PYTEST) -n 0 tests/recipes/test_tpu_recipes.py

test-cuda: $(CUDA_VENV)/installed ## Compile recipes for NVIDIA GPUs; needs no GPU, but 4 GB of disk.
	$(CUDA_VENV)/bin/python -m pytest -m cuda tests/programs/test_gpu_machine.py

test-lingvo: $(if $(LINGVO_PYTHON),,$(LINGVO_VENV)/installed) ## Run the tests of Lingvo's inputs, with LINGVO_PYTHON=... if given.
	@$(LINGVO) -c 'import lingvo.core.ops' >/dev/null 2>&1 || { \
	  $(LINGVO) -c 'import lingvo.core.ops' 2>&1 | tail -n 1 >&2; \
	  echo "Lingvo cannot be loaded. Its wheel is for Linux on x86-64 with glibc 2.38 or newer (Debian 13, Ubuntu 24.04)." >&2; \
	  echo "Name a Python that can: make test-lingvo LINGVO_PYTHON=/path/to/python" >&2; exit $(LINGVO_MISSING); } && \
	  $(LINGVO) -m pytest -m lingvo tests/inputs/test_lingvo_adaptors.py tests/inputs/test_lingvo_run.py

test-slurm: $(VENV)/installed-dev ## Run an emitted batch script on a real Slurm on this machine, if there is one.
	$(PYTEST) -n 0 tests/cloud/test_slurm.py

lint: $(VENV)/installed-dev ## Check format, lint, types and import contracts.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

check: lint ## Lint, then run the fast tests: house rules, command line, configuration.
	$(PYTEST) -n $(WORKERS) -m "not slow and not tpu and not gpu and not cuda" tests/house tests/cli tests/config

format: $(VENV)/installed-dev ## Format the source and apply the linter's fixes.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-docs ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(VENV)/installed-dev ## Rewrite the generated pages: verbs, fields, overlays, recipes, meshes.
	$(BIN)/python .ci/reference.py --recipes

notebooks: $(VENV)/installed-dev ## Execute the notebooks, and rewrite their pages in docs/learn.
	$(BIN)/python .ci/notebooks.py

pictures: $(VENV)/installed-dev $(VENV)/installed-docs ## Redraw docs/pictures; with Chromium, screenshots in build/pictures.
	$(BIN)/python .ci/pictures.py

constraints: ## Rewrite constraints.txt from fresh installs on Python 3.11 and 3.12.
	python3 .ci/constraints.py python3.11 python3.12

clean: ## Remove the virtual environments and all build outputs.
	rm -rf $(VENV) $(LINGVO_VENV) build dist site *.egg-info .pytest_cache .ruff_cache .import_linter_cache

# A stamp file per kind of install: a second `make` has nothing to do until the dependencies change.
$(VENV)/installed: EXTRAS :=
$(VENV)/installed-dev: EXTRAS := [dev]
$(VENV)/installed-docs: EXTRAS := [docs]
$(VENV)/installed $(VENV)/installed-dev $(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing pax and its pinned dependencies into $(VENV); the first time takes a few minutes."
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable ".$(EXTRAS)" </dev/null
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would do it on one core
	@touch $@

$(LINGVO_VENV)/installed: pyproject.toml | $(BIN)/python
	@echo "Installing pax and Lingvo into $(LINGVO_VENV); the first time takes a few minutes."
	$(BIN)/python -m venv $(LINGVO_VENV)
	$(LINGVO_VENV)/bin/python -m pip install --quiet --upgrade pip </dev/null
	$(LINGVO_VENV)/bin/python -m pip install --quiet --editable ".[dev,lingvo]" </dev/null
	@touch $@

$(CUDA_VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing pax and JAX's CUDA plugin into $(CUDA_VENV); the first time takes a few minutes."
	$(BIN)/python -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --upgrade pip </dev/null
	$(CUDA_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,cuda13]" </dev/null
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
	  echo "pax needs Python 3.11, 3.12 or 3.13 with the venv module; none of $(CANDIDATES) is that." >&2; \
	  echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 3; }
	@'$(PYTHON)' -c '$(SUPPORTED)' || { \
	  echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13 with the venv module." >&2; exit 3; }
	$(PYTHON) -m venv $(VENV)
