# `make help` lists the targets. Each installs what it needs into $(VENV) first, once.

PYTHON ?= python3
VENV ?= .venv
# Arguments for pytest, for example: make test PYTEST_ARGS='tests/test_norms.py -k batch'
PYTEST_ARGS ?=
# Arguments for the matrix, for example: make matrix MATRIX_ARGS='--only timm/swin'
MATRIX_ARGS ?=
# Two worker processes with one thread each: the tests work on small tensors, where a second
# thread costs more than it saves, and the machines that check this project have two cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

# An installation is known by its extras and a checksum of pyproject.toml. The stamp is written
# last, so an installation that was interrupted is done again.
SUM := $(shell cksum < pyproject.toml | tr ' ' '-')
DEV := $(VENV)/.sigmanens-lab,dev-$(SUM)
LAB := $(firstword $(wildcard $(DEV)) $(VENV)/.sigmanens-lab-$(SUM))
# The checkout that the environment's editable installation points at.
SOURCE := $(VENV)/.sigmanens-source
# There while the environment is being made; if it is still there afterwards, start over.
UNFINISHED := $(VENV)/.sigmanens-unfinished

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test slow matrix docs lint types contract clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'
	@echo
	@echo "  VENV=DIR uses another environment, PYTHON=python3.12 another interpreter to make it."

demo: $(LAB) ## show a σN-Ens on real data in two minutes; writes runs/demo/report.html
	@$(POINT_HERE)
	@out=runs/demo; n=2; \
	while [ -e "$$out" ]; do out=runs/demo-$$n; n=$$((n + 1)); done; \
	$(BIN)/sigmanens demo --out "$$out" && echo "The report is in $$out/report.html"

test: $(DEV) ## run the tests
	@$(POINT_HERE)
	@$(PYTEST) $(PYTEST_ARGS)

slow: $(DEV) ## run the tests that make test leaves out: kills, resumed runs, large networks
	@$(POINT_HERE)
	@$(PYTEST) -m slow $(PYTEST_ARGS)

matrix: $(DEV) ## run every network of docs/compatibility.md and write it anew; an hour
	@$(POINT_HERE)
	@OMP_NUM_THREADS=1 $(BIN)/python docs/make_compatibility.py --workers 2 $(MATRIX_ARGS)

docs: $(DEV) ## build the documentation site in build/site; a broken link is an error
	@$(POINT_HERE)
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

lint: $(DEV) ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV) ## check types
	@$(POINT_HERE)
	@$(BIN)/mypy

contract: $(DEV) ## check the direction of imports
	@$(POINT_HERE)
	@$(BIN)/lint-imports --no-logo

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Shell text: make the environment import this checkout, if it was installed from another one.
define POINT_HERE
if [ "$$(cat $(SOURCE) 2>/dev/null)" != "$(CURDIR)" ]; then \
	$(PIP) install --no-deps --editable . && echo "$(CURDIR)" > $(SOURCE); \
fi
endef

# Shell text: stop with a helpful line unless $(PYTHON) can run this project.
define CHECK_PYTHON
if ! command -v $(PYTHON) >/dev/null 2>&1; then \
	echo "$(PYTHON) was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; \
elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	echo "sigmanens needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name a newer one: make PYTHON=/path/to/python3.12" >&2; exit 1; \
fi
endef

$(VENV)/.sigmanens-%-$(SUM):
	@if [ -e $(UNFINISHED) ]; then rm -rf $(VENV); fi
	@if [ ! -x $(BIN)/python ]; then \
		$(CHECK_PYTHON); \
		mkdir -p $(VENV) && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); \
	fi
	@echo "Installing sigmanens[$*] into $(VENV): torch is large, this can take some minutes."
	@$(PIP) install --editable '.[$*]'
	@echo "$(CURDIR)" > $(SOURCE)
	@rm -f $(UNFINISHED)
	@touch $@
