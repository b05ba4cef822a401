# make demo   see it work, on a PostgreSQL from a PyPI wheel: nothing to set up
# make test   everything that guards the project (PG=embedded: on the wheel's PostgreSQL only)
# make lint   the checks without the tests; make test-lowest: the client with the lowest versions of what it needs
# make breaches  plant a bug for each of seventeen promises: the tests that guard it have to fail (ONLY=name,name)
# make bench  how fast it is here; make bench-peers: beside other job queues
# make ab     BASE=<commit> [ONLY=row,row]: whether the working tree is slower than that commit
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PG     ?= auto
PYTEST_ARGS ?=

.PHONY: help venv demo test test-lowest lint breaches bench bench-peers ab freeze-baseline

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

venv: $(VENV)/.installed

# Made again when pyproject.toml changes, so that a pull that brings a dependency is enough. The demo needs a fraction of
# what the tests need, and whoever tries it is waiting.
$(VENV)/.installed: EXTRAS := dev
$(VENV)/.demo: EXTRAS := embedded
$(VENV)/.installed $(VENV)/.demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	@echo 'making $(VENV), which takes a minute the first time ...'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	@$(BIN)/python docs/examples/demo.py

# The second run covers another major version: the functions and tables on the newest PostgreSQL, from the wheel.
test: venv
	@tests/prepare $(PG)
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest --pg=$(PG) -n auto $(PYTEST_ARGS)
ifneq ($(PG),embedded)
	$(BIN)/pytest --pg=embedded -n auto $(PYTEST_ARGS) tests/sql
endif

# Another environment, with the lowest versions that pyproject.toml allows.
test-lowest: LOWEST := .venv-lowest
test-lowest:
	@tests/prepare $(PG)
	@test -x $(LOWEST)/bin/pip || $(PYTHON) -m venv $(LOWEST)
	@$(PYTHON) tests/lowest.py > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
	    --constraint $(LOWEST)/constraints.txt -e '.[dev,speed]'
	$(LOWEST)/bin/pytest --pg=$(PG) -n auto $(PYTEST_ARGS) tests/pyclient tests/docs

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python migrations/check.py

breaches: venv
	@tests/prepare $(PG)
	@$(BIN)/python -m tests.plant --pg=$(PG) $(if $(ONLY),--only $(ONLY))

bench: venv
	$(BIN)/python -m tests.bench $(if $(ONLY),--only $(ONLY)) $(if $(SOAK),--soak)

bench-peers: venv
	$(BIN)/python -m tests.bench --peers $(if $(ONLY),--only $(ONLY))

ab: venv
	@test -n '$(BASE)' || { echo 'make ab: name the commit to compare with: make ab BASE=main' >&2; exit 2; }
	@$(BIN)/python -m tests.bench.ab '$(BASE)' $(if $(ONLY),--only $(ONLY))

# Until the first release: sql/02 to sql/19 become revision 0001, and install.sql lists every file.
freeze-baseline: venv
	$(BIN)/python migrations/freeze.py
