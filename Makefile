# `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most tests wait for something: three at a time, each with a control plane of its own.
PYTEST_ARGS ?= -n 3 --dist loadfile
BENCH ?=

.DEFAULT_GOAL := help
.PHONY: help setup lock test lint format generate check-generated demo cluster e2e bench image clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment .venv with the locked dependencies

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "LLMKube needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test: setup ## Run the tests (the first time, build a local control plane: 5 to 12 minutes)
	$(BIN)/python -m devcluster.binaries
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## Check style, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: setup ## Write the generated files (CRDs, RBAC, reference documentation)
	$(BIN)/python -m llmkube.api.generate
	$(BIN)/python -m hack.reference

check-generated: generate ## Fail if the generated files differ from the committed ones
	@git diff --exit-code -- config docs || \
	  { echo "generated files are out of date: run 'make generate' and commit"; exit 1; }

demo: setup ## Run the main job on a local real API server, with a live view
	$(BIN)/llmkube demo $(DEMO_ARGS)

cluster: setup ## Run a bare local control plane until Ctrl-C, to try things by hand
	$(BIN)/python -m devcluster

e2e: setup ## Prove it on a real node: kubelet, containerd, images (root on Debian 12)
	$(BIN)/python -m e2e

bench: setup ## Measure against the peers (BENCH=hub|macs|verifications|engine|simulation|verifier)
	$(BIN)/python -m bench $(BENCH)

image: ## Build the container images with buildah, podman or docker
	./hack/build-image.sh

lock: setup ## Refresh requirements/*.txt from pyproject.toml
	./hack/lock.sh $(BIN)/python

clean: ## Remove the virtual environment and caches of this folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
