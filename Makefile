# Every target sets up what it needs. `make` or `make help` lists them.

VENV   := .venv
PYTHON := $(VENV)/bin/python
# pytest caches the tests' rewritten assertions. Without the cache each worker rewrites them, eight seconds of CPU time.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup pythons criu demo test check test-wide mutants test-chaos bench bench-chaos bench-gpu simulate-sharing test-gpu install uninstall deb man completions docs pictures lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything that the other targets need (they call this themselves)
	@tools/setup.sh dev

pythons: ## fetch the oldest and the newest Python that the agent is tested in, into build/pythons
	@tools/pythons.sh

criu: ## unpack a CRIU that works into build/criu, for the tests that dump and restore real processes
	@test -x build/criu/bin/criu || contrib/criu/install.sh --prefix build/criu

demo: ## start a simulated node with a few processes and look at it
	@tools/setup.sh run
	@$(PYTHON) contrib/demo/demo.py
	@$(PYTHON) contrib/demo/moving.py
	@$(PYTHON) -m contrib.demo.sharing
	@$(PYTHON) -m contrib.demo.recovering

# Two workers more than processors, because tests wait for two fifths of their time: on two processors four workers took
# 664 s, and three 705 s. WORKERS= runs one test after the other.
WORKERS := -n $(shell echo $$(( $$(nproc) < 3 ? $$(nproc) + 2 : 4 ))) --dist loadgroup

# Other folders have no quick test, so pytest need not collect them.
QUICK := tests/house tests/contract tests/simulation tests/unit

check: ## the quick part of the tests: house rules, unit, contract, simulation; `make test` has the longer ones
	@tools/setup.sh dev
	@$(COMPILE)
	$(PYTEST) $(QUICK) -m "not e2e and not gpu and not bench and not wide and not thorough" -q $(WORKERS)

# The tests start a thousand Python processes that write no bytecode. Without this, each would compile all its imports,
# 0.3 s of a daemon's 0.6 s.
COMPILE := $(PYTHON) -m compileall -q hegm hegmd client

# The downloads from Debian need no CPU time, so they run while packages are installed.
test: ## all tests but those that need a GPU; end to end ones and a real systemd included
	@{ tools/pythons.sh || echo "make: continuing with the Pythons of this machine"; \
		$(MAKE) --no-print-directory criu || echo "make: continuing with the CRIU of this machine, if there is one"; } & \
		tools/prometheus.sh & \
		tools/slurm.sh & \
		tools/setup.sh full; status=$$?; wait; exit $$status
	@$(COMPILE)
	$(PYTEST) -m "not gpu and not bench and not wide" -ra $(WORKERS)

test-wide: ## the cells that `make test` leaves out because others run the same code
	@tools/setup.sh full
	@tools/pythons.sh --torch || echo "make: continuing without PyTorch for CPython 3.14"
	@tools/torches.sh 2.4.1 2.8.0 || echo "make: continuing without other releases of PyTorch"
	$(PYTEST) -m "wide and not gpu and not bench" -ra $(WORKERS)

mutants: ## make one small change of the product at a time, and check that a test notices (MUTANTS="--seed 7 --count 50 --only pool")
	@tools/setup.sh dev
	@$(PYTHON) tools/mutants.py $(MUTANTS)

test-chaos: ## kill or strike everything at every state of every command, 2,000 times, while jobs train (CHAOS="--victim daemon")
	@tools/setup.sh full
	@$(PYTHON) -m tests.chaos $(CHAOS)

# A GPU machine may have no network, and torch in a Python of its own, which then needs pytest, pytest-timeout, psutil and
# hegmd's dependencies: `make test-gpu PYTHON=python3` sets nothing up.
SET_UP_FOR_GPU = $(if $(filter file,$(origin PYTHON)),@tools/setup.sh dev)

# With STATE=FOLDER each of the two continues where it was cut. BUDGET_S= limits its seconds.
IN_TURN = @PYTHONPATH=.:client $(PYTHON) -m tests.gpu.in_turn
CUT = $(if $(STATE),--state $(STATE)) $(if $(BUDGET_S),--budget-s $(BUDGET_S)) $(if $(ONLY),--only $(ONLY))

test-gpu: ## the tests that need real GPUs (PYTHON=python3: with a Python that has torch; CASES="--quick", IMAGES="--sizes 1")
	$(SET_UP_FOR_GPU)
	$(IN_TURN) test $(CUT) $(if $(CASES),-- moves $(CASES)) $(if $(IMAGES),-- images $(IMAGES))

bench: ## the benchmarks without a GPU, beside their budgets
	@tools/setup.sh dev
	@$(PYTHON) -m tests.bench
	@if [ -d build/hegm-0.3.3 ]; then $(PYTHON) -m tests.bench.restarts; fi

bench-chaos: ## 100,000 seeded lives of the migration machine, and every damage to a journal (SEEDS=N FIRST=N)
	@tools/setup.sh dev
	@$(PYTHON) -m tests.simulation.damage
	@$(PYTHON) -m tests.simulation.chaos $(or $(SEEDS),100000) $(or $(FIRST),0)

simulate-sharing: ## run the sharing policy on 1,000 jobs in simulated time, beside FIFO and no sharing (SIMULATE="--seed 2"; --record, then `make pictures`)
	@tools/setup.sh dev
	@$(PYTHON) -m tools.sharing $(SIMULATE)

bench-gpu: ## measure on this machine's GPUs, and compare with nvidia-smi (PYTHON=python3: with one that has torch; BENCH=--quick, IMAGES="--sizes 1")
	$(SET_UP_FOR_GPU)
	$(IN_TURN) bench $(CUT) $(if $(BENCH),-- moves $(BENCH)) $(if $(IMAGES),-- images $(IMAGES))

install: man completions ## install under PREFIX (/usr/local) with its own venv and systemd units; DESTDIR is honoured
	@packaging/install.sh

uninstall: ## remove the files of `make install`
	@packaging/uninstall.sh

deb: man completions ## build dist/hegmd_VERSION_ARCH.deb
	@packaging/deb.sh

man: ## write the manual pages, from the parsers, to build/man
	@tools/setup.sh dev
	@$(PYTHON) -m tools.docs.hegmctl man build/man

completions: ## write the shell completions, from the parsers, to build/completions
	@tools/setup.sh dev
	@$(PYTHON) -m tools.docs.hegmctl completions build/completions

docs: ## write the generated documents again, from the code
	@tools/setup.sh dev
	@$(PYTHON) -m tools.docs.reference
	@$(PYTHON) tools/vectors.py docs/protocol-vectors
	@$(PYTHON) -m tools.docs.hegmctl json docs/json.md
	@$(PYTHON) -m tools.docs.hegmctl stub client/hegmctl/library.pyi
	@$(PYTHON) -m tools.docs.settings
	@$(PYTHON) -m tools.docs.states
	@$(PYTHON) -m tools.docs.recovery
	@$(PYTHON) -m tools.pictures.tables

pictures: ## draw the pictures of the documents again, from docs/measurements and the code (RECORD=1: record the demo first)
	@tools/setup.sh dev
	@$(PYTHON) -c "import matplotlib" 2>/dev/null || $(PYTHON) -m pip install --quiet --editable '.[pictures]'
	$(if $(RECORD),@$(PYTHON) -m tools.pictures.record && $(PYTHON) -m tools.pictures.views)
	@$(PYTHON) -m tools.pictures

lint: ## formatter, linter, spelling and both type checkers
	@tools/setup.sh dev
	$(PYTEST) tests/house -n auto -q

format: ## format the code and fix what the linter can
	@tools/setup.sh dev
	$(PYTHON) -m ruff check --fix-only --quiet .
	$(PYTHON) -m ruff format .

clean: ## remove built files and caches; keeps .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/stubs/build
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
