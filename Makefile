# make app    start Cutaway and print its address      make test   checks, types and every test that needs no GPU
# make lab    the notebooks in JupyterLab              make bench  what it costs and how fast it is (quiet machine, please)
# make model  fetch the default model only             make lint   checks and types only
# make clean  remove what was built here (the model stays in your cache)
# make gpu    on a CUDA machine: the kernels' tests, golden tokens and benchmarks, in a table and gpu.json (no .venv: PYTHON has torch)
#
# PORT=5007 another port. JOBS=1 fewer test processes than two. PYTHON=/path/to/python3.12 the Python to build .venv with.

PORT ?= 5006
# Processes that tests run in. Each computes with one thread (tests/conftest.py); a file stays together, in the order of conftest.py.
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
VENV ?= .venv
# The first of these that is Python 3.11 to 3.13 and can make a virtual environment is taken.
PYTHON ?= python3 python3.13 python3.12 python3.11
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt $(if $(CI),-qq)
# A browser opens by itself only where there is a screen for it.
SHOW := $(if $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname))),--show)
# Stamps: written only after the step has worked, so a failed install is tried again.
MADE := $(VENV)/.made
APP := $(VENV)/.installed-app
TEST := $(VENV)/.installed-test

# An environment whose Python has gone (a system upgrade, a moved folder) is made anew.
ifneq ($(wildcard $(MADE)),)
ifneq ($(shell $(PY) -c 'print("works")' 2>/dev/null),works)
$(shell rm -f $(MADE))
endif
endif

.PHONY: app test lab bench model lint browser gpu clean
.NOTPARALLEL:
.DEFAULT_GOAL := app

app: $(APP) model
	@$(PY) -c 'import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", int(sys.argv[1])))' \
		"$(PORT)" 2>/dev/null || { echo "Cannot listen on port $(PORT) (in use?). Try another: make app PORT=5007" >&2; exit 1; }
	@echo "Cutaway: http://127.0.0.1:$(PORT)/apps   (Ctrl-C stops it)"
	@exec $(PY) -m panel serve apps/ --address 127.0.0.1 --port $(PORT) $(SHOW) \
		--allow-websocket-origin 127.0.0.1:$(PORT) --allow-websocket-origin localhost:$(PORT)

test: lint browser model
	$(PY) -m pytest $(SIDE_BY_SIDE) $(if $(CI),--durations=40 -m "not long")

lint: $(TEST)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(TEST) model
	@for file in tests/bench/bench_*.py; do \
		name=$$(basename $$file .py); echo "== $$name"; $(PY) -m tests.bench.$$name || exit 1; \
	done

# Needs no network and nothing but Python, torch, Triton, numpy and pytest: the first of PYTHON that has torch is taken as it is.
# GPU="--seconds 300" (see python -m tests.gpu --help); CUTAWAY_CHECKPOINT=folder instead of random weights.
GPU ?=
gpu:
	@for name in $(PYTHON) $(PY); do \
		if "$$name" -c 'import torch, triton, pytest' 2>/dev/null; then exec "$$name" -m tests.gpu $(GPU); fi; \
	done; \
	echo "No Python with torch, triton and pytest among: $(PYTHON) $(PY). Name one: make gpu PYTHON=/path/to/python3.12" >&2; exit 1

lab: $(APP) model
	$(PY) -m jupyter lab notebooks/

model: $(APP)
	@$(PY) -m engine.model.store

browser: $(TEST)
	@$(PY) -m tests.browser --install

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis test-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@mkdir -p $(VENV); \
	fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	if $(PY) -c "$$fits" 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1; then touch $@; exit 0; fi; \
	found=; lacks=; \
	for name in $(PYTHON); do \
		"$$name" -c "$$fits" 2>/dev/null || continue; \
		if "$$name" -c 'import ensurepip, venv' 2>/dev/null; then found=$$name; break; fi; \
		lacks=$${lacks:-$$name}; \
	done; \
	if [ -n "$$found" ]; then \
		echo "Making $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV) && touch $@; \
	elif [ -n "$$lacks" ]; then \
		echo "$$lacks has no venv or no ensurepip. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	else \
		echo "No Python 3.11, 3.12 or 3.13 among: $(PYTHON). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi

$(APP): $(MADE) pyproject.toml constraints.txt
	@echo "Installing (the first time takes minutes: torch is large)"
	@$(PIP) -e .
	@touch $@

$(TEST): $(MADE) pyproject.toml constraints.txt
	@echo "Installing with the tests' tools (the first time takes minutes: torch is large)"
	@$(PIP) -e '.[test]'
	@touch $@ $(APP)
