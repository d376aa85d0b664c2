# Everything a person can run; `make help` prints this list. Each target installs what it needs.
# Tools and built binaries live in a cache outside the checkout: $INFERENCEFLEET_CACHE, default ~/.cache/inferencefleet.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export INFERENCEFLEET_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferencefleet
PYTHON ?= python3
UV := $(or $(shell command -v uv 2>/dev/null),$(INFERENCEFLEET_CACHE)/bootstrap/bin/uv)
RUN := $(UV) run --frozen --quiet
# Two cores are the smallest machine that we support: one BLAS thread per process keeps many processes fair.
export OMP_NUM_THREADS ?= 1
# A worker must never reach for a model hub or send usage statistics during tests.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# Every worker is a process of its own that imports torch: without bytecode files each start costs 2.5 s more (vLLM: 40 s).
export PYTHONDONTWRITEBYTECODE :=

# In a recipe: the router of this checkout as images have it, compiled once per change of its sources.
COMPILED_ROUTER = compiled=$$($(RUN) python router/compile.py) || [ $$? = 1 ]; export PYTHONPATH=$$compiled

PARTS := operator planner worker router

.PHONY: help setup up test lint unit unit-rest $(PARTS:%=unit-%) compiled conformance smoke e2e e2e-loop e2e-operator e2e-operator-full e2e-worker e2e-router e2e-router-full e2e-clients e2e-vllm e2e-helm e2e-kind e2e-kind-smoke e2e-kueue e2e-lws e2e-cosched e2e-volcano helm kube kwok kueue lws sched-plugins volcano sim vllm clients crds chart images kind-images bench-kv bench-seed bench-router bench-routing bench-admission bench-many bench-operator bench-decision bench-frontier bench-choose clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(INFERENCEFLEET_CACHE)/bootstrap/bin/uv:
	@echo "installing uv into $(INFERENCEFLEET_CACHE)/bootstrap"
	@mkdir -p $(INFERENCEFLEET_CACHE)
	@$(PYTHON) -m venv $(INFERENCEFLEET_CACHE)/bootstrap
	@$(INFERENCEFLEET_CACHE)/bootstrap/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8

# The environment is made once, from the fastest CPython here (UV_PYTHON= for another): builds differ by half of their CPU time.
setup: $(UV) ## install the project and its dependencies into .venv
	@[ -e "$${UV_PROJECT_ENVIRONMENT:-.venv}" ] || [ -n "$${UV_PYTHON:-}" ] || \
	  ! python=$$($(PYTHON) operator/fleet_cli/interpreter.py) || \
	  $(UV) venv --quiet --python "$$python" "$${UV_PROJECT_ENVIRONMENT:-.venv}"
	@$(UV) sync --frozen --quiet

up: setup ## README command 1: a fleet on this machine, no cluster, no GPU (FILE=fleet.yaml for your own)
	@HF_HUB_OFFLINE=0 $(RUN) fleet up $(FILE)

# Two at a time, which is what the smallest machine has cores for; what each of them said comes when it is over, in one piece. The real
# control plane has the machine for itself: what it is late with is judged.
TOGETHER := -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

test: lint ## README command 2, what CI runs
	@echo "two suites at a time: what each of them says comes when it is over"
	@$(MAKE) --no-print-directory $(TOGETHER) kube compiled $(PARTS:%=unit-%) conformance unit-rest
	@$(MAKE) --no-print-directory smoke

lint: setup ## format, lint, types, import rules, generated files
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) python -m fleet_api.crd --check
	$(RUN) pytest e2e --collect-only -q > /dev/null # every e2e module imports: most of them run too seldom to tell

unit: setup helm ## unit, property, golden, contract and architecture tests; no cluster
	$(RUN) pytest tests --ignore tests/conformance

$(PARTS:%=unit-%): unit-%: setup helm
	$(RUN) pytest tests/fleet_$*

unit-rest: setup helm # all that `unit` has beside the parts
	$(RUN) pytest tests --ignore tests/conformance $(PARTS:%=--ignore tests/fleet_%)

compiled: setup ## the router's tests on its compiled data path and on its loop: what images ship
	@if compiled=$$($(RUN) python router/compile.py); then export PYTHONPATH=$$compiled FLEET_TEST_LOOP=uvloop; \
	  $(RUN) python -c 'from fleet_router.metrics import COMPILED; assert COMPILED' && $(RUN) pytest tests/fleet_router; \
	elif [ $$? = 1 ]; then echo "THE COMPILED ROUTER WAS NOT TESTED: what it needs is not here, see above"; \
	else exit 1; fi

conformance: setup ## the engine conformance suite on the torch engine (a prefill and a decode process)
	$(RUN) pytest tests/conformance

smoke: setup kube ## the fast core of e2e on a real control plane
	@$(COMPILED_ROUTER); $(RUN) pytest e2e -m smoke

e2e: setup kube vllm clients kueue lws sched-plugins volcano sim ## all of e2e on a real control plane, vLLM and clients included
	@$(COMPILED_ROUTER); $(RUN) pytest e2e -m "not kind"

e2e-loop: setup kube clients kueue lws sched-plugins volcano sim ## e2e without vLLM
	$(RUN) pytest e2e -m "not vllm and not kind"

# What issue 4 asks for and no fault is about: its own processes, a real scheduler, the API server's own judgement.
OPERATOR_E2E := churn rollout canary flip gang delete zero admission adapters prefetch transport router_kv_moves dra pod_shape gang_scheduling \
  versions prometheus alerts unmakeable

e2e-operator: setup kube kwok ## faults between operator and API server, bad input, other hands, churn, rollouts, flips, gangs, RDMA's form and proof, adapters, webhooks, versions (FLEET_FAULT_SEED=n repeats a run)
	$(RUN) pytest e2e/test_operators.py e2e/test_operator_*.py $(foreach name,$(OPERATOR_E2E),e2e/test_$(name).py)

# O7 is the one row that is shorter by default: O15 has all of its 1,000 fleets, O9 its 500, O8 its 60 s.
e2e-operator-full: setup kube ## its row that is shorter there, in full: the API server dead for five minutes
	FLEET_O7_S=300 $(RUN) pytest e2e/test_operator_faults_outage.py

# The K family is tests/conformance; the others have real workers with an engine, alone or in a fleet.
WORKER_E2E := traffic seed adapters prefetch transport flip bad_input prefix_index router_resume

e2e-worker: setup kube ## real workers: the engine conformance suite, traffic of a trace, adapters, prefetching, transport, flips, bad input, resumed streams
	$(RUN) pytest tests/conformance $(foreach name,$(WORKER_E2E),e2e/test_$(name).py) -m "not vllm"

e2e-router: setup kube kwok clients sim ## faults of workers, network and discovery, overload, bad input at the router (FLEET_LOOP_REQUESTS=10000 for the full loop)
	@$(COMPILED_ROUTER); $(RUN) pytest e2e/test_router_*.py e2e/test_prefix_index.py -m "not vllm"

# What the list in e2e/README.md has in a shorter form by default, as long and as often as the reliability list says.
e2e-router-full: setup ## its rows that are shorter there, in full: 10,000 requests of the loop, 5 min of overload, 100,000 tries at keys, ...
	@$(COMPILED_ROUTER); export FLEET_LOOP_REQUESTS=10000 FLEET_R7_S=30 FLEET_L1_S=300 FLEET_S1_TRIES=50000 FLEET_S2_PROBES=1200; \
	  $(RUN) pytest e2e/test_router_*.py -k "every_request_ends or r7 or l1 or s1_a_wrong_key or s2_time"

e2e-clients: setup clients ## OpenAI's SDKs (Python, JavaScript), LangChain, LiteLLM, curl and aiperf against a real router
	$(RUN) pytest e2e/test_router_clients.py

e2e-vllm: setup kube vllm ## the vLLM part of e2e
	$(RUN) pytest e2e -m vllm

e2e-helm: setup kube ## the chart installed, upgraded, rolled back and uninstalled by helm on a real control plane
	$(RUN) pytest e2e/test_helm.py e2e/test_helm_wide.py

e2e-kind: setup kind-images ## a three-node kind cluster with docker: images, chart, fleet, rolling update, paused node
	UV=$(UV) $(RUN) pytest e2e/test_kind.py

e2e-kind-smoke: setup kind-images ## its first part: install, a fleet, tokens through the Service, uninstall
	UV=$(UV) $(RUN) pytest e2e/test_kind.py -k smoke

e2e-kueue: setup kube kueue ## fleets in a queue of a real Kueue: admitted by quota, whole workers, over quota, deleted
	$(RUN) pytest e2e/test_kueue.py

e2e-lws: setup kube lws ## workers over several nodes beside a real LeaderWorkerSet: its form row by row, no hands on each other
	$(RUN) pytest e2e/test_lws.py

e2e-cosched: setup kube helm sched-plugins ## workers over several nodes placed by a real scheduler of scheduler-plugins: all pods or none
	$(RUN) pytest e2e/test_gang_schedulers.py -k coscheduling

e2e-volcano: setup kube helm volcano ## the same by a real Volcano
	$(RUN) pytest e2e/test_gang_schedulers.py -k volcano

helm: ## a real helm, in the cache
	@e2e/helm/get-helm > /dev/null

kube: ## kube-apiserver, controller-manager, scheduler, etcd, kubectl into the cache
	@echo "control plane in $$(e2e/kube/get-control-plane)"

kwok: ## kwok (fake nodes and pods for scale) into the cache
	@echo "kwok in $$(e2e/kube/get-kwok)"

kueue: ## Kueue's manager and its manifests into the cache
	@echo "Kueue in $$(e2e/kube/get-kueue)"

lws: ## LeaderWorkerSet's manager and its manifests into the cache
	@echo "LeaderWorkerSet in $$(e2e/kube/get-lws)"

sched-plugins: ## scheduler-plugins' kube-scheduler (coscheduling), its PodGroup controller and their manifests into the cache
	@echo "scheduler-plugins in $$(e2e/kube/get-sched-plugins)"

volcano: ## Volcano's scheduler, its controllers and its manifest into the cache
	@echo "Volcano in $$(e2e/kube/get-volcano)"

sim: ## llm-d-inference-sim, somebody else's stand-in for vLLM, into the cache
	@echo "llm-d-inference-sim in $$(e2e/sim/get-sim)"

vllm: $(UV) ## the vLLM environment into the cache
	@echo "vLLM in $$(UV=$(UV) e2e/vllm/get-vllm)"

clients: $(UV) ## LangChain, LiteLLM, aiperf and OpenAI's SDK for JavaScript into the cache
	@echo "clients in $$(UV=$(UV) e2e/clients/get-clients)"

crds: setup ## generate crds/ from the models, and what charts/ has of them
	$(RUN) python -m fleet_api.crd
	@$(RUN) python -m e2e.helm.chart

chart: setup ## generate charts/ from crds/ and the chart itself, package the chart
	@$(RUN) python -m e2e.helm.chart

# What an image is built from: nothing else is sent to the builder, whatever lies about in the checkout.
IMAGE_SOURCES := pyproject.toml uv.lock README.md LICENSE operator router worker
IMAGES ?= operator router worker
IMAGE_PREFIX ?= inferencefleet
TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)
# By digest, so that the same checkout stands on the same base: the index of all architectures of 19 September 2026 (Python 3.11.16), as
# docker-library/repo-info has it at 40cdaf34. `docker buildx imagetools inspect python:3.11-slim-bookworm` tells today's.
BASE ?= python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
# worker: with the torch engine and its CUDA libraries; vllm: the agent alone, for a BASE that has the engine
WORKER_EXTRA ?= worker
# router: with its data path compiled (yes; auto: where the builder gets a C compiler; no)
COMPILED ?= auto
BUILDER ?= $(or $(shell command -v docker 2>/dev/null),$(shell command -v podman 2>/dev/null))

images: ## container images with docker or podman (TAG=, IMAGES="operator router worker", BASE=, WORKER_EXTRA=vllm)
	@[ -n "$(BUILDER)" ] || { echo "images are not built: neither docker nor podman is here" >&2; exit 1; }
	@for image in $(IMAGES); do \
	  extra=$$(case $$image in worker) echo "--build-arg EXTRA=$(WORKER_EXTRA)";; router) echo "--build-arg COMPILED=$(COMPILED)";; esac); \
	  tar --exclude=__pycache__ -c $(IMAGE_SOURCES) | \
	    $(BUILDER) build --quiet --build-arg BASE=$(BASE) $$extra -f $$image/Dockerfile -t $(IMAGE_PREFIX)/$$image:$(TAG) - > /dev/null; \
	  echo "built $(IMAGE_PREFIX)/$$image:$(TAG)"; \
	done

# Where no registry can be reached, KIND_BASE_IMAGE names a base image that the builder already has.
kind-images:
	@$(MAKE) --no-print-directory images TAG=e2e WORKER_EXTRA=vllm COMPILED=yes BASE=$(or $(KIND_BASE_IMAGE),$(BASE))

bench-kv: setup ## KV hand-off between two torch workers against raw NIXL
	@$(RUN) python -m e2e.bench.kv

bench-seed: setup ## the first requests of a worker that joins, with hot prefixes of one that serves and without
	@$(RUN) python -m e2e.bench.seed

bench-router: $(UV) ## router CPU per request and chunk against sglang-router and Envoy
	@$(UV) sync --frozen --quiet --inexact --group bench
	@$(COMPILED_ROUTER); $(UV) run --frozen --quiet --group bench python -m e2e.bench.router

bench-routing: $(UV) ## TTFT and load on two traces against sglang-router, smg and vllm-router (ARGS="--workers 8 --routers ours smg", or "--scale-out": workers that join, all fleets or "--scale-out 8+2 pd-32+4")
	@$(UV) sync --frozen --quiet --inexact --group bench
	@$(COMPILED_ROUTER); $(UV) run --frozen --quiet --group bench python -m e2e.bench.routing $(ARGS)

bench-admission: setup ## what keys, quotas, classes and runaway detection cost per request and chunk
	@$(COMPILED_ROUTER); $(RUN) python -m e2e.bench.admission

bench-many: setup ## load imbalance of three routers that gossip, and of three that do not, against one
	@$(COMPILED_ROUTER); $(RUN) python -m e2e.bench.many

bench-decision: setup ## prefill remotely or not: the learnt cost against static thresholds on three mixes, in virtual time
	@$(RUN) python -m e2e.bench.decision

bench-frontier: setup ## load against hits on Zipf prefixes, 8 to 512 workers: ours against CHWBL and the simple rules, in virtual time
	@$(COMPILED_ROUTER); $(RUN) python -m e2e.bench.frontier $(ARGS)

bench-choose: setup ## microseconds and candidates per routing decision, 16 to 1,024 workers; memory of the indexes
	@$(COMPILED_ROUTER); $(RUN) python -m e2e.bench.choose

bench-operator: setup kube kwok ## 1,000 fleets of 8 pods from apply to Ready against Kubernetes' own Deployments (SCALE=0.1 for a tenth, ROUNDS=1 for a quick look)
	@$(RUN) python -m e2e.bench.operator

clean: ## remove the virtual environment and tool caches of this checkout
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
