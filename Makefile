# Two commands set up everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TRAIN_READY := .venv/.ready-train
# For machines where pip's own indexes lack the CPU build of torch.
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup setup-train demo test test-all check bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	index=; $(BIN)/pip install --quiet --dry-run --no-deps '$(TORCH)' >/dev/null 2>&1 \
	  || index='--extra-index-url $(TORCH_CPU_INDEX)'; \
	  $(BIN)/pip install --quiet $$index -c constraints.txt '$(TORCH)' -e '.[cpu,dev]'
	# PyPI's builds of these do not load beside this torch, and transformers imports them when it finds them.
	$(BIN)/pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $(READY)

# Training of drafters. speculators asks for torchaudio and torchvision, which it does not use here.
$(TRAIN_READY): $(READY)
	$(BIN)/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(BIN)/pip install --quiet --only-binary :all: loguru multiprocess 'datasets<=5.1.0'
	touch $(TRAIN_READY)

setup-train: $(TRAIN_READY)

demo: setup
	$(BIN)/rlspec demo

test: setup
	$(BIN)/python -m pytest -m 'not slow'

test-all: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf .venv build *.egg-info
