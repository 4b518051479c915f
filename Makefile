# make train, make test: a .venv is made first if there is none. PYTHON=python3.12 make test chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: train test drill lint format system-packages clean

train: $(VENV)/.train
	$(BIN)/drumline train $(ARGS)

test: $(VENV)/.dev system-packages lint
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS) || BIN=$(BIN) tests/once-more $$? $(ARGS)
	PYTHON=$(CURDIR)/$(BIN)/python tests/without-tools

drill: $(VENV)/.train
	$(BIN)/drumline drill --minutes 10 $(ARGS)

system-packages:
	@tests/system-packages

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/draw_architecture.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.train

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
