PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup check test slow bench clean

setup: ## create .venv with the project and its development tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'

check: ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check ## every check and the default tests
	$(BIN)/python -m pytest

slow: ## the long checks
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
