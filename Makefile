# Needs Python (3.11 or newer) and make; everything else goes into .venv. `make demo` and `make test` are the two to know.
PYTHON ?= python3
BIN := .venv/bin

# constraints.txt holds the versions that were tested, on Python 3.11. Other Pythons have other wheels,
# so that they take the newest versions that pyproject.toml allows.
CONSTRAINTS := $(shell $(PYTHON) -c 'import sys; print("--constraint constraints.txt" * (sys.version_info[:2] == (3, 11)))')

.DEFAULT_GOAL := help
.PHONY: help demo test statistical lint format types docs bench clean
.SECONDARY:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.cli ## the paper's two-mode posterior as a table and a picture (in demo/)
	$(BIN)/pmd reproduce mixture --out demo

# Two at a time: most of a test is compilation, on one core. A file stays with one process, which
# has then compiled what its tests share.
test: .venv/.test ## the fast tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

statistical: .venv/.test ## the long tests: many seeds, hours
	$(BIN)/python -m pytest -m statistical

lint: .venv/.dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/.dev ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: .venv/.dev .venv/.test ## pyright's rules, from a package that brings its own node
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: .venv/.docs ## the site (in site/), strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/.test ## what a move and the hot loops cost here (benchmarks/README.md has the rest)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/move.py
	$(BIN)/python benchmarks/device.py --small

clean: ## the environment and everything written here
	rm -rf .venv demo site dist .pytest_cache .ruff_cache .hypothesis

# .venv/.EXTRA says that the extra EXTRA of pyproject.toml is installed.
.venv/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[$*]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
