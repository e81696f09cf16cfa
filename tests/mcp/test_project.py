"""`agentkernel mcp server` in a project with a configuration: an agent gets what its user gets from the same command,
decided again for each call; and images that its user has a password for."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from tests.agentkernel.house import AGENTKERNEL
from tests.cli.machine import K8E, Machine, wait_until
from tests.engine.tiny_images import busybox_layer
from tests.images.builder import build, entry, make_tar
from tests.images.registry import PASSWORD, USER, RealRegistry, run_registry
from tests.mcp.agents import INITIALIZE, INITIALIZED, Pipes, call, fail, stdio_agent
from tests.mcp.test_agentkernel import kernel_agent

CALL = {"image": "host"}


@pytest.fixture(scope="module")
def project(machine: Machine) -> Path:
    folder = machine.home / "work"
    folder.mkdir()
    (folder / "readme").write_text("of the project\n")
    return folder


@pytest.fixture(scope="module")
async def agent(machine: Machine, project: Path) -> AsyncIterator[Client]:
    """One server for all tests: a change counts from the next call on."""
    async with kernel_agent(machine, project) as client:
        yield client


@dataclass
class Note:
    """A configuration file."""

    path: Path

    def say(self, text: str) -> None:
        self.path.write_text(text)

    def remove(self) -> None:
        """Waits until no sandbox has it mounted: a sandbox is destroyed after its answer."""

        def is_gone() -> bool:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            return not os.path.lexists(self.path)

        wait_until(is_gone)


@pytest.fixture
def file(project: Path) -> Iterator[Note]:
    note = Note(project / "agentkernel.toml")
    yield note
    note.remove()


@pytest.fixture
def own(machine: Machine) -> Iterator[Note]:
    note = Note(machine.home / ".config" / "agentkernel" / "config.toml")
    note.path.parent.mkdir(parents=True, exist_ok=True)
    yield note
    note.remove()


async def look(agent: Client, **wishes: Any) -> Any:
    """The policy of a sandbox that was made so, as the service has it."""
    made = await call(agent, "sandbox_create", name="seen", **CALL, **wishes)
    await call(agent, "sandbox_remove", name="seen")
    return made["policy"]


def type_there(machine: Machine, project: Path, *words: str) -> Any:
    """The same command, typed by the user."""
    command = [str(AGENTKERNEL), *words]
    done = subprocess.run(command, cwd=project, env=machine.env, capture_output=True, timeout=60, input=b"")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


async def test_a_file_that_narrows_is_honoured(machine: Machine, agent: Client, project: Path, file: Note) -> None:
    assert (await look(agent))["allowed_hosts"] == ["*"]
    file.say('[security]\nprofile = "restrictive"\n[resources]\nmemory = "64m"\n')
    policy = await look(agent)
    assert (policy["allowed_hosts"], policy["read_only"], policy["powerless"]) == ([], True, True)
    typed = type_there(machine, project, "run", "--image", "host", "--dry-run", "--json", "id")
    assert (typed["allowed_hosts"], typed["read_only"], typed["limits"]) == ([], True, {"memory": 64 << 20})
    run = await call(agent, "sandbox_run", command=["bash", "-c", "touch /workspace/x || cat /sys/x"], **CALL)
    assert run["exit_code"] != 0


async def test_one_that_widens_is_refused_until_it_is_trusted_and_again_when_it_changes(
    machine: Machine, agent: Client, project: Path, file: Note
) -> None:
    file.say("[security]\nmount_cwd = true\n")
    for tool, arguments in (("sandbox_run", {"command": ["id"]}), ("sandbox_create", {"name": "wide"})):
        problem = await fail(agent, tool, **arguments, **CALL)
        assert problem["code"] == "widening_refused"
        assert "agentkernel.toml:2: security.mount_cwd" in problem["detail"]
        assert "agentkernel trust agentkernel.toml" in problem["hint"]
    assert (await call(agent, "sandbox_list"))["sandboxes"] == []
    assert type_there(machine, project, "trust", "--json")["ok"]
    run = await call(agent, "sandbox_run", command=["cat", "readme"], **CALL)
    assert run["stdout"] == "of the project\n"
    file.say("[security]\nmount_cwd = true\n# and more\n")
    assert (await fail(agent, "sandbox_run", command=["cat", "readme"], **CALL))["code"] == "widening_refused"
    file.remove()
    assert "mounts" not in await look(agent)


async def test_a_call_cannot_undo_what_files_say(agent: Client, file: Note, own: Note) -> None:
    file.say("[security]\nnetwork = false\n")
    problem = await fail(agent, "sandbox_run", command=["id"], network=True, **CALL)
    assert problem["code"] == "beyond_configuration"
    assert "network" in problem["hint"]
    assert (await look(agent, profile="moderate"))["allowed_hosts"] == []
    file.remove()
    own.say('[security]\nprofile = "restrictive"\n')
    assert (await look(agent))["read_only"] is True
    problem = await fail(agent, "sandbox_run", command=["id"], profile="moderate", **CALL)
    assert problem["code"] == "beyond_configuration"


async def test_trust_in_a_file_is_no_home_for_an_agent(
    machine: Machine, agent: Client, project: Path, file: Note
) -> None:
    file.say("[security]\nmount_home = true\n")
    type_there(machine, project, "trust", "--json")
    problem = await fail(agent, "sandbox_run", command=["id"], **CALL)
    assert (problem["code"], problem["field"]) == ("permissive_refused", "profile")


async def test_files_of_the_project_come_along(agent: Client, project: Path, file: Note) -> None:
    file.say('[[files]]\nsource = "readme"\ndest = "/workspace/copied"\nmode = "0600"\n')
    run = await call(agent, "sandbox_run", command=["bash", "-c", "cat copied; stat -c %a copied"], **CALL)
    assert run["stdout"] == "of the project\n600\n"
    file.say('[[files]]\nsource = "../.ssh/id"\ndest = "/workspace/copied"\n')
    assert (await fail(agent, "sandbox_run", command=["id"], **CALL))["code"] == "widening_refused"


async def test_a_file_that_cannot_be_understood_makes_no_sandbox(agent: Client, project: Path, file: Note) -> None:
    file.say("[security]\nnetwrok = false\n")
    problem = await fail(agent, "sandbox_run", command=["id"], **CALL)
    assert problem["code"].startswith("config_")
    assert "agentkernel.toml:2" in problem["error"] + problem["detail"]
    file.remove()
    os.symlink("readme", file.path)
    assert (await fail(agent, "sandbox_run", command=["id"], **CALL))["code"] == "config_link"


def test_a_script_that_writes_everything_and_waits_is_answered(machine: Machine, project: Path, file: Note) -> None:
    """The daemon's questions come after the end of its input."""
    file.say("[security]\nnetwork = false\n")
    arguments = {"command": ["bash", "-c", "sleep 0.3; echo done"], **CALL}
    call_tool = {"name": "sandbox_run", "arguments": arguments}
    messages = [INITIALIZE, INITIALIZED, {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call_tool}]
    text = "\n".join(map(json.dumps, messages)).encode()  # without a last newline
    command = [str(AGENTKERNEL), "mcp", "server"]
    done = subprocess.run(command, cwd=project, env=machine.env, capture_output=True, timeout=60, input=text)
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert answers[2]["result"]["structuredContent"]["stdout"] == "done\n"
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("program", [[AGENTKERNEL, "mcp", "server"], [K8E, "sandbox-mcp"]])
def test_an_agent_does_not_speak_for_its_bridge(machine: Machine, project: Path, program: list[Any]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(program, cwd=project, env=machine.env, stdin=pipe, stdout=pipe) as process:
        talk = Pipes(process)
        talk.start()
        for line in (b'\x1e{"end": true}', b'\x1e{"id": 1, "request": {"image": "host"}}', b" \x1e"):
            talk.write(line)
            assert talk.read()["error"]["code"] == -32700
        number = talk.begin_call("sandbox_list")  # and the connection goes on
        assert isinstance(talk.read_answer(number), dict)
        # Half a line, and a call's question behind it: the answer waits for the line, and does not get into it.
        assert process.stdin is not None
        number = talk.begin_call("sandbox_run", command=["echo", "hi"], **CALL)
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 99, ')
        process.stdin.flush()
        process.stdin.write(b'"method": "ping"}\n')
        process.stdin.flush()
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            message = talk.read()
            if "id" in message:
                answers[message["id"]] = message["result"]
        assert answers[99] == {}
        assert answers[number]["structuredContent"]["stdout"] == "hi\n"
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("private"), htpasswd=True) as running:
        yield running


@contextlib.contextmanager
def logged_in(machine: Machine, host: str) -> Iterator[None]:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path = machine.home / ".docker" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    try:
        yield
    finally:
        path.unlink()


async def test_a_private_image_is_pulled_with_what_the_user_has(
    machine: Machine, agent: Client, registry: RealRegistry
) -> None:
    name = registry.push("team/private", build(busybox_layer(), make_tar(entry("etc/made-of", b"team\n"))))
    wish = {"command": ["cat", "/etc/made-of"], "image": name, "network": False}
    refused = await fail(agent, "sandbox_run", **wish)
    assert (refused["code"], refused["field"]) == ("image_unauthorized", "image")
    with logged_in(machine, registry.host):
        assert (await call(agent, "sandbox_run", **wish))["stdout"] == "team\n"
    machine.k8e("image", "remove", name)
    async with stdio_agent(machine) as other:  # k8e's own tools
        assert (await fail(other, "sandbox_run", **wish))["code"] == "image_unauthorized"
        with logged_in(machine, registry.host):
            assert (await call(other, "sandbox_run", **wish))["stdout"] == "team\n"
    told = "".join(path.read_text() for path in (machine.folder / "s").glob("*.log"))
    assert PASSWORD not in told


async def test_a_configuration_that_cannot_be_read_is_no_anonymity(
    machine: Machine, agent: Client, registry: RealRegistry
) -> None:
    with logged_in(machine, registry.host):
        (machine.home / ".docker" / "config.json").write_text("{")
        problem = await fail(agent, "sandbox_run", command=["id"], image=f"{registry.host}/team/other")
    assert problem["code"] == "credentials_unreadable"
