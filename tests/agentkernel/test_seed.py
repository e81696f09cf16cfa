"""Every command block of the document that this front door implements, as a user types it.

The images are ours under their names: a busybox, and programs that say in which image they were started, and with what.
What they say is what the command line, detection, images and profiles made of a line.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.profiles.languages import LANGUAGES
from tests.agentkernel.house import House
from tests.cli.machine import Done, Machine, make_folder
from tests.engine.answers import plant_answers
from tests.engine.tiny_images import busybox_layer
from tests.engine.toolbox_image import libraries
from tests.images.builder import build, entry, link, make_tar, write_layout
from tests.mcp.agents import Pipes
from tests.profiles.test_config import SEED, SEED_DAEMON
from tests.sandboxes import needs_root
from tests.scenarios.user import clear_machine, stop_daemon

pytestmark = needs_root

OTHERS = {
    "ubuntu:24.04": ("apt-get",),
    "postgres:16-alpine": ("psql",),
    "alpine:3.20": ("curl", "failing-command"),
    "node:22-alpine": ("python",),  # the document runs both in one sandbox
}
NODE, NPM = Path("/usr/bin/node"), Path("/usr/lib/node_modules/npm")
TELL = b'#!/bin/sh\necho "$(cat /etc/image): ${0##*/}${*:+ $*}"\n'
PROGRAMS = {
    "curl": b"#!/bin/sh\nexec wget -q -O - http://$1\n",
    "failing-command": b"#!/bin/sh\necho tried; exit 3\n",
    "uv": b"#!/bin/sh\nprintf '<%s>' \"$@\"; exit 9\n",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with make_folder() as folder:
        (folder / "k8e.toml").write_text('[gateway]\nlisten = ""\n[pool]\nmax = 1\n')
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder)
        try:
            store_images(machine, tmp_path_factory.mktemp("images"))
            yield machine
        finally:
            (folder / "k8e.toml").write_text("[pool]\nenabled = false\n")
            stop_daemon(machine)
            clear_machine(machine)


def store_images(machine: Machine, folder: Path) -> None:
    """Under the names of the table, so that nothing is fetched from anywhere."""
    commands = {language.image: set(language.commands) for language in LANGUAGES}
    for image, more in OTHERS.items():
        commands.setdefault(image, set()).update(more)
    commands["python:3.12-alpine"] |= {"python3"}
    for image, names in commands.items():
        programs = {f"usr/local/bin/{name}": PROGRAMS.get(name, TELL) for name in sorted(names - {"sh"})}
        layer = make_tar(
            *(entry(name, mode=0o755) for name in ("usr/local", "usr/local/bin")),
            *(entry(path, content, mode=0o755) for path, content in programs.items()),
            entry("etc/image", image.encode()),
            link("bin/wget", "busybox"),
        )
        archive = write_layout(folder / "image.tar", build(busybox_layer(), layer, how="plain", config=CONFIG))
        done = machine.k8e("image", "import", str(archive), "--name", image)
        assert done.code == 0, done


MCP_REQUEST = {
    "method": "tools/call",
    "params": {
        "name": "sandbox_run",
        "arguments": {
            "command": ["python3", "-c", "print('hello')"],
            "compatibility_mode": "claude",
            "timeout_ms": 60000,
        },
    },
}
CONFIG = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> House:
    return House(machine.folder, tmp_path)


def types(house: House, line: str) -> Done:
    done = subprocess.run(
        ["bash", "-c", line], cwd=house.project, env=house.env, capture_output=True, timeout=120, input=b""
    )
    return Done(done.returncode, done.stdout, done.stderr)


BASIC = """
agentkernel run sh -c 'npm install && npm test'   => node:22-alpine: npm install;node:22-alpine: npm test
agentkernel run python3 script.py                 => python:3.12-alpine: python3 script.py
agentkernel run pip install package-name          => python:3.12-alpine: pip install package-name
agentkernel run pytest                            => python:3.12-alpine: pytest
agentkernel run node script.js                    => node:22-alpine: node script.js
agentkernel run npm test                          => node:22-alpine: npm test
agentkernel run npx create-react-app my-app       => node:22-alpine: npx create-react-app my-app
agentkernel run cargo build                       => rust:1.85-alpine: cargo build
agentkernel run cargo test                        => rust:1.85-alpine: cargo test
agentkernel run go build                          => golang:1.23-alpine: go build
agentkernel run go test ./...                     => golang:1.23-alpine: go test ./...
agentkernel run ruby script.rb                    => ruby:3.3-alpine: ruby script.rb
agentkernel run bundle exec rspec                 => ruby:3.3-alpine: bundle exec rspec
agentkernel run php script.php                    => php:8.3-alpine: php script.php
agentkernel run mvn test                          => eclipse-temurin:21-alpine: mvn test
agentkernel run make                              => gcc:14-bookworm: make
agentkernel run terraform validate                => hashicorp/terraform:1.10: terraform validate
agentkernel run --image ubuntu:24.04 apt-get update                        => ubuntu:24.04: apt-get update
agentkernel run --image postgres:16-alpine psql --version                  => postgres:16-alpine: psql --version
agentkernel run --profile restrictive python3 script.py                    => python:3.12-alpine: python3 script.py
agentkernel run --profile permissive cargo build                           => rust:1.85-alpine: cargo build
agentkernel run --compatibility-mode claude python3 script.py              => python:3.12-alpine: python3 script.py
agentkernel run --compatibility-mode codex python3 script.py               => python:3.12-alpine: python3 script.py
agentkernel run --compatibility-mode gemini python3 script.py              => python:3.12-alpine: python3 script.py
"""
LINES = [tuple(part.strip() for part in line.split("=>")) for line in BASIC.strip().splitlines()]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[line for line, _ in LINES])
def test_run(house: House, line: str, said: str) -> None:
    done = types(house, line)
    assert (done.code, done.stderr) == (0, b""), done
    assert done.stdout.decode().splitlines() == said.split(";")


def test_npm_itself_in_an_image(machine: Machine, house: House, tmp_path: Path) -> None:
    """The first compound line of the document, with the real one. What it installs needs no network."""
    if not NODE.exists() or not NPM.exists():
        pytest.skip("needs the machine's node and npm, where their packages have them")
    files = [path for path in sorted(NPM.rglob("*")) if path.is_file() and not path.is_symlink()]
    layer = make_tar(
        *(entry(name, mode=0o755) for name in ("usr", "usr/bin", "lib", "lib64")),
        *(entry(str(path)[1:], path.read_bytes(), mode=0o755) for path in (NODE, *sorted(libraries([NODE])), *files)),
        link("usr/bin/npm", f"{NPM}/bin/npm-cli.js"),
        link("usr/bin/env", "/bin/busybox"),
    )
    archive = write_layout(tmp_path / "npm.tar", build(busybox_layer(), layer, how="plain", config=CONFIG))
    assert machine.k8e("image", "import", str(archive), "--name", "team/node:22").code == 0
    house.write("package.json", '{"name": "x", "version": "1.0.0", "scripts": {"test": "node -p 6*7; pwd"}}')
    words = "--image team/node:22 --compatibility-mode claude --no-network --memory 1g --cpus 2"
    done = types(house, f"agentkernel run {words} sh -c 'npm install && npm test && npm config get registry'")
    assert done.code == 0, done
    lines = done.stdout.decode().splitlines()
    assert lines[-3:-1] == ["42", "/workspace"]
    assert (house.project / "package-lock.json").exists()
    here = subprocess.run(["npm", "config", "get", "registry"], env=house.env, capture_output=True, text=True)
    assert lines[-1].rpartition("@")[2] == here.stdout.strip().rpartition("@")[2]


def test_without_a_network_it_fails(house: House) -> None:
    assert types(house, "agentkernel run --no-network curl example.com  # Will fail").code == 1


@pytest.mark.parametrize(("command", "code", "image"), [("npm test", 0, "node:22"), ("failing-command", 3, "alpine:3")])
def test_nothing_stays_and_what_is_kept_is_found(house: House, command: str, code: int, image: str) -> None:
    done = types(house, f"agentkernel run --keep {command}")
    assert (done.code, done.stdout) == (code, b"tried\n" if code else b"node:22-alpine: npm test\n")
    found = re.search(r"run-[0-9a-f]+", done.stderr.decode())
    assert found, done
    assert [each["name"] for each in house.object("sandbox", "list")["sandboxes"]] == [found[0]]
    # Inspect: there is no docker here.
    assert types(house, f"agentkernel exec {found[0]} sh -c 'cat /etc/image'").stdout.startswith(image.encode())
    assert types(house, f"agentkernel sandbox remove {found[0]}").code == 0
    assert house.object("sandbox", "list")["sandboxes"] == []


def test_persistent_sandboxes(house: House) -> None:
    house.write("package.json")
    script = """
set -e
# Create and start
agentkernel sandbox create my-sandbox
agentkernel sandbox start my-sandbox

# Execute commands
agentkernel exec my-sandbox npm test
agentkernel exec my-sandbox python -m pytest
agentkernel exec my-sandbox sh -c 'echo kept > /workspace/note'

# Clean up
agentkernel sandbox stop my-sandbox
agentkernel sandbox start my-sandbox
agentkernel exec my-sandbox cat /workspace/note
agentkernel sandbox stop my-sandbox
agentkernel sandbox remove my-sandbox
"""
    done = types(house, script)
    assert done.code == 0, done
    assert done.stdout.decode().splitlines() == [
        "my-sandbox",
        "node:22-alpine: npm test",
        "node:22-alpine: python -m pytest",
        "kept",
    ]


def test_a_project_with_its_configuration(house: House) -> None:
    """The document's agentkernel.toml mounts the folder, so a person says once that it may."""
    house.write("agentkernel.toml", SEED)
    refused = types(house, "agentkernel run python3 script.py")
    assert (refused.code, refused.stdout) == (125, b"")
    assert b"[widening_refused]" in refused.stderr
    named = types(house, "agentkernel run --config agentkernel.toml python3 script.py")
    assert (named.code, named.stdout) == (0, b"python:3.12-alpine: python3 script.py\n")
    done = types(house, "agentkernel trust >/dev/null && agentkernel sandbox create && agentkernel sandbox list --json")
    try:
        name, listed = done.stdout.decode().splitlines()
        (sandbox,) = json.loads(listed)["sandboxes"]
        assert (name, sandbox["mode"], sandbox["profile"]) == ("my-project", "claude", "moderate")
        assert [mount["target"] for mount in sandbox["policy"]["mounts"]] == ["/workspace"]
        assert {"api.anthropic.com", "cdn.anthropic.com"} <= set(sandbox["policy"]["allowed_hosts"])
    finally:
        assert types(house, "agentkernel sandbox remove my-project").code == 0


def test_the_request_of_an_agent_on_the_server_that_its_plugin_names(house: House) -> None:
    """As JSON, to the command that .mcp.json says."""
    house.ok("plugin", "install", "claude")
    server = json.loads((house.project / ".mcp.json").read_text())["mcpServers"]["agentkernel"]
    with subprocess.Popen(
        [server["command"], *server["args"]],
        cwd=house.project,
        env={**house.env, **server["env"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        agent = Pipes(process)
        agent.start()
        agent.write({"jsonrpc": "2.0", "id": 7, **MCP_REQUEST})
        while (answer := agent.read()).get("id") != 7:
            assert "method" in answer  # how far it is
        assert process.stdin
        process.stdin.close()
    result = answer["result"]["structuredContent"]
    assert (result["stdout"], result["exit_code"]) == ("python:3.12-alpine: python3 -c print('hello')\n", 0)


def test_the_daemon(house: House) -> None:
    script = """
set -e
# Start daemon with pre-warmed pool
agentkernel daemon start
# Check status
agentkernel daemon status  # Shows warm VMs per agent type
# Commands use warm pool automatically (~50ms vs ~500ms cold start)
agentkernel run python3 script.py
# Pre-warm for specific agent types
agentkernel daemon prewarm --mode claude
# Stop daemon
agentkernel daemon stop
"""
    done = types(house, script)
    assert done.code == 0, done
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "python:3.12-alpine: python3 script.py"
    assert lines[2].split()[:2] == ["claude", "alpine:3.20"]


def test_the_daemon_s_configuration(house: House) -> None:
    """The document's, on a machine whose own settings give no more than one."""
    folder = house.home / ".config" / "agentkernel"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(SEED_DAEMON)
    started = types(house, "agentkernel daemon start --json")
    assert started.code == 0, started
    pools = house.object("daemon", "status")["pool"]["reservations"]
    assert {pool["name"] for pool in pools} >= {"claude", "codex"}
    for mode in ("native", "claude", "codex"):
        house.ok("daemon", "prewarm", "--mode", mode, "--count", "0")


def test_what_a_warm_one_is_for_is_taken_from_the_pool(house: House) -> None:
    folder = house.home / ".config" / "agentkernel"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[daemon.agents.native]\nmin_warm = 1\nruntime = "python"\n')
    house.ok("daemon", "prewarm")
    before = count_claims(house)
    done = types(house, """agentkernel run uv 'a b' '' '$HOME' "it's" '*' --keep""")
    assert (done.code, done.stdout) == (9, b"<a b><><$HOME><it's><*><--keep>")  # the original put them through a shell
    assert count_claims(house) == before + 1
    house.ok("daemon", "prewarm", "--mode", "native", "--count", "0")


def count_claims(house: House) -> int:
    socket = house.folder / "r" / "k8e.sock"
    command = shlex.split(f"curl -s --unix-socket {socket} http://localhost/metrics")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r'k8e_pool_claims_total\{start="warm"\} (\d+)', text)
    return int(found[1]) if found else 0
