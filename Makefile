# Developer verbs. Each sets up what it needs first (scripts/setup) and can be run again at any time.

PYTHON := .venv/bin/python
AGENT := build/agent/k8e-agent
# The folder too: a file that was removed counts as a change.
AGENT_SOURCES := $(wildcard agent/. agent/*/. agent/*.[ch] agent/*/*.[ch] agent/*/*.zig) scripts/build_agent.py

.PHONY: help setup setup-tests demo test test-kubernetes test-cluster soak-cluster cluster seconds soak lint format bench agent runsc current-runsc lock pin release cluster-release images push-images clean

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

setup:
	@scripts/setup

# With the packages that only the suite and the checks need.
setup-tests:
	@scripts/setup tests

demo: setup agent  ## run code in a sandbox
	@scripts/demo

test: setup-tests agent current-runsc  ## the whole suite; one file: make test ARGS=tests/test_binary.py
	@scripts/test $(ARGS)

cluster: setup  ## build and start a real Kubernetes on this machine, for tests; ARGS=stop ends it
	@$(if $(findstring cilium,$(ARGS)),scripts/setup cilium)
	@$(PYTHON) scripts/cluster.py $(ARGS)

# Built before: no test may take as long as the first build.
test-kubernetes: setup-tests agent  ## the day's part of the tests that need a real cluster, which is built and started
	@$(if $(findstring cilium,$(ARGS)),scripts/setup cilium)
	@$(PYTHON) scripts/cluster.py tools $(if $(findstring cilium,$(ARGS)),--cilium)
	@scripts/test $(or $(ARGS),--whole tests/kubernetes)

test-cluster: setup-tests agent  ## the tests of a cluster of one's own, on machines made of namespaces
	@$(PYTHON) scripts/cluster.py build --addons
	@scripts/test $(or $(ARGS),tests/cluster $(wildcard tests/members/test_*.py))

soak-cluster: setup-tests agent  ## its long tests: a full disk, a server in the place of a lost one, other programs
	@$(PYTHON) scripts/cluster.py build --addons
	@scripts/test $(or $(ARGS),tests/members/soak)

seconds: setup  ## keep how long each file took in the last whole `make test`, so that long ones begin first
	@$(PYTHON) -m tests.seconds

soak: setup-tests agent current-runsc  ## the long forms of what `make test` runs a share of: kills, cycles, fuzzing
	@$(PYTHON) scripts/run_soak.py $(ARGS)

lint: setup-tests  ## style, types, layers, the gateway's contract, scripts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	$(PYTHON) scripts/check_proto.py
	$(PYTHON) scripts/unasync.py --check
	shellcheck scripts/setup scripts/demo scripts/test scripts/install.sh .ci/run

format: setup  ## apply the style
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup-tests agent  ## measure against baselines of the same run
	$(PYTHON) -m bench $(ARGS)

agent: $(AGENT) $(AGENT)-asan  ## build the agent for this machine, plain and with sanitizers

$(AGENT): $(AGENT_SOURCES) | setup
	$(PYTHON) scripts/build_agent.py dev

$(AGENT)-asan: $(AGENT_SOURCES) | setup
	$(PYTHON) scripts/build_agent.py asan

runsc: setup  ## build the pinned gVisor (needs Go) and, as root, install it for the engine
	@$(PYTHON) scripts/build_runsc.py

# Where there is no Go, tests make do with the distribution's runsc.
current-runsc: setup
	@$(PYTHON) scripts/build_runsc.py --if-possible

lock: setup  ## refresh requirements.lock; ARGS=--upgrade for newer versions
	.venv/bin/uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header \
		--python-version 3.11 pyproject.toml --group dev $(ARGS) -o requirements.lock

pin: setup  ## after a change of the agent: build the release agents and pin their hashes
	$(PYTHON) scripts/build_agent.py pin

release: setup  ## build the wheel and the standalone program into dist/
	.venv/bin/uv build --wheel --no-build-isolation --python $(PYTHON) --out-dir dist
	$(PYTHON) scripts/build_standalone.py dist

# Needs Go and mmdebstrap.
cluster-release: release  ## build the folder dist/cluster, from which scripts/install.sh installs a cluster
	.venv/bin/k8e cluster build --output dist/cluster
	$(PYTHON) -m scripts.build_cluster dist/cluster dist

# Needs mmdebstrap; no docker, and no registry.
images: release  ## build the images of the agent and the gateway into dist/, for an installation on Kubernetes
	$(PYTHON) scripts/build_images.py dist

push-images:  ## push them by skopeo: make push-images REGISTRY=registry.example.com/team
	@test -n "$(REGISTRY)" || { echo "make push-images REGISTRY=registry.example.com/team" >&2; exit 1; }
	@set -e; for archive in dist/k8e-*.oci.tar; do \
		name=$$(basename $$archive .oci.tar); \
		skopeo copy --all $(SKOPEO) oci-archive:$$archive docker://$(REGISTRY)/$${name%-*}:$${name##*-}; \
	done

clean:  ## remove what was built; the environment stays
	rm -rf build/agent build/release dist .mypy_cache .ruff_cache .pytest_cache
