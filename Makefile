# One file of commands; each does all of its own set-up. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit slow bench mutants wheel-check clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamped: runs again only when the requirements changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "privpart needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(READY)  ## make the virtual environment in .venv

demo: $(READY)  ## train, account and audit on real data (about a minute on two cores); writes out/
	$(BIN)/privpart demo --out out

test: lint types unit  ## lint, types and the fast tests, as CI runs them

lint: $(READY)  ## ruff and the import contracts between the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(READY)  ## mypy --strict on the three packages
	$(BIN)/mypy

unit: $(READY)  ## the fast tests
	$(BIN)/pytest -n 2 --dist worksteal -q

slow: $(READY)  ## the tests that take minutes
	$(BIN)/pytest -n 2 -q -m slow

mutants: $(READY)  ## break the accounting on purpose and list the mutants that no test notices (hours)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

BENCHMARKS := accounting_speed noise_speed server_round seeded_speed engine_speed partial_training attack_speed pir run_checks
PEERS := $(if $(wildcard .peers),peers)# their first run installs 2.5 GB

bench: $(READY)  ## time everything (20 minutes, on a quiet machine)
	@for name in $(BENCHMARKS) $(PEERS); do echo "$$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/ratios.py

wheel-check: $(READY)  ## build the wheel, install it in a clean environment, run it
	$(BIN)/pytest -q -m slow tests/test_wheel.py

clean:  ## remove what the other commands made
	rm -rf $(VENV) mutants build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache
