# The commands of the project; each installs first, and an install that is up to date takes no time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.DELETE_ON_ERROR:
.PHONY: install quickstart test lint benchmarks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Gyre needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

quickstart: install
	$(BIN)/gyre train --config examples/quickstart.yaml

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

benchmarks: install
	for benchmark in benchmarks/*.py; do echo "$$benchmark"; $(BIN)/python "$$benchmark" || exit 1; done

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
