# make quickstart   a fresh machine with Python 3.11: installs, trains stock and sliced, compares
# make test         a fresh machine with Python 3.11: installs, runs all tests
# TORCH_INDEX=URL   where pip finds a CPU build of torch, if not at your usual index
# make lint         formatting, lint and types

PYTHON ?= python3.11
VENV := .venv
# The launcher and DeepSpeed's compiled helpers look for programs of the environment on PATH.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1

INSTALLED := $(VENV)/.installed

.PHONY: quickstart test lint
quickstart: export PYTHONWARNINGS ?= ignore
quickstart: $(INSTALLED)
	deepspeed --num_gpus 2 --master_port $$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])") \
		examples/pretrain_gpt.py --deepspeed_config configs/quickstart.json

test: $(INSTALLED) lint
	python -m pytest

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy

$(INSTALLED): pyproject.toml configs/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	pip install --quiet --constraint configs/constraints-cpu.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	pip install --quiet --constraint configs/constraints-cpu.txt --editable ".[plot,test]"
	touch $@
