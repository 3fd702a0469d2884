PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# EXTRAS=test,everything also installs the large extras: browser tests, lm-evaluation-harness, fine-tuning ... (see setup.cfg)
EXTRAS ?= test
INSTALLED := $(VENV)/installed-$(EXTRAS)

# The CUDA build of the pinned torch. `===` compares version strings exactly, so that pip does not choose torch 2.13.0+cpu.
CUDA_TORCH ?= $(shell sed -n 's/^torch==/torch===/p' constraints.txt)
FAKE_CUDA := tests/fake_cuda/build
# What depends most on the versions of torch, Transformers and their dependencies
VERSION_TESTS := $(addprefix tests/test_,model.py loss.py step.py conversion.py native.py loading.py model_loading.py)

INNER_LOOP := $(addprefix tests/test_,batches.py data.py loss.py model.py optim.py store.py)

.PHONY: help train test test-fast test-fake-cuda test-versions test-minimum test-newest install lint clean

train: install  ## Train the quickstart: about 0.9M parameters on Python's standard library, minutes on two CPU cores
	$(BIN)/python train_accelerate.py

test: install  ## Run all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-fast: install  ## Test model, loss, optimizer, store and batches: about a minute on two cores
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(INNER_LOOP)

test-fake-cuda: $(FAKE_CUDA)/installed  ## Run the GPU path on a CUDA runtime that computes nothing: see tests/fake_cuda/README.md
	$(FAKE_CUDA)/venv/bin/python tests/fake_cuda/compile_runtime.py $(FAKE_CUDA)
	$(FAKE_CUDA)/venv/bin/python -m pytest --confcutdir tests/fake_cuda tests/fake_cuda/test_gpu_path.py

$(FAKE_CUDA)/installed: setup.cfg constraints.txt
	@echo "Installing $(CUDA_TORCH) with CUDA into $(FAKE_CUDA): 5.2 GB on disk, about 3 GB to download."
	test -d $(FAKE_CUDA)/venv || $(PYTHON) -m venv $(FAKE_CUDA)/venv
	$(FAKE_CUDA)/venv/bin/pip install -q -c constraints.txt -e . '$(CUDA_TORCH)' pytest
	$(FAKE_CUDA)/venv/bin/python -c 'import sys, torch; torch.version.cuda or sys.exit(f"{torch.__version__} is built without CUDA: name a CUDA build with make CUDA_TORCH=...")'
	touch $@

test-versions: test-minimum test-newest  ## Test with the minimum versions of setup.cfg and with the newest, in environments of their own

test-minimum: CONSTRAINTS := -c .venv-minimum/constraints.txt
test-minimum test-newest: test-%:
	@echo 'Installing into .venv-$*: about 5.6 GB on disk with PyTorch for CUDA.'
	test -d .venv-$* || $(PYTHON) -m venv .venv-$*
	sed -n '/^install_requires/,/^$$/s/^ *\([a-z0-9_]*\)>=\([0-9.]*\).*/\1==\2/p' setup.cfg > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -q --upgrade --upgrade-strategy eager $(CONSTRAINTS) -e . pytest
	.venv-$*/bin/python -m pip list
	.venv-$*/bin/python -m pytest $(VERSION_TESTS)

lint: install  ## Check the style of the code
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

help:  ## Show these lines
	@sed -n 's/^\([a-z-]*\):.*##  */\1  /p' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## Install into .venv

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or later is required, but {sys.prefix} has {sys.version.split()[0]}: delete this folder, and add PYTHON=python3.11 to the command.")'
	@echo 'Installing gpt2scratch[$(EXTRAS)] into $(abspath $(VENV)): PyTorch, Transformers and their dependencies.'
	@echo 'Disk space: about 1.7 GB with PyTorch for CPUs, about 5.6 GB with PyTorch for CUDA; the extra "everything" adds 0.6 GB.'
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-minimum .venv-newest $(FAKE_CUDA) runs data
