# From a fresh clone: `make demo` and `make test`. They need Python 3.11 or later, pip and make; no compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
INSTALL := $(PIP) install --quiet --no-build-isolation -c $(VENV)/constraints.txt
# One thread per worker: on few cores, two tests at a time are faster than two threads in one test.
# worksteal: each worker runs its half of the files in order, so that tests of a file share fixtures; a worker that is
# done takes tests from the other.
# Bytecode is written even if the environment forbids it: otherwise every worker rewrites the assertions of all tests,
# and every process that a test starts compiles onchip again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Runs the tests marked `interpreted`. Triton's interpreter and its compiler cannot share a process.
INTERPRET := TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST)
# Hypothesis draws a fifth of the examples. In `make slow` and `make test-all` it draws two fifths of those of slow
# tests and all of the others; with ALL=1 all of them.
QUICK := --hypothesis-profile quick
MOST := $(if $(ALL),,--hypothesis-profile ci)
# With DURATIONS=folder, each run of pytest writes the durations of its tests to a file in that folder.
durations = $(if $(DURATIONS),--durations-file=$(DURATIONS)/$(1).json)
# Exit status 5: TEST selects no test of this run. It may select tests of the next run.
NONE := || [ $$? = 5 ]

# The oldest supported Triton, in a folder that precedes the environment on the path: no second torch is needed.
OLDEST := $(VENV)/triton36

.PHONY: help demo test test-extras test-all slow ci-setup programs triton36 upstream ring docs lint style types format lock dist dist-check clean

help:
	@echo "make demo         set up $(VENV) and run 'onchip demo' (about a minute)"
	@echo "make test         set up $(VENV) and run the tests of the package (under 8 minutes on 2 slow cores)"
	@echo "make test-extras  run the tests of benchmarks, examples, papers and the lab"
	@echo "make slow         run the tests marked slow, and the variants that make test leaves out"
	@echo "make test-all     test, test-extras and slow in one run, as .ci/run does"
	@echo "make programs     train and run programs of other projects with onchip: Trainer and TRL of Hugging Face"
	@echo "make triton36     interpret and cross-compile the GPU kernels with Triton 3.6, the oldest supported"
	@echo "make upstream     run transformers' own tests of attention with onchip: TRANSFORMERS=a clone of its repository"
	@echo "make ring         run ring-flash-attention's own scripts with onchip: RING=a clone of its repository"
	@echo "make docs         build the documentation as a site, in site/"
	@echo "make lint         ruff (make style) and basedpyright (make types)"
	@echo "make format       rewrite the files with ruff"
	@echo "make lock         write constraints-hashed.txt from constraints.txt and the hashes of the package index"
	@echo "make dist         write the source distribution and the wheel to dist/"
	@echo "make dist-check   install the wheel, the source distribution and a clone into empty environments: PYTHONS=..."
	@echo "make clean        remove $(VENV) and the caches of tools"

demo: $(VENV)/.run
	@$(BIN)/onchip demo $(DEMO)

test: $(VENV)/.test
	@$(PYTEST) -m "not (slow or grid or extras or programs or interpreted)" $(QUICK) $(call durations,test) $(TEST) $(NONE)
	@$(INTERPRET) -m "not (slow or grid or extras)" $(QUICK) $(call durations,test-interpreted) $(TEST) $(NONE)

test-extras: $(VENV)/.test
	@$(PYTEST) -m "extras and not (slow or grid or interpreted)" $(QUICK) $(call durations,extras) $(TEST) $(NONE)
	@$(INTERPRET) -m "extras and not (slow or grid)" $(QUICK) $(call durations,extras-interpreted) $(TEST) $(NONE)

# ALL=1 runs the tests marked `all`: every variant of the kernels instead of every second one, longer random searches.
REST := (slow and (alone$(if $(ALL),, or all)))
slow: $(VENV)/.test
	@$(PYTEST) -m "(slow or grid) and not (interpreted or $(REST))" $(MOST) $(call durations,slow) $(TEST) $(NONE)
	@$(INTERPRET) -m "slow or grid" $(call durations,slow-interpreted) $(TEST) $(NONE)
	@$(ALONE)

# Measurements, with nothing running beside them. pytest collects only the files that have some.
ALONE = $(PYTEST) -n 0 -m "slow and alone" $(call durations,slow-alone) \
	$(or $(TEST),$$(grep -rl --include="test_*.py" "mark\.alone" tests)) $(NONE)

# The tests of `test`, `test-extras` and `slow`, collected once instead of three times.
test-all: $(VENV)/.test
	@$(PYTEST) -m "not (programs or interpreted or $(REST))" $(MOST) $(call durations,all) $(TEST) $(NONE)
	@$(INTERPRET) $(call durations,all-interpreted) $(TEST) $(NONE)
	@$(ALONE)

# One test at a time: some start two processes.
programs: $(VENV)/.programs
	@$(PYTEST) -n 0 -m programs tests/programs $(call durations,programs) $(TEST)

# Compiles the variants of the portable kernels that `make test-all` does not compile with the newest Triton, and the
# variants of all kernels that are not marked slow, and interprets attention. ALL=1 compiles all variants and interprets
# all kernels.
PORTABLE := tests/kernels/triton
triton36: $(OLDEST)/.done
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not (gpu or hopper or interpreted)$(if $(ALL),, and (not slow or all))" \
		$(PORTABLE)$(if $(ALL),,/test_compile.py $(PORTABLE)/test_score_mod_compile.py) \
		tests/kernels/runtime/test_launcher_triton.py $(call durations,triton36) $(TEST) $(NONE)
	@PYTHONPATH=$(OLDEST) $(PYTEST) -m "not (gpu or hopper $(if $(ALL),,or slow))" tests/kernels/hopper \
		$(call durations,triton36-hopper) $(TEST) $(NONE)
	@PYTHONPATH=$(OLDEST) $(INTERPRET) $(PORTABLE)$(if $(ALL),,/test_interpreted.py) \
		$(call durations,triton36-interpreted) $(TEST) $(NONE)

upstream: $(VENV)/.upstream
	@OMP_NUM_THREADS=1 $(BIN)/python tests/integrations/upstream.py "$(TRANSFORMERS)" $(TEST)

ring: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python tests/programs/ring_flash_attention.py "$(RING)" $(TEST)

# Without a network, and any warning fails. Open site/index.html, or serve the folder from anywhere.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict && echo "site/index.html"

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

# The wheel is built from the source distribution, so a file that is missing there fails here. Nothing is fetched.
dist: $(VENV)/.dev
	@rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist .

# One Python or several: make dist-check PYTHONS="python3.11 python3.13". pip fetches torch and setuptools.
PYTHONS ?= $(PYTHON)
dist-check: dist
	@$(BIN)/python tests/install.py $(PYTHONS)

clean:
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis onchip-demo.html
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# If $(PYTHON) has torch 2.11 or later, the environment includes the packages of $(PYTHON), and only missing packages
# are installed and pinned. Otherwise the environment is isolated and every package is pinned. pip runs from outside
# the environment, so that a Python without ensurepip works.
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
	@$(INSTALL) "setuptools>=78.1.1" && $(INSTALL) -e ".[cli]" && touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "Installing the test tools ..."
	@$(INSTALL) -e ".[test]" && touch $@

$(OLDEST)/.done: $(VENV)/.test constraints-triton36.txt
	@echo "Installing Triton 3.6 ..."
	@rm -rf $(OLDEST) && $(PIP) install --quiet --no-deps --target $(OLDEST) -r constraints-triton36.txt && touch $@

$(VENV)/.upstream: $(VENV)/.test
	@echo "Installing the packages that transformers' tests import ..."
	@$(INSTALL) -e ".[upstream]" && touch $@

$(VENV)/.programs: $(VENV)/.test
	@echo "Installing programs of other projects ..."
	@$(INSTALL) -e ".[programs]" && touch $@

$(VENV)/.docs: $(VENV)/.run
	@echo "Installing MkDocs ..."
	@$(INSTALL) -e ".[docs]" && touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "Installing the linters ..."
	@$(INSTALL) -e ".[dev]" && touch $@

# The packages that .ci/run needs, in one installation instead of three.
ci-setup: $(VENV)/.run
	@echo "Installing the test tools, programs of other projects and the linters ..."
	@$(INSTALL) -e ".[programs,dev]" && touch $(VENV)/.test $(VENV)/.programs $(VENV)/.docs $(VENV)/.dev
