PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup check test slow bench hydra14 clean

setup: ## create .venv with the project and its development tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'

check: ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## every check and the default tests
	$(BIN)/python -m pytest -n 2

slow: ## the long checks
	$(BIN)/python -m pytest -m slow

hydra14: ## the command and sweep tests on Hydra's pre-release
	$(PYTHON) -m venv .venv14
	.venv14/bin/pip install --quiet -e '.[dev]'
	.venv14/bin/pip install --quiet --pre hydra-core==1.4.0rc3
	.venv14/bin/python -m pytest tests/test_cli.py tests/test_sweep_cli.py tests/test_sweep_branches.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
