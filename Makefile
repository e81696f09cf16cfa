# Developer verbs. Each sets up what it needs first (scripts/setup) and can be run again at any time.

PYTHON := .venv/bin/python
AGENT := build/agent/k8e-agent
# The folder too: a file that was removed counts as a change.
AGENT_SOURCES := agent/. agent/park/. $(wildcard agent/*.c agent/*.h agent/park/*.c agent/park/*.h) scripts/build_agent.py

.PHONY: help setup setup-tests demo test seconds soak lint format bench agent runsc current-runsc lock pin release clean

help:  ## show this
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup:
	@scripts/setup

# With the packages that only the suite and the checks need.
setup-tests:
	@scripts/setup tests

demo: setup agent  ## run code in a sandbox
	@scripts/demo

test: setup-tests agent current-runsc  ## the whole suite; one file: make test ARGS=tests/test_binary.py
	@scripts/test $(ARGS)

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
	shellcheck scripts/setup scripts/demo scripts/test .ci/run

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

release: setup  ## build the wheel into dist/
	.venv/bin/uv build --wheel --no-build-isolation --python $(PYTHON) --out-dir dist

clean:  ## remove what was built; the environment stays
	rm -rf build/agent build/release dist .mypy_cache .ruff_cache .pytest_cache
