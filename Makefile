# Everything runs in .venv, which `make install` makes and keeps up to date. `make PYTHON=/path/to/python` chooses Python.
PYTHON ?=
export PYTHON
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install quickstart test unit integration lint format lock clean

help: ## list what make can do
	@awk -F ': .*## ' '/^[a-z]+:.* ## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: ## make .venv (idempotent)
	@bash scripts/install.sh

quickstart: install ## the whole pipeline on this machine's CPU, in minutes
	.venv/bin/forebay run profiles/quickstart_cpu.yaml

test: unit integration ## all tests

unit: install ## fast tests, no servers
	.venv/bin/python -m pytest tests/unit

integration: install ## tests with real servers
	.venv/bin/python -m pytest tests/integration

lint: install ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: install ## let ruff repair style and layout
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

lock: ## resolve requirements/cpu.lock afresh
	@bash scripts/lock.sh

clean: ## remove .venv and caches; runs/ and .forebay/ stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
