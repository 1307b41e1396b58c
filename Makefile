# Two commands from a fresh clone: `make demo` and `make test`. They need Python 3.11+, pip and make, no compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
INSTALL := $(PIP) install --quiet --no-build-isolation -c $(VENV)/constraints.txt
# One thread per worker: on few cores the tests gain more from running side by side than from threads inside each.
# worksteal: each worker runs whole files in order, which share their fixtures, until it takes over tests of the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Triton's interpreter runs the tests marked `interpreted`: it cannot share a process with Triton's compiler.
INTERPRET := TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST)
# Hypothesis draws a fifth of the examples, and all of them in `make test-all`.
QUICK := --hypothesis-profile quick
# DURATIONS=folder: each run of pytest writes there how long its tests took.
durations = $(if $(DURATIONS),--durations-file $(DURATIONS)/$(1).json)
# Exit status 5: TEST selects no test of this run, but may select some of the next.
NONE := || [ $$? = 5 ]

# The oldest Triton that is supported, in a folder of its own that comes before the environment: no second torch.
OLDEST := $(VENV)/triton36

.PHONY: help demo test test-extras test-all slow ci-setup programs triton36 upstream ring lint style types format lock clean

help:
	@echo "make demo         set up $(VENV) and run 'onchip demo' (about a minute)"
	@echo "make test         set up $(VENV) and run the tests of the package (under 8 minutes on 2 slow cores)"
	@echo "make test-extras  run the tests of benchmarks, examples, papers and the lab"
	@echo "make slow         run the tests marked slow, and the variants that make test leaves out"
	@echo "make test-all     test, test-extras and slow in one run, as .ci/run does"
	@echo "make programs     train and run programs of others on onchip: Trainer and TRL of Hugging Face, and more"
	@echo "make triton36     interpret and cross-compile the GPU kernels with Triton 3.6, the oldest supported"
	@echo "make upstream     run transformers' own tests of attention with ours: TRANSFORMERS=a clone of its repository"
	@echo "make ring         run ring-flash-attention's own scripts with ours: RING=a clone of its repository"
	@echo "make lint         ruff (make style) and basedpyright (make types)"
	@echo "make format       let ruff rewrite the files"
	@echo "make lock         write constraints-hashed.txt from constraints.txt and the hashes of the package index"
	@echo "make clean        remove $(VENV) and what tools left behind"

demo: $(VENV)/.run
	@$(BIN)/onchip demo $(DEMO)

test: $(VENV)/.test
	@$(PYTEST) -m "not (slow or grid or extras or programs or interpreted)" $(QUICK) $(call durations,test) $(TEST) $(NONE)
	@$(INTERPRET) -m "not (slow or grid or extras)" $(QUICK) $(call durations,test-interpreted) $(TEST) $(NONE)

test-extras: $(VENV)/.test
	@$(PYTEST) -m "extras and not (slow or grid or interpreted)" $(QUICK) $(call durations,extras) $(TEST) $(NONE)
	@$(INTERPRET) -m "extras and not (slow or grid)" $(QUICK) $(call durations,extras-interpreted) $(TEST) $(NONE)

# ALL=1: every variant of the Hopper kernels, not every second one.
REST := (slow and (alone$(if $(ALL),, or all)))
slow: $(VENV)/.test
	@$(PYTEST) -m "(slow or grid) and not (interpreted or $(REST))" $(call durations,slow) $(TEST) $(NONE)
	@$(INTERPRET) -m "slow or grid" $(call durations,slow-interpreted) $(TEST) $(NONE)
	@$(ALONE)

# Tests of speed, with nothing running beside them. Only their files are collected.
ALONE = $(PYTEST) -n 0 -m "slow and alone" $(call durations,slow-alone) \
	$(or $(TEST),$$(grep -rl --include="test_*.py" "mark\.alone" tests)) $(NONE)

# What test, test-extras and slow run, with one collection instead of three.
test-all: $(VENV)/.test
	@$(PYTEST) -m "not (programs or interpreted or $(REST))" $(call durations,all) $(TEST) $(NONE)
	@$(INTERPRET) $(call durations,all-interpreted) $(TEST) $(NONE)
	@$(ALONE)

# Starts processes of its own, which share the cores with nothing else.
programs: $(VENV)/.programs
	@$(PYTEST) -n 0 -m programs tests/programs $(call durations,programs) $(TEST)

# Attention interpreted, portable kernels compiled, Hopper kernels in the variants of `make test`. ALL=1: all kernels
# interpreted, all variants compiled (13 minutes more).
PORTABLE := tests/kernels/triton
triton36: $(OLDEST)/.done
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not (gpu or hopper or interpreted)" $(PORTABLE)$(if $(ALL),,/test_compile.py) \
		tests/kernels/test_handles_triton.py $(call durations,triton36) $(TEST) $(NONE)
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not (gpu or hopper $(if $(ALL),,or slow))" tests/kernels/hopper \
		$(call durations,triton36-hopper) $(TEST) $(NONE)
	@PYTHONPATH=$(OLDEST) $(INTERPRET) $(PORTABLE)$(if $(ALL),,/test_interpreted.py) \
		$(call durations,triton36-interpreted) $(TEST) $(NONE)

upstream: $(VENV)/.upstream
	@OMP_NUM_THREADS=1 $(BIN)/python tests/adapters/upstream.py "$(TRANSFORMERS)" $(TEST)

ring: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/programs/ring_flash_attention.py "$(RING)" $(TEST)

lint: style types

style: $(VENV)/.dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet --diff .

types: $(VENV)/.dev
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

# Everything that .ci/run needs, in one installation instead of three.
ci-setup: $(VENV)/.run
	@echo "Installing the test tools, programs of others and the linters ..."
	@$(INSTALL) -e ".[programs,dev]" && touch $(VENV)/.test $(VENV)/.programs $(VENV)/.dev
