# Needs make and Python >= 3.11 with venv and pip; every target first installs what it needs into $(VENV).
#   make test PYTHON=python3.12 VENV=.venv-3.12     another Python beside the first
#   make test-gpu VENV_FLAGS=--system-site-packages   keep the torch that the machine has

VENV ?= .venv
VENV_FLAGS ?=
# The first Python that is new enough; given as PYTHON=... it is taken as it is.
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
endif
# An installation belongs to one Python and to one place: both are in the stamp's name, so a change of either
# installs anew, and otherwise nothing is done until pyproject.toml or the constraints change.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
STAMP := $(VENV)/.installed-$(VERSION)-$(firstword $(shell printf '%s' '$(CURDIR)' | cksum))
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check test-gpu wheel clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## Install everything into $(VENV); nothing to do if it is up to date

demo: $(STAMP) ## Calibrate, crash with SIGKILL in mid-round, restore: the whole story on this machine
	@rm -rf .demo
	@$(BIN)/python -m residency.demo_story --journal .demo/journal.db

test: $(STAMP) ## Run all tests that need no GPU
	@$(BIN)/pytest --durations=10

check: $(STAMP) ## Lint, format, types (mypy and pyright), architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pytest -q tests/test_architecture.py

test-gpu: $(STAMP) ## Run the tests that need a CUDA device
	@$(BIN)/pytest -m gpu --durations=10

wheel: $(STAMP) ## Build the wheel, install it into a clean environment, run it outside the checkout
	rm -rf build dist
	$(BIN)/python -m build --wheel
	rm -rf build/clean && $(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install -qq -c constraints.txt dist/*.whl
	cd / && '$(CURDIR)/build/clean/bin/residency' --help

clean: ## Remove what the targets made, except the environment
	rm -rf build dist .demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(VERSION)' || { echo 'error: no Python >= 3.11 found; name one with PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python $(VERSION) is too old; 3.11 is needed")'
	@# Another Python, or a checkout that has moved: the scripts of the environment would point elsewhere.
	@if test -e $(VENV)/pyvenv.cfg; then \
		grep -q '^version = $(VERSION)' $(VENV)/pyvenv.cfg && grep -q "^command = .*$$PWD/" $(VENV)/pyvenv.cfg \
		|| { echo 'making $(VENV) anew for Python $(VERSION) in $(CURDIR)'; rm -rf $(VENV); }; fi
	@echo 'installing into $(VENV) for Python $(VERSION); the first time takes minutes'
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@# A torch that is already there (system site packages) stays if it satisfies the range.
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi \
		> $(VENV)/constraints.txt
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25'
	@$(BIN)/python -m pip install -qq -c $(VENV)/constraints.txt -e '.[dev,diffusers,http,postgresql]'
	@touch $@
