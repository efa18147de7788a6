PYTHON ?= python3
VENV ?= .venv
# The release that the tests were last run with; TORCH=torch takes the newest one.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: setup check test slow bench hydra14 clean

setup: ## create .venv with the project and its development tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH)'
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

bench: ## every ratio of docs/performance.md; needs a quiet machine (or: --threads 1)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
