# `make demo` and `make test` need Python >= 3.11 with its venv module, and nothing else.
# The environment is made once, in .venv; PYTHON=... chooses another interpreter for it.

.PHONY: help demo demo-real test test-room test-slow test-all coverage faults report-check findings docs slurm env clean
.DELETE_ON_ERROR:
# What is given on the command line is for this make, not for one that its tests run.
MAKEOVERRIDES :=
unexport PYTHON PYTHONS
# Without bytecode on disk every process of the tests would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/installed
PYTHONS := python3.13 python3.12 python3.11 python3
# Asked by running it: a name on PATH may be a shim without an interpreter behind it.
USABLE := import sys, venv, ensurepip; assert sys.version_info >= (3, 11)

help:
	@echo "make demo      study the bundled models; ends with the path of the report"
	@echo "make demo-real  the same of a ViT-S/14 and two CNNs on photographs, which it downloads (130 MB)"
	@echo "make test      ruff, mypy, lint-imports, pytest without the tests marked slow"
	@echo "make test-room ROOM=analyses/knn  the fast tests of one room (docs/tests.md)"
	@echo "make test-all  the same and the slow tests: many processes, training, packaging"
	@echo "make coverage  the tests again, with the lines that none of them reaches"
	@echo "make faults    processes killed, disks full, bits flipped, servers failing: many trials of each"
	@echo "make report-check  the report and explore's page in a headless Chromium, where there is one"
	@echo "make findings  docs/findings.md: what the papers found, on the demo's models"
	@echo "make docs      the site, offline: docs-out/html/index.html"
	@echo "make slurm     a planned job array, and a Dask cluster, on a real SLURM of one node"
	@echo "make env       only set up .venv"
	@echo "make clean     remove .venv, demo-out/, real-out/ and caches"

demo: $(STAMP)
	$(BIN)/vitsee demo --quick

# Some ten minutes. The command prints each package with its size and licence; naming it agrees.
demo-real: $(STAMP)
	$(BIN)/python -c 'import onnx' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,real]'
	$(BIN)/vitsee demo --real --yes -o real-out

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not slow" --numprocesses=auto --maxprocesses=4

test-slow: $(STAMP)
	$(BIN)/pytest -m slow --numprocesses=auto --maxprocesses=4

# The fast tests of one room, as docs/tests.md lists them: make test-room ROOM=analyses/knn
test-room: $(STAMP)
	files=$$($(BIN)/python tools/room_tests.py "$(ROOM)") && $(BIN)/pytest -m "not slow" $$files

test-all: test test-slow

coverage: $(STAMP)
	$(BIN)/pytest --numprocesses=auto --maxprocesses=4 --cov=vitsee_cli --cov=vitsee_core --cov=vitsee_stores --cov-report=term-missing:skip-covered

# Ten minutes: ten times the trials that the tests do; FAULTS=100 for an hour and a half.
FAULTS ?= 10
faults: $(STAMP)
	VITSEE_TRIALS=$(FAULTS) $(BIN)/pytest tests/faults tests/test_dask.py tests/test_dask_extract.py -m fault --numprocesses=auto --maxprocesses=4

report-check: $(STAMP)
	$(BIN)/pytest -rs tests/test_report_browser.py tests/test_explore_browser.py

# Some ten minutes.
findings: $(STAMP)
	$(BIN)/python tools/findings_measure.py findings-out
	$(BIN)/python tools/findings.py

docs: $(STAMP)
	$(BIN)/python tools/docs_source.py docs-out/source
	$(BIN)/sphinx-build -q -W --keep-going docs-out/source docs-out/html
	@echo "docs-out/html/index.html"

# Some minutes: tasks run into their time limit and wait for their turn again.
slurm: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/slurm_on_one_node.sh tools/slurm_trial.sh
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/slurm_on_one_node.sh python tools/slurm_dask.py

env: $(STAMP)

$(STAMP): pyproject.toml
	@set -e; rm -f $@; found=; \
	if ! $(BIN)/python -c '$(USABLE)' 2>/dev/null; then \
	  for python in $(or $(PYTHON),$(PYTHONS)); do \
	    if "$$python" -c '$(USABLE)' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "no usable Python among: $(or $(PYTHON),$(PYTHONS)); vitsee needs Python >= 3.11 with venv (Debian: apt install python3-venv), or name one: make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "making .venv with $$("$$found" --version)"; \
	  "$$found" -m venv --clear .venv; \
	fi; \
	echo "installing vitsee and its tools into .venv (torch alone is several GB: some minutes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; \
	touch $@

clean:
	rm -rf .venv demo-out real-out docs-out findings-out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
