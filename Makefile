# make test    sets up and runs every check that must hold
# make study   sets up and runs the main job on built-in data: prints its table, writes pictures to results/
# Both work from a fresh clone and set up only once; `make help` lists the rest.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
TORCH  := torch==2.13.0
pip     = $(1)/bin/python -m pip --disable-pip-version-check --quiet install
# what the other environments hold, beside torch and the package; --no-deps where something would pull the CUDA build of torch
HOLDS_docs    = --no-deps -r requirements.lock -r requirements-docs.lock
HOLDS_engines = --no-deps -r requirements-engines.lock
HOLDS_peers   = --no-deps -r requirements-peers.lock
HOLDS_package = --constraint requirements.lock dist/lastlayer-*.whl
HOLDS_lowest  = $$($(PYTHON) tests/lowest.py) pandas==2.2.1 scoringrules==0.8 pytest==8.0 pytest-xdist==3.6.1 \
	beartype==0.20 hypothesis==6.100 mpmath==1.3 editables hatchling
# what users call without an extra, and what the tests of that need
CORE_TESTS := adam calibration copies crossfit encoding evidence extrapolation features files formula lazy_imports lengths \
	members metrics model module posterior prediction recursion regressor settings stack statistics training unseen
# benchmarks in the environment of the peers, and those that take their number of threads as an option
WITH_PEERS := exactness fit likelihoods observe outside peers scale uci
THREADS    := core fit imports peers predict scale training

.PHONY: help test coverage lint study study-20 test-browser test-engines test-lowest test-package docs release mutants lock clean
.SECONDARY:
.SECONDEXPANSION:

help:
	@echo "make test        lint, types, layers, tests"
	@echo "make coverage    the same, with the lines that no test runs"
	@echo "make study       the main job on built-in data: table, pictures"
	@echo "make study-20    the same over 20 initialisations"
	@echo "make study-spring, make study-mpc  learned dynamics and predictive control (docs/control.md)"
	@echo "make bench-NAME ARGS=...  a benchmark; python -m benchmarks lists their names"
	@echo "make docs        the documentation, its notebook run: build/docs/index.html"
	@echo "make test-browser  the report in headless Chromium (installs it by apt if it may)"
	@echo "make test-engines  predictions by a local Ray and a local Spark (needs Java)"
	@echo "make test-package  wheel and sdist, installed into an empty environment and used"
	@echo "make test-lowest  the core tests with the lowest versions that pyproject.toml allows"
	@echo "make mutants     wrong formulas, each of which some test must catch"
	@echo "make release     every check that a release needs; wheel and sdist in dist/"
	@echo "make lock        pin the present environment in requirements.lock"
	@echo "make clean       remove environments and caches"

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15 $(COVERAGE)

# cheap where Python can tell which lines run (3.12 and later); in 3.11 tests take about 40% longer
coverage: $(READY)
	COVERAGE_CORE=$$($(BIN)/python -c "import sys; print('sysmon' if sys.version_info >= (3, 12) else 'ctrace')") \
		$(MAKE) test COVERAGE="--cov=lastlayer --cov-report=term"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/docstrings.py --count

study: $(READY)
	$(BIN)/lastlayer study

study-20: $(READY)
	$(BIN)/lastlayer study --seeds 20 --out results/20

study-%: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control_studies.$* $(ARGS)

# such as make bench-fit ARGS="--rows 300,1000 --methods lastlayer,NGBoost", or make bench-uci DATA=folder
bench-%: $$(if $$(filter $$*,$$(WITH_PEERS)),.venv-peers,.venv)/.ready
	$(if $(filter $*,$(THREADS)),,OMP_NUM_THREADS=1) $(<D)/bin/python -m benchmarks.$* $(if $(DATA),--data "$(DATA)") $(ARGS)

test-browser: $(READY)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; }
	$(BIN)/python -m pytest -m browser

test-engines: .venv-engines/.ready
	@command -v java >/dev/null || { echo "Spark needs Java 17 or later: install it first"; exit 2; }
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -m engines tests/engines

# torch as everywhere else: the CPU build of its lowest version is not on every index; pytest of the time of that scikit-learn
test-lowest: .venv-lowest/.ready
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS:%=tests/test_%.py)

# an empty environment and no lock but for the versions: what the wheel asks for must be enough
test-package: $(READY)
	rm -rf dist .venv-package
	$(BIN)/python -m hatchling build -d dist
	$(MAKE) .venv-package/.ready
	cd .venv-package && bin/python -W error ../tests/installed.py
	$(call pip,.venv-package) --constraint requirements.lock "$$(ls dist/lastlayer-*.whl)[cli]"
	cd .venv-package && bin/python -W error ../tests/installed.py --cli

# all of it every time, since pages that are not built anew give no warnings, and warnings are errors; nothing is fetched
# while it builds, and the pages need nothing from outside either
docs: .venv-docs/.ready
	OMP_NUM_THREADS=1 $(<D)/bin/python -m sphinx -W --keep-going -E -a -b html docs build/docs
	@echo "open build/docs/index.html"

# nothing is published here: a tag does that (CONTRIBUTING.md)
release: $(READY)
	$(BIN)/python tests/release.py ready
	$(MAKE) test
	$(MAKE) docs
	$(MAKE) test-package
	$(BIN)/python tests/release.py built dist
	@ls -l dist

mutants: $(READY)
	$(BIN)/python tests/mutants.py

# torch first and pinned: a range would pull the CUDA build and gigabytes with it
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(call pip,$(@D)) $(TORCH)
	$(call pip,$(@D)) -r requirements.lock
	$(call pip,$(@D)) --no-deps --no-build-isolation --editable .
	@touch $@

.venv-%/.ready: pyproject.toml $$(wildcard requirements-$$*.lock)
	$(PYTHON) -m venv $(@D)
	$(call pip,$(@D)) $(TORCH)
	$(call pip,$(@D)) $(HOLDS_$*)
	$(if $(filter package,$*),,$(call pip,$(@D)) --no-deps --no-build-isolation --editable .)
	@touch $@

lock:
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch > requirements.lock

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
