PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# EXTRAS=test,everything also installs what takes long: browser, harness, fine-tuning ... (see setup.cfg)
EXTRAS ?= test
INSTALLED := $(VENV)/installed-$(EXTRAS)

.PHONY: train test install lint clean

train: install  ## Train the quickstart: about 1.7M parameters on Python's own standard library, minutes on two CPU cores
	$(BIN)/python train_accelerate.py

test: install  ## Run all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: install
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

install: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; make PYTHON=python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) runs data
