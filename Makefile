# Everything happens in .venv, made on first use. PyTorch is installed by name before anything that depends on it:
# otherwise pip takes a build with several gigabytes of CUDA libraries.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint fast bench size clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready-dev lint
	$(BIN)/python -m pytest

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/size.py

# The tests without the default model and without a download.
fast: .venv/ready-dev
	$(BIN)/python -m pytest -m "not model"

bench: .venv/ready-dev
	$(BIN)/python benchmarks/compare.py

.venv/torch:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	touch $@

.venv/ready: .venv/torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
