# Every target sets up what it needs; a second call sets nothing up again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps

.PHONY: setup demo test check format lock clean
setup: $(READY)

$(READY): requirements/cpu.txt requirements/torch.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ebbtide needs Python 3.11 or newer; this is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up $(VENV) (once; some minutes)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements/torch.txt 2>/dev/null || \
		$(PIP) --index-url $(TORCH_INDEX) --timeout 15 --retries 1 -r requirements/torch.txt
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) --no-build-isolation --editable .
	@touch $@

demo: $(READY)
	@$(BIN)/ebbtide demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .ebbtide build dist *.egg-info
