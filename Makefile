# Two commands from a fresh clone: `make demo` and `make test`. They need Python 3.11+, pip and make, no compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
INSTALL := $(PIP) install --quiet --no-build-isolation -c $(VENV)/constraints.txt
# One thread per worker: on few cores the tests gain more from running side by side than from threads inside each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The oldest Triton that is supported, in a folder of its own that comes before the environment: no second torch.
OLDEST := $(VENV)/triton36

.PHONY: help demo test slow programs triton36 upstream ring lint format lock clean

help:
	@echo "make demo      set up $(VENV) and run 'onchip demo' (about a minute)"
	@echo "make test      set up $(VENV) and run the tests"
	@echo "make slow      run the tests marked slow"
	@echo "make programs  train and run programs of others on onchip: Trainer and TRL of Hugging Face, and more"
	@echo "make triton36  interpret and cross-compile the GPU kernels with Triton 3.6, the oldest supported"
	@echo "make upstream  run transformers' own tests of attention with ours: TRANSFORMERS=a clone of its repository"
	@echo "make ring      run ring-flash-attention's own scripts with ours: RING=a clone of its repository"
	@echo "make lint      ruff (lint, format) and basedpyright"
	@echo "make format    let ruff rewrite the files"
	@echo "make lock      write constraints-hashed.txt from constraints.txt and the hashes of the package index"
	@echo "make clean     remove $(VENV) and what tools left behind"

demo: $(VENV)/.run
	@$(BIN)/onchip demo $(DEMO)

test: $(VENV)/.test
	@$(PYTEST) -m "not slow and not programs" $(TEST)

# ALL=1: every variant of the Hopper kernels, not every second one. 5: nothing of TEST is of that kind.
slow: $(VENV)/.test
	@$(PYTEST) -m "slow and not alone $(if $(ALL),,and not all)" $(TEST) || [ $$? = 5 ]
	@$(PYTEST) -n 0 -m "slow and alone" $(TEST) || [ $$? = 5 ]

# Starts processes of its own, which share the cores with nothing else.
programs: $(VENV)/.programs
	@$(PYTEST) -n 0 -m programs tests/programs $(TEST)

# Attention interpreted, portable kernels compiled, Hopper kernels in the variants of `make test`. ALL=1: all kernels
# interpreted, all variants compiled (13 minutes more).
PORTABLE := tests/kernels/triton$(if $(ALL),,/test_compile.py tests/kernels/triton/test_interpreted.py)
triton36: $(OLDEST)/.done
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not gpu and not hopper" $(PORTABLE) tests/kernels/runtime/test_launcher_triton.py $(TEST) || [ $$? = 5 ]
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not gpu and not hopper $(if $(ALL),,and not slow)" tests/kernels/hopper $(TEST) || [ $$? = 5 ]

upstream: $(VENV)/.upstream
	@OMP_NUM_THREADS=1 $(BIN)/python tests/integrations/upstream.py "$(TRANSFORMERS)" $(TEST)

ring: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/programs/ring_flash_attention.py "$(RING)" $(TEST)

lint: $(VENV)/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet --diff .
	@$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

lock: $(VENV)/.test
	@$(BIN)/python tests/lock.py

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis onchip-demo.html
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# If $(PYTHON) has a torch that fits (2.11 or later), the environment sees what $(PYTHON) sees, and the pins hold for
# what is missing there only. Otherwise it is closed and every package is pinned. pip runs from outside, so that a
# Python without ensurepip will do.
define FITS
from importlib.metadata import version
assert tuple(int(x) for x in version("torch").split(".")[:2]) >= (2, 11)
print(version("torch"))
endef
define SEE
import sys
print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")
endef
export FITS SEE

$(VENV)/constraints.txt: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "onchip needs Python 3.11 or later: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv --clear --without-pip $(VENV)
	@if torch=$$($(PYTHON) -c "$$FITS" 2>/dev/null); then \
		echo "Using the torch that is installed: $$torch"; \
		$(PYTHON) -c "$$SEE" > $$(echo $(VENV)/lib/python3*/site-packages)/installed.pth; \
		$(PIP) list --format=freeze | awk -F== \
			'FILENAME == "-" { gsub("_", "-", $$1); have[tolower($$1)]; next } !($$1 in have)' \
			- constraints.txt > $@ && echo "torch==$$torch" >> $@; \
	else \
		cp constraints.txt $@; \
	fi

$(VENV)/.run: $(VENV)/constraints.txt
	@echo "Installing onchip into $(VENV) (the first time takes a minute or two) ..."
	@$(INSTALL) "setuptools>=78.1.1" && $(INSTALL) -e . && touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing the test tools ..."
	@$(INSTALL) -e ".[test]" && touch $@

$(OLDEST)/.done: $(VENV)/.test constraints-triton36.txt
	@echo "Installing Triton 3.6 beside it ..."
	@rm -rf $(OLDEST) && $(PIP) install --quiet --no-deps --target $(OLDEST) -r constraints-triton36.txt && touch $@

$(VENV)/.upstream: $(VENV)/.test
	@echo "Installing what transformers' tests import ..."
	@$(INSTALL) -e ".[upstream]" && touch $@

$(VENV)/.programs: $(VENV)/.test
	@echo "Installing programs of others ..."
	@$(INSTALL) -e ".[programs]" && touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "Installing the linters ..."
	@$(INSTALL) -e ".[dev]" && touch $@
