# `make demo` and `make test` set everything up themselves, on a machine with Python 3.10 or later and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_FOR_DOCS := $(VENV)/.ready-for-docs
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Packages are installed without bytecode, which takes half a minute of a processor. Python keeps what it
# compiles of them when it first imports it, unless this variable forbids it.
unexport PYTHONDONTWRITEBYTECODE

SECONDS ?= 60
FUZZ = -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(SUBJECT),--subject $(SUBJECT))

.PHONY: demo docs tables test test-extended test-all test-builds test-cards test-gpu test-package test-versions fuzz fuzz-gpu lint bench \
	bench-trained clean

demo: $(READY)  ## train a small language model twice, with and without lowtide, and compare (about three minutes, once it is set up)
	$(BIN)/lowtide train --loss both

test: $(READY)  ## tests with each value of their parameters; without a GPU kernels run through Triton's interpreter
	$(PYTEST) -m 'not extended and not every_build'

test-extended: $(READY)  ## what make test leaves out: the other combinations of parameters, and what takes long
	$(PYTEST) -m 'extended and not every_build'

test-all: $(READY)  ## both, collected and imported once
	$(PYTEST) -m 'not every_build'

docs: $(READY_FOR_DOCS)  ## this site into docs/_build/html, without network; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@touch docs/_build/html/.built
	@echo "open docs/_build/html/index.html"

tables: $(READY)  ## the tables of docs/ and the pictures of ratios, from benchmarks/*.csv and the code
	for name in heads attention_real; do test ! -e benchmarks/h200/$$name.csv || \
		$(BIN)/python -m lowtide bench draw benchmarks/h200/$$name.csv --out docs/pictures/$$name.png || exit; done
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/_extensions/page_tables.py

test-builds: $(READY)  ## compiles every kernel ahead of time that the tests leave to the builds beside it
	$(PYTEST) -m every_build tests/ops/*/test_kernels_compile.py tests/ops/*/*/test_kernels_compile.py

test-gpu:  ## the tests that need a CUDA device, with the torch of the current environment
	$(PYTHON) -m pytest -m gpu

test-cards:  ## those of them whose ranks have a card each, joined by NCCL: on two cards, or with more cases on four
	$(PYTHON) -m pytest -m several_cards

test-package: $(READY)  ## sdist and wheel, and the contract on the installed wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/environments.py package

test-versions: $(READY)  ## the contract on each torch with each Python; ONLY=3.10:2.9 runs one of them
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/environments.py versions $(if $(ONLY),--only $(ONLY))

fuzz: $(READY)  ## random calls of everything against float64, for SECONDS; SEED and SUBJECT choose which
	$(BIN)/python $(FUZZ)

fuzz-gpu:  ## the same on a CUDA device, with the torch of the current environment
	$(PYTHON) $(FUZZ) --device cuda

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench:  ## on the device at hand, with the torch and the peers of the current environment
	$(PYTHON) -m lowtide bench linear-cross-entropy

bench-trained:  ## the same on the head of a model that is trained first, in about a minute on an H200
	$(PYTHON) -m lowtide train --steps 300 --out runs/head
	$(PYTHON) -m lowtide bench linear-cross-entropy --logits trained --checkpoint runs/head --csv runs/head/trained.csv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

$(READY_FOR_DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $(READY_FOR_DOCS)

clean:
	rm -rf $(VENV) runs docs/_build
