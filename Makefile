# make demo   see it work, on a PostgreSQL from a PyPI wheel: nothing to set up
# make test   everything that guards the project; PG=embedded runs the tests on the wheel's PostgreSQL
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PG     ?= auto
PYTEST_ARGS ?=

.PHONY: venv demo test lint bench bench-peers freeze-baseline
.DEFAULT_GOAL := help

help:
	@sed -n '1,2s/^# //p' Makefile

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name it: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

test: venv
	@PATH="$(abspath $(BIN)):$$PATH" tests/prepare $(PG)
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest --pg=$(PG) -n auto $(PYTEST_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/squawk migrations/versions/*.sql

bench: venv
	$(BIN)/python -m tests.bench

bench-peers: venv
	$(BIN)/python -m tests.bench --peers

# Until the first release: sql/02 to sql/19 become revision 0001, and install.sql lists every file.
freeze-baseline: venv
	$(BIN)/python migrations/freeze.py
