# make test    sets up and runs every check that must hold
# make study   sets up and runs the main job on built-in data: prints its table, writes pictures to results/
# Both work from a fresh clone and set up only once; `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := torch==2.13.0
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PEERS  := .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check --quiet
PACKAGE := .venv-package
PACKAGE_PIP := $(PACKAGE)/bin/python -m pip --disable-pip-version-check --quiet
ENGINES := .venv-engines
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet
DOCS   := .venv-docs
DOCS_PIP := $(DOCS)/bin/python -m pip --disable-pip-version-check --quiet
LOWEST := .venv-lowest
LOWEST_PIP := $(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet
# what users call without an extra, and what the tests of that need
CORE_TESTS := adam calibration copies crossfit encoding evidence extrapolation features files formula lazy_imports lengths \
	members metrics model module patterns posterior prediction recursion regressor settings stack statistics training unseen

.PHONY: help test coverage test-browser test-engines test-lowest test-package docstrings docs release study study-20 study-spring study-mpc picture terminal recipe lint mutants \
	bench-core bench-bo bench-fit bench-small bench-outside bench-observe bench-peers bench-uci bench-predict bench-control bench-imports bench-scale bench-online \
	lock clean

help:
	@echo "make test        lint, types, layers, tests"
	@echo "make study       the main job on built-in data: table, pictures"
	@echo "make study-20    the same over 20 initialisations"
	@echo "make study-spring  learned dynamics of three discs on springs (docs/control.md)"
	@echo "make study-mpc   predictive control of a reactor with a learned model (docs/control.md)"
	@echo "make test-browser  the report in headless Chromium (installs it by apt if it may)"
	@echo "make test-engines  predictions by a local Ray and a local Spark (needs Java)"
	@echo "make test-package  wheel and sdist, installed into an empty environment and used"
	@echo "make test-lowest  the core tests with the lowest versions that pyproject.toml allows"
	@echo "make coverage    make test, with the lines that no test runs"
	@echo "make docstrings  docstrings of what docs/reference shows, checked by numpydoc"
	@echo "make release     every check that a release needs; wheel and sdist in dist/"
	@echo "make docs        the documentation, its notebook run: build/docs/index.html"
	@echo "make terminal    docs/learn/terminal.md: what the commands print on the pump table"
	@echo "make recipe      the paper's own recipe beside its printed figures"
	@echo "make mutants     wrong formulas, each of which some test must catch"
	@echo "make bench-core  speed of mathematics and training, as ratios in one run"
	@echo "make bench-imports  what importing lastlayer adds to importing torch"
	@echo "make bench-peers lines, seconds and scores beside vbll and laplace-torch"
	@echo "make bench-fit   cost and scores of a default fit against rows, beside four peers: hours (docs/benchmarks.md)"
	@echo "make bench-small  small, wide and copied tables: promised and achieved LPD, coverage (docs/honesty.md)"
	@echo "make bench-outside  coverage, LPD and CRPS as points leave the data, beside three peers: ten minutes (docs/honesty.md)"
	@echo "make bench-observe  missing targets and energies from gradients, beside the ways around them and a Gaussian process"
	@echo "make bench-predict  a million rows through lastlayer predict: rows per second, memory"
	@echo "make bench-control  what uncertainty costs in CasADi, beside the bare network's mean"
	@echo "make bench-scale mini-batches against the MSE, memory, statistics pass, two processes (docs/scale.md)"
	@echo "make bench-online  a row learned as it comes, beside river, scikit-learn's incremental regressors and the floor"
	@echo "make bench-uci DATA=folder  tables of yours, standard splits: lastlayer beside ten peers (docs/uci.md)"
	@echo "make bench-bo    Bayesian optimisation beside BoTorch's models: hours on one core (docs/bo.md)"
	@echo "make lock        pin the present environment in requirements.lock"
	@echo "make clean       remove environments and caches"

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15 $(COVERAGE)

# cheap where Python can tell which lines run (3.12 and later); in 3.11 tests take about 40% longer
coverage: $(READY)
	COVERAGE_CORE=$$($(BIN)/python -c "import sys; print('sysmon' if sys.version_info >= (3, 12) else 'ctrace')") \
		$(MAKE) test COVERAGE="--cov=lastlayer --cov-report=term"

docstrings: $(READY)
	$(BIN)/python tests/docstrings.py $(ARGS)

study: $(READY)
	$(BIN)/lastlayer study

study-20: $(READY)
	$(BIN)/lastlayer study --seeds 20 --out results/20

study-spring: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control_studies.spring --out results/spring

study-mpc: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control_studies.mpc --out results/mpc

picture: $(READY)
	$(BIN)/python -m benchmarks.readme_picture --out results
	cp results/prediction.png docs/prediction.png

# what the commands print on the pump table; with Chromium, the picture of the report too
terminal: $(READY)
	$(BIN)/python -m benchmarks.terminal

recipe: $(READY)
	$(BIN)/python -m benchmarks.paper_recipe

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/docstrings.py --count

test-browser: $(READY)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; }
	$(BIN)/python -m pytest -m browser

test-engines: $(ENGINES)/.ready
	@command -v java >/dev/null || { echo "Spark needs Java 17 or later: install it first"; exit 2; }
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m engines tests/engines

# an empty environment and no lock but for the versions: what the wheel asks for must be enough
test-package: $(READY)
	rm -rf dist $(PACKAGE)
	$(BIN)/python -m hatchling build -d dist
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE_PIP) install $(TORCH)
	$(PACKAGE_PIP) install --constraint requirements.lock dist/lastlayer-*.whl
	cd $(PACKAGE) && bin/python -W error ../tests/installed.py
	$(PACKAGE_PIP) install --constraint requirements.lock "$$(ls dist/lastlayer-*.whl)[cli]"
	cd $(PACKAGE) && bin/python -W error ../tests/installed.py --cli

# torch as everywhere else: the CPU build of its lowest version is not on every index; pytest of the time of that scikit-learn
test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist loadfile $(CORE_TESTS:%=tests/test_%.py)

$(LOWEST)/.ready: pyproject.toml tests/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST_PIP) install $(TORCH)
	$(LOWEST_PIP) install $$($(PYTHON) tests/lowest.py) pandas==2.2.1 scoringrules==0.8 pytest==8.0 pytest-xdist==3.6.1 \
		beartype==0.20 hypothesis==6.100 mpmath==1.3 editables hatchling
	$(LOWEST_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

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

bench-core: $(READY)
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.members
	$(MAKE) bench-peers

bench-small: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.small_tables --out results/promises.png $(ARGS)

# one function: make bench-outside ARGS="--functions sine --seeds 2"
bench-outside: $(PEERS)/.ready
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m benchmarks.outside --out results/outside.png $(ARGS)

# a shorter try: make bench-observe ARGS="--quick --seeds 1"
bench-observe: $(PEERS)/.ready
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m benchmarks.observe --out results/observe $(ARGS)

bench-control: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.control

bench-online: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.online $(ARGS)

bench-predict: $(READY)
	$(BIN)/python -m benchmarks.predict_stream

bench-peers: $(PEERS)/.ready
	$(PEERS)/bin/python -m benchmarks.peers

# what is done is kept in results/fit.jsonl: an interrupted run goes on, ARGS=--again starts anew, ARGS="--rows 300,1000
# --methods lastlayer,CatBoost" does a part
bench-fit: $(PEERS)/.ready
	$(PEERS)/bin/python -m benchmarks.fit $(ARGS)
	cp results/fit.png docs/fit.png

# ARGS="epochs --rows 100000" runs one section on fewer rows; the peers' environment has vbll and GPyTorch
bench-scale: $(PEERS)/.ready
	$(PEERS)/bin/python -m benchmarks.scale $(ARGS)

# options of the command go into ARGS, such as ARGS="--methods ours --sets yacht"
bench-uci: $(PEERS)/.ready
	@test -n "$(DATA)" || { echo "give the folder of the tables: make bench-uci DATA=path (docs/uci.md)"; exit 2; }
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m benchmarks.uci --data "$(DATA)" $(ARGS)

# options of the command go into ARGS, such as ARGS="--processes 16" or ARGS="--steps 3 --seeds 1"
bench-bo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bo $(ARGS)

bench-imports: $(READY)
	$(BIN)/python -m benchmarks.imports

# all of it every time, since pages that are not built anew give no warnings, and warnings are errors; nothing is fetched
# while it builds, and the pages need nothing from outside either
docs: $(DOCS)/.ready
	OMP_NUM_THREADS=1 $(DOCS)/bin/python -m sphinx -W --keep-going -E -a -b html docs build/docs
	@echo "open build/docs/index.html"

$(DOCS)/.ready: requirements.lock requirements-docs.lock pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS_PIP) install $(TORCH)
	$(DOCS_PIP) install --no-deps -r requirements.lock -r requirements-docs.lock
	$(DOCS_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# Ray and Spark have an environment of their own
$(ENGINES)/.ready: requirements-engines.lock pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) install $(TORCH)
	$(ENGINES_PIP) install --no-deps -r requirements-engines.lock
	$(ENGINES_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# peers have an environment of their own; --no-deps because some of them would pull the CUDA build of torch
$(PEERS)/.ready: requirements-peers.lock
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) install $(TORCH)
	$(PEERS_PIP) install --no-deps -r requirements-peers.lock
	$(PEERS_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# torch first and pinned: a range would pull the CUDA build and gigabytes with it
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

lock:
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch > requirements.lock

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
