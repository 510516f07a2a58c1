# The chores of the project, one target each: `make help` lists them.
#
# An environment is made from nothing when its pinned versions change, and left alone otherwise: .venv*/.made says that it
# was created, .demo and .full what was installed into it, .horovod that Horovod was built for it.

PYTHON ?= python3
export PYTHON
export TF_CPP_MIN_LOG_LEVEL ?= 2

BIN := .venv/bin
ENVIRONMENTS := .venv .venv-tf215 .venv-mpich
SHELL_SCRIPTS := $(wildcard scripts/*.sh) .ci/run
HOROVOD_SCRIPTS := scripts/build_horovod.sh scripts/horovod_compile.sh scripts/horovod_probe.py

.DELETE_ON_ERROR:
.PHONY: help demo test test-only lint lint-ruff lint-format lint-mypy lint-shell format bench bench-envs bench-mpich bench-intel bench-torch envs horovod clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.demo ## train on two ranks with real data, from nothing in a few minutes, without a compiler
	.venv/bin/hvdxrun -np 2 .venv/bin/python examples/keras_digits.py

test: envs horovod ## make the environments, build Horovod, lint, and run all tests plain and under MPI
	@$(PYTHON) scripts/run_tests.py

test-only: .venv/.full ## run the tests of .venv with one process (ARGS="..." goes to pytest)
	$(BIN)/python -m pytest tests $(ARGS)

lint: lint-ruff lint-format lint-mypy lint-shell ## ruff, mypy and shellcheck

lint-ruff: .venv/.full
	$(BIN)/ruff check .

lint-format: .venv/.full
	$(BIN)/ruff format --check .

lint-mypy: .venv/.full
	$(BIN)/mypy
	$(BIN)/mypy scripts/*.py
	$(BIN)/mypy -p benchmarks

lint-shell: .venv/.full
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

format: .venv/.full ## let ruff put the code in its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.full .venv/.horovod ## measure hvdx against whatever is installed, in ten minutes (ARGS="--help" shows more)
	$(BIN)/python -m benchmarks $(ARGS)

bench-envs: bench-mpich bench-intel bench-torch ## install what bench can compare with: Horovod on MPICH and Intel MPI, PyTorch

bench-mpich: .venv-mpich/.horovod

bench-intel: .venv-mpich/.horovod .venv-mpich/.intel

bench-torch: .venv-torch/.torch

envs: $(ENVIRONMENTS:%=%/.full) ## make the environments

horovod: .venv/.horovod .venv-tf215/.horovod ## build Horovod for .venv and .venv-tf215

clean: ## remove the environments and whatever was made
	rm -rf $(ENVIRONMENTS) .venv-torch build dist demo-output benchmarks/results .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made: constraints/tf221.txt
.venv-tf215/.made: constraints/tf215.txt
.venv-mpich/.made: constraints/tf221.txt constraints/mpich.txt
%/.made: scripts/make_env.sh
	@echo "making the environment $* with $(PYTHON)"
	@bash scripts/make_env.sh create $*
	@touch $@

# What is installed for the developers contains what the demo needs.
.venv/.demo: .venv/.made pyproject.toml
	@test -e .venv/.full || { echo "installing hvdx and TensorFlow" && bash scripts/make_env.sh demo .venv; }
	@touch $@

%/.full: %/.made pyproject.toml
	@echo "installing the pinned versions into $*"
	@bash scripts/make_env.sh full $*
	@touch $@

%/.horovod: %/.full $(HOROVOD_SCRIPTS)
	@PIP_CONSTRAINT=$*/pins.txt scripts/build_horovod.sh --python $*/bin/python
	@touch $@

# In a folder of its own: the library has the same name as MPICH's.
.venv-mpich/.intel: .venv-mpich/.full constraints/intel.txt
	@.venv-mpich/bin/python -m pip install -qq --disable-pip-version-check --ignore-installed \
		--prefix .venv-mpich/intel-mpi --requirement constraints/intel.txt
	@touch $@

.venv-torch/.torch: constraints/torch.txt scripts/make_env.sh
	@bash scripts/make_env.sh create .venv-torch
	@.venv-torch/bin/python -m pip install -qq --disable-pip-version-check --requirement constraints/torch.txt
	@touch $@
