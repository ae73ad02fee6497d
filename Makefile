# Two commands get a newcomer there: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# torch goes first and by exact version: a range would let another package pull a second, larger build.
# On a Linux machine without an NVIDIA card, TORCH_PIP_ARGS can name PyTorch's own index of CPU wheels.
TORCH          ?= torch==2.13.0
TORCH_PIP_ARGS ?=

.PHONY: demo tiny test check install clean

# Distils the teacher in the box on two CPU cores and writes runs/demo/report.html.
demo: install
	rm -rf runs/demo
	$(BIN)/wandistiller distill --config examples/demo.toml
	$(BIN)/wandistiller report --config examples/demo.toml

# Trains the teacher in the box again, on a GPU, and puts it into the package.
tiny: install
	$(BIN)/python scripts/make_tiny.py --output runs/tiny --graphs --install

test: check
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=30

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "WanDistiller needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "Setting up $(VENV) (once; a few minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(TORCH_PIP_ARGS) $(TORCH)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
