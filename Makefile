# One file of commands; each does all of its own set-up. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs
RELEASE_READY := $(VENV)/.release
FLOWER := .flower
FLOWER_READY := $(FLOWER)/.ready
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit messages docs flower slow portable environments bench mutants dist wheel-check clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamped: runs again only when the requirements changed.
$(BASE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "privpart needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(READY): $(BASE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Flower's pins conflict with ours: its packages come first here, and the others from .venv.
$(FLOWER_READY): constraints-flower.txt $(READY)
	$(BIN)/python -m venv --clear --without-pip $(FLOWER)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' \
	  > "$$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-flower.txt
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(RELEASE_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

setup: $(READY)  ## make the virtual environment in .venv

demo: $(BASE)  ## train, account and audit on real data (about a minute on two cores); writes out/
	$(BIN)/privpart demo --out out

test: lint  ## lint, types and the fast tests, as CI runs them
	@$(MAKE) --no-print-directory --output-sync -j 2 types messages  # one process each
	@$(MAKE) --no-print-directory unit

lint: $(READY)  ## ruff and the import contracts between the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(READY)  ## mypy --strict on the three packages
	$(BIN)/mypy

unit: $(READY)  ## the fast tests
	$(BIN)/pytest -n 2 --dist worksteal -q

messages: $(FLOWER_READY)  ## the fast tests of Flower, over its own messages in one process
	$(FLOWER)/bin/python -m pytest -q tests/flower

docs: $(DOCS_READY)  ## build the site, run every cell of it, check its links; writes out/site (minutes)
	rm -rf out/site  # pages of modules that are gone
	$(BIN)/python -m sphinx -b html -W --keep-going -q -E -a -j 8 docs out/site
	$(BIN)/python docs/check.py out/site

flower: messages  ## install Flower; then a deployment with TLS on this machine, killed and resumed
	$(FLOWER)/bin/python -m pytest -q -m slow tests/flower/test_deployment.py

slow: $(READY) $(FLOWER_READY)  ## the tests that take minutes
	$(BIN)/pytest -n 2 -q -m slow
	$(FLOWER)/bin/python -m pytest -q -m slow tests/flower

NUMERICAL := tests/accounting tests/privpart tests/attacks
SETTINGS := $(foreach kind,default avx2 avx512,ATEN_CPU_CAPABILITY=$(kind)) DNNL_MAX_CPU_ISA=SSE41 \
  MKL_CBWR=COMPATIBLE $(foreach n,1 2 4,"OMP_NUM_THREADS=$(n) MKL_NUM_THREADS=$(n)")

portable: $(READY)  ## the numerical tests, rounded as on other processors and with 1, 2, 4 threads (hours)
	@failed=; for setting in $(SETTINGS); do \
	  echo "$$setting"; \
	  env $$setting $(BIN)/pytest -n 2 --dist worksteal -q $(NUMERICAL) || failed="$$failed, $$setting"; \
	done; test -z "$$failed" || { echo "failed with$${failed#,}"; exit 1; }

# Those of these that this machine has; `make PYTHONS=3.12 environments` for one. uv resolves: to the
# lowest versions that pyproject.toml allows and that have wheels for this Python, and to the highest.
# With pyenv, those that PYENV_VERSION lists, such as 3.11.7:3.12.1.
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(if $(shell python$(version) -V 2>/dev/null),$(version)))
ENVIRONMENTS := $(foreach version,$(PYTHONS),$(version)-lowest-direct $(version)-highest)
UV := $(BIN)/uv
.PHONY: $(ENVIRONMENTS)

environments: $(ENVIRONMENTS)  ## the fast tests with each Python here, lowest and newest dependencies (hours; -k: all)

$(ENVIRONMENTS): %: .environments/%/.ready
	.environments/$*/bin/python -m pytest -W default -n 2 --dist worksteal -q

$(UV): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[environments]'

.environments/%/.ready: pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --no-python-downloads --python $(firstword $(subst -, ,$*)) .environments/$*
	$(UV) pip compile --quiet --no-header --only-binary :all: --extra dev pyproject.toml -o .environments/$*/versions.txt \
	  --python .environments/$* --resolution $(patsubst $(firstword $(subst -, ,$*))-%,%,$*)
	$(UV) pip install --quiet --python .environments/$* -r .environments/$*/versions.txt --editable '.[dev]'
	@touch $@

mutants: $(READY)  ## break the accounting on purpose and list the mutants that no test notices (hours)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

BENCHMARKS := accounting_speed noise_speed server_round seeded_speed engine_speed short_job partial_training attack_speed pir run_checks
PEERS := $(if $(wildcard .peers),peers)# their first run installs 2.5 GB

bench: $(READY)  ## time everything (on a quiet machine)
	@for name in $(BENCHMARKS) $(PEERS); do echo "$$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/ratios.py

# SOURCE_DATE_EPOCH: the same tree gives the same bytes, whenever it is built.
dist: $(RELEASE_READY)  ## build wheel and sdist into dist/, with an SBOM of .venv and the hash of each
	@! grep -q example.org pyproject.toml || echo "note: example.org stands for the repository's address; see pyproject.toml"
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist .
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/sbom.json $(VENV)
	sed -i 's|file://$(CURDIR)|file:.|' dist/sbom.json  # no folder of this machine
	cd dist && sha256sum *.whl *.tar.gz sbom.json > SHA256SUMS

wheel-check: $(RELEASE_READY)  ## build and check wheel and sdist, install the wheel in a clean environment, run it
	$(BIN)/pytest -q -m slow tests/test_wheel.py

clean:  ## remove what the other commands made
	rm -rf $(VENV) $(FLOWER) .environments mutants build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache
