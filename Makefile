# natslog: `make help` lists what there is. Everything happens in .venv; only Python >= 3.11 and Java 17 or 21 are needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed, each level with the ones before: for the demo, for the tests, everything.
FOR_DEMO := $(VENV)/.for-demo
FOR_TESTS := $(VENV)/.for-tests
STAMP := $(VENV)/.installed
MACHINE ?= $(shell uname -m)
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help install dependencies console kernels check prepare test test-all test-extended affected size walks sim jetstream fuzz chaos soak bench notebooks site sbom wheel demo format clean jar java python

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(STAMP) kernels ## create .venv and install everything into it

dependencies: $(STAMP)

python:
	@command -v $(PYTHON) >/dev/null || { echo "natslog: $(PYTHON) was not found; install Python 3.11 or newer, or: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "natslog: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }

java:
	@version=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	case "$$version" in \
	  "") echo "natslog: no Java found; Spark needs Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless)" >&2; exit 1;; \
	  *) [ "$$version" -ge 17 ] || { echo "natslog: Java $$version is too old; Spark needs Java 17 or 21, found by JAVA_HOME or PATH" >&2; exit 1; };; \
	esac

define install # EXTRA LEVELS
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@NATSLOG_BUILT_LATER=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(1)]'
	@$(BIN)/python connector/jvm/build.py
	@$(BIN)/python console/build.py
	@touch $(2)
endef

$(FOR_DEMO): pyproject.toml | python
	$(call install,demo,$(FOR_DEMO))

$(FOR_TESTS): pyproject.toml | python
	$(call install,test,$(FOR_DEMO) $(FOR_TESTS))

$(STAMP): pyproject.toml | python
	$(call install,dev,$(FOR_DEMO) $(FOR_TESTS) $(STAMP))

jar: $(FOR_DEMO) ## the columnar reader for Spark (needs a JDK); `make install` builds it too
	@$(BIN)/python connector/jvm/build.py

console: $(FOR_DEMO) ## the libraries of the console in the browser (needs npm); `make install` copies them too
	@$(BIN)/python console/build.py

kernels: $(FOR_DEMO) ## the compiled kernels; `make install` compiles them too
	@$(BIN)/python broker/kernels/build.py

check: $(STAMP) ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=spark_jobs $(BIN)/mypy spark_jobs/*.py
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## write files as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

prepare: java $(FOR_TESTS) kernels ## what the tests need, which otherwise make it first
	@$(BIN)/python -m tests.phases prepare

NEEDED = $(if $(REPORT),$(FOR_TESTS),java $(FOR_TESTS) jar console kernels)

test: $(NEEDED) ## one short test of each kind, with real NATS and real Spark (ARGS="tests/unit -k recovery": plain pytest)
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(BIN)/python -m tests.phases $(if $(REPORT),report) test $(PHASES))

test-all: $(NEEDED) ## the long tests, which `make test` leaves out; PHASES="faults columnar" for some; REPORT=1: results
	@$(BIN)/python -m tests.phases $(if $(REPORT),report) test-all $(PHASES)

test-extended: $(NEEDED) ## before a release, in neither of both: other Sparks, new environments, repetitions
	@$(BIN)/python -m tests.phases $(if $(REPORT),report) test-extended $(PHASES)

affected: $(NEEDED) ## the long tests whose subject has changed: SINCE=commit; 15 minutes at most
	@$(BIN)/python -m $(if $(REPORT),tests.phases report affected,tests.affected $(SINCE))

size: $(STAMP) ## lines of product code by package and language
	@$(BIN)/python -m tests.size

walks: $(FOR_TESTS) kernels ## how many functions one request passes, in how many files: ARGS="--calls fetch" names them
	@$(BIN)/python -m tests.walks $(ARGS)

sim: $(FOR_TESTS) ## the pure cores under faults: SEEDS=2000 of them, or one, with its trace: SEED=7
	@$(BIN)/python -m tests.sim $(if $(SEED),$(SEED),--seeds $(or $(SEEDS),2000))

jetstream: $(FOR_TESTS) kernels ## the JetStream API beside a NATS server with JetStream: every answer compared
	@$(BIN)/python -m pytest tests/jetstream $(ARGS)

fuzz: $(STAMP) kernels ## every parser of foreign bytes, coverage-guided: MINUTES=10 each, TARGET=frames SEED=7 for one
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED))

chaos: $(FOR_TESTS) kernels ## five real brokers under random faults: MINUTES=5 SEED=1 (all of it needs root)
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: java $(FOR_TESTS) jar kernels ## Spark jobs while brokers, NATS and drivers are killed, then counted: MINUTES=10 SEED=1
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

notebooks: java $(STAMP) kernels ## run notebooks/, and store what they print and draw
	@$(BIN)/python -m tests.notebooks

bench: java $(STAMP) kernels ## natslog against its peers: table, docs/bench/results.json and .png (ARGS="--only publish --pairs 3")
	@$(BIN)/python -m tests.bench $(ARGS)

site: $(STAMP) ## the documentation with a reference of the Python API, as pages: build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo "open build/site/index.html"

sbom: $(STAMP) ## what is installed with natslog, as CycloneDX: dist/natslog.cdx.json
	@mkdir -p dist && $(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file dist/natslog.cdx.json $(BIN)/python
	@echo "wrote dist/natslog.cdx.json"

wheel: python ## the wheel in dist/, for MACHINE=x86_64 or aarch64 (default: this one)
	@$(PYTHON) -m venv build/wheel
	@build/wheel/bin/python -m pip install --quiet --disable-pip-version-check auditwheel
	@NATSLOG_MACHINE=$(MACHINE) build/wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@build/wheel/bin/auditwheel show dist/natslog-*_$(MACHINE).whl

demo: java kernels ## NATS, broker, Spark and back, on live events (or FILE=events.csv; TLS=1: with TLS, users, tokens; KEEP=1)
	@$(BIN)/python spark_jobs/demo.py $(if $(FILE),--file "$(FILE)") $(if $(TLS),--tls) $(if $(KEEP),--keep)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .test-results .hypothesis .schemathesis build dist connector/pyspark_natslog/jars
