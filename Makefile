# Everything a contributor runs. Each target makes the virtual environment first if it is missing or out of date.
PYTHON ?= python3
ARGS ?=
NAME ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all test-map bench programs test-gpu bench-gpu check format docs site-browser lab notebooks package address clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with everything below

# What the demo needs comes first: a first look installs no more than that.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make: Python 3.11 or newer is needed, $(PYTHON) is %d.%d; name another with make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(STAMP): $(DEMO)
	$(INSTALL) -e '.[dev]'
	touch $@

demo: $(DEMO) ## train a small language model with collectives, on demand and balanced, and compare; ARGS="--help"
	$(BIN)/lightning-odc demo $(ARGS)

test: $(STAMP) ## run the tests except the slow ones, two files at a time; ARGS="-k name" picks some, ARGS="-n 0" runs them one by one
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not slow" $(ARGS)

test-all: $(STAMP) ## run all tests; ARGS="-m slow" runs the slow ones alone
	$(BIN)/python -m pytest -n 2 --dist loadscope $(ARGS)

bench: $(STAMP) ## run an experiment of benchmarks/: NAME=harness, comm, emulate, sweep, planner, idle, nodes, memory, rl, traffic, robustness.faults ...; ARGS="--help"
	$(if $(NAME),,$(error make bench NAME=harness, planner, idle, nodes, memory, rl, traffic, robustness.faults, .endurance, .resume_trials or .stalls))
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

programs: $(STAMP) ## install programs of other people into build/programs, train each in one process, under "ddp" and "odc"; ARGS="--write"
	$(BIN)/python -m benchmarks.programs $(ARGS)

# A machine with GPUs usually has its own Python, with the torch that fits its driver: `make test-gpu PYTHON=python3`
# takes that one, and needs no .venv. Without PYTHON= it is the one in .venv.
GPU_PYTHON := $(if $(filter command line environment,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
GPU_STAMP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))

test-gpu: $(GPU_STAMP) ## run the tests that need a GPU, and keep what they say for the docs; PYTHON=python3 without .venv
	PY=$(GPU_PYTHON) bash tests/gpu/session.sh first tests

bench-gpu: $(GPU_STAMP) ## measure the CUDA transport and training on GPUs, for the docs; PYTHON=python3 without .venv
	PY=$(GPU_PYTHON) bash tests/gpu/session.sh bench train

test-map: $(STAMP) ## write docs/data/test_map.json: which tests run which file of the package; ARGS="tests/trial" takes only these, into build/
	rm -rf build/coverage
	-PYTHONPATH=. COVERAGE_CORE=ctrace $(BIN)/python -m coverage run -m pytest -n 2 --dist loadscope -m "not slow" $(ARGS)
	PYTHONPATH=. $(BIN)/python -m coverage combine -q
	PYTHONPATH=. $(BIN)/python -m tests.support.map $(if $(ARGS),build/test_map.json)

check: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.docs.site_check site

site-browser: docs ## open every page of site/ in a headless Chromium, if there is one; ARGS="DIR" keeps screenshots
	$(BIN)/python -m tests.docs.site_browser site $(ARGS)

lab: $(STAMP) ## open the notebooks in JupyterLab; ARGS="--no-browser" prints the address
	$(BIN)/jupyter lab notebooks $(ARGS)

notebooks: $(STAMP) ## run the notebooks into build/notebooks; ARGS="--write NAME" replaces a committed one
	$(BIN)/python notebooks/build.py $(ARGS)

package: $(STAMP) ## build the wheel and the sdist into dist/, and check what PyPI will show of them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

address: $(STAMP) ## write the address in pyproject.toml into the badges of README.md, CITATION.cff and the notebooks
	$(BIN)/python -m docs.website.address
	$(BIN)/python notebooks/build.py --text

clean: ## remove what builds, tests and runs leave behind
	rm -rf build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache lightning_logs checkpoints odc-demo odc-bench odc-hang-reports notebooks/runs notebooks/.ipynb_checkpoints
	find lightning_odc benchmarks tests notebooks docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)
