# `make demo` shows what upriver does, `make test` checks everything. Both need only Python >= 3.11 and make:
# the rest is installed into .venv, with the versions of constraints.txt.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FUZZ_SECONDS ?= 60
FUZZERS := frames value bulk
PURE := src/upriver/errors.py src/upriver/model.py src/upriver/wire src/upriver/protocol src/upriver/cli/wire_print.py

.PHONY: help demo test lint unit unit-spark unit-sync unit-node unit-others doctest bench fuzz chaos chaos-store chaos-spark soak install
.PHONY: attacks fuzz-live nightly quick coverage hooks system-packages clean

help:
	@echo "make demo         the whole pipeline on this machine"
	@echo "make test         ruff, mypy, import rules, every test, every example in the documents"
	@echo "make quick        the inner loop: lint and the tests that need no process, in a minute"
	@echo "make lint         ruff, mypy and import rules only"
	@echo "make hooks        run lint before every commit"
	@echo "make coverage     which lines no test reaches; an HTML report in .coverage-html"
	@echo "make nightly      properties on new examples, 20 times as many; FACTOR=n"
	@echo "make bench        benchmark tables; TABLE=wire for one of them"
	@echo "make fuzz         each fuzzer for FUZZ_SECONDS (60)"
	@echo "make chaos        a cluster under fire; SEED=n MINUTES=m"
	@echo "make chaos-spark  a streaming query under fire; SEED=n MINUTES=m"
	@echo "make chaos-store  the store killed at 200 instants, and 5 million documents within their quota"
	@echo "make fuzz-live    FRAMES (10000000) fuzzed frames over live sessions with a node"
	@echo "make attacks      what an innocent client notices while a node is attacked"
	@echo "make soak         random clients against one node for an hour"
	@echo "make clean        remove .venv and everything that was built"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "upriver needs Python 3.11 or later; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark,connect,metrics,srv,capture,dev]'
	@touch $@

install: $(INSTALLED)

demo: install
	@$(BIN)/upriver demo

test: install system-packages lint doctest unit

# What needs no process, no socket and no Spark, on all cores. `make test` is what decides.
QUICK := tests/wire tests/protocol tests/records tests/test_files.py tests/test_house.py tests/test_citations.py

quick: install lint
	$(BIN)/pytest --quiet -n auto -m "not slow" $(QUICK)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

doctest: install
	$(BIN)/pytest --quiet --doctest-modules $(PURE)

# In four processes: each of them waits for other processes and for disks half of the time.
unit: install
	@$(MAKE) --no-print-directory -j4 unit-spark unit-node unit-others unit-sync

unit-spark: install
	$(BIN)/pytest --quiet tests/spark --ignore=tests/spark/sync

unit-sync: install
	$(BIN)/pytest --quiet tests/spark/sync

unit-node: install
	$(BIN)/pytest --quiet tests/node tests/cluster

unit-others: install
	$(BIN)/pytest --quiet --ignore=tests/spark --ignore=tests/node --ignore=tests/cluster

# Properties on new examples in every run, and FACTOR times as many of them as `make test` tries.
nightly: install
	UPRIVER_EXAMPLES_FACTOR=$(or $(FACTOR),20) $(BIN)/pytest --quiet -n auto --timeout=3600 --hypothesis-profile=nightly -m "not spark"

coverage: install
	$(BIN)/pytest --quiet -n auto --ignore=tests/spark --cov=upriver --cov-branch --cov-report=html:.coverage-html --cov-report=term:skip-covered

hooks: install
	$(BIN)/pre-commit install

bench: install
	@for table in $(or $(TABLE:%=bench/%.py),$(wildcard bench/*.py)); do $(BIN)/python $$table || exit 1; done

fuzz: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris || \
	{ echo "make fuzz needs atheris, which has no build for this machine (it has for CPython on Linux x86-64)"; exit 1; }
	@for fuzzer in $(FUZZERS); do echo "== $$fuzzer, $(FUZZ_SECONDS) s"; \
	$(BIN)/python fuzz/run.py $$fuzzer $(FUZZ_SECONDS) 2>&1 | tail -n 3; \
	test "$${PIPESTATUS[0]}" -eq 0 || { echo "$$fuzzer failed; its input is in .fuzz/"; exit 1; }; done

# Longer runs of what `make test` does briefly.
chaos-store: install
	UPRIVER_CRASHES=$(or $(CRASHES),200) UPRIVER_MEMORY_DOCUMENTS=5000000 $(BIN)/pytest --quiet --timeout=3600 tests/store

chaos: install
	$(BIN)/python -m tests.cluster.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

chaos-spark: install
	$(BIN)/python -m tests.spark.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

soak: install
	$(BIN)/python -m tests.node.soak $(or $(SOAK_SECONDS),3600)

fuzz-live: install
	$(BIN)/python -m tests.node.live_fuzz $(or $(FRAMES),10000000) $(or $(SEED),1)

attacks: install
	$(BIN)/python -m tests.node.attacks $(or $(SECONDS_EACH),8)

# Clients of other people that the node is tested against; without them those tests are skipped, and say so.
system-packages:
	@if command -v memcapable >/dev/null || command -v memccapable >/dev/null; then :; \
	elif command -v apt-get >/dev/null && test "$$(id -u)" -eq 0; then \
	echo "installing libmemcached-tools"; { apt-get -qq update; apt-get install -qq -y libmemcached-tools; } >/dev/null || \
	echo "libmemcached-tools could not be installed: the tests that use it are skipped"; \
	else echo "libmemcached-tools is missing (apt-get install libmemcached-tools): the tests that use it are skipped"; fi

clean:
	rm -rf $(VENV) .fuzz .demo .coverage .coverage-html .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
