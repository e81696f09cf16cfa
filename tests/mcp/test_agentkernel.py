"""`agentkernel mcp server`: its tools as its documentation has them, in a project, with images and profiles."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.agentkernel.house import AGENTKERNEL, list_tree
from tests.cli.machine import Machine, wait_until
from tests.engine.tiny_images import busybox_layer
from tests.images.builder import build, entry, make_tar, write_layout
from tests.images.registry import RealRegistry, run_registry
from tests.mcp.agents import Pipes, call, fail, read

# In the order of seed 003's tables.
NAMES = [
    "sandbox_run",
    "sandbox_create",
    "sandbox_exec",
    "sandbox_list",
    "sandbox_remove",
    "sandbox_file_write",
    "sandbox_file_read",
    "sandbox_start",
    "sandbox_stop",
]
SHELL = "alpine:3.20"  # what a shell's commands run in, by the table


@contextlib.asynccontextmanager
async def kernel_agent(machine: Machine, folder: Path, *words: str, **env: str) -> AsyncIterator[Client]:
    server = StdioServerParameters(
        command=str(AGENTKERNEL), args=["mcp", "server", *words], env={**machine.env, **env}, cwd=folder
    )
    async with Client(server, mode="legacy") as client:
        yield client


@pytest.fixture(scope="module")
def project(machine: Machine) -> Path:
    folder = machine.home / "project"
    (folder / ".git" / "hooks").mkdir(parents=True)
    (folder / "readme").write_text("of the project\n")
    return folder


@pytest.fixture(scope="module")
async def agent(machine: Machine, project: Path) -> AsyncIterator[Client]:
    async with kernel_agent(machine, project) as client:
        yield client


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def add_image(machine: Machine, folder: Path, name: str, *entries: Any) -> None:
    archive = write_layout(folder / "image.tar", build(busybox_layer(), make_tar(*entries)), name)
    done = machine.k8e("image", "import", str(archive), "--name", name)
    assert done.code == 0, done


@pytest.fixture(scope="module")
def shell(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> str:
    add_image(machine, tmp_path_factory.mktemp("shell"), SHELL, entry("etc/made-of", b"alpine\n"))
    return SHELL


def remove(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True


async def test_it_has_its_own_name_and_its_own_tools(agent: Client) -> None:
    assert agent.server_info is not None
    assert agent.server_info.name == "agentkernel"
    tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
    assert list(tools) == NAMES
    assert tools["sandbox_run"].input_schema["required"] == ["command"]
    assert {
        "command",
        "profile",
        "compatibility_mode",
        "network",
        "cwd",
        "env",
        "timeout_ms",
    } <= set(tools["sandbox_run"].input_schema["properties"])
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools.values())
    reading = {name for name, tool in tools.items() if tool.annotations and tool.annotations.read_only_hint}
    assert reading == {"sandbox_list", "sandbox_file_read"}


async def test_the_example_of_its_documentation(agent: Client) -> None:
    run = await call(
        agent,
        "sandbox_run",
        command=["python3", "-c", "print('hello')"],
        compatibility_mode="claude",
        timeout_ms=60000,
        image="host",
    )
    assert (run["stdout"], run["exit_code"]) == ("hello\n", 0)
    assert (await call(agent, "sandbox_list"))["sandboxes"] == []


async def test_the_image_is_found_by_the_command(agent: Client, shell: str) -> None:
    script = 'cat /etc/made-of; pwd; echo "$A"'
    run = await call(agent, "sandbox_run", command=["sh", "-c", script], cwd="/tmp", env={"A": "b c"}, network=False)
    assert (run["stdout"], run["exit_code"]) == ("alpine\n/tmp\nb c\n", 0)
    late = await call(agent, "sandbox_run", command=["sleep", "100"], timeout_ms=500, network=False, image=shell)
    assert (late["exit_code"], late["status"]) == (124, "timed_out")


async def test_a_missing_image_is_fetched_and_told_about(agent: Client, registry: RealRegistry) -> None:
    name = registry.push("team/tool", build(busybox_layer(), make_tar(entry("etc/made-of", b"team\n"))))
    heard: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    arguments = {"command": ["cat", "/etc/made-of"], "image": name, "network": False}
    run = read(await agent.call_tool("sandbox_run", arguments, progress_callback=hear))
    assert run["stdout"] == "team\n"
    assert any(message and message.startswith(name) for _, message in heard)
    assert [count for count, _ in heard] == sorted(count for count, _ in heard)
    missing = await fail(agent, "sandbox_run", command=["id"], image=f"{registry.host}/team/none")
    assert (missing["code"], missing["field"]) == ("image_not_found", "image")
    assert missing["hint"]
    created = await fail(agent, "sandbox_create", name="none", image=f"{registry.host}/team/none")
    assert created["code"] == "image_not_found"


async def test_a_mode_brings_the_project_and_the_hosts_of_its_agent(agent: Client, project: Path) -> None:
    script = "cat readme; echo new > made; echo evil > .git/hooks/pre-commit; echo more >> .envrc; mkdir .claude .idea"
    (project / ".envrc").write_text("ours\n")  # after the server was started
    run = await call(agent, "sandbox_run", command=["bash", "-c", script], compatibility_mode="claude", image="host")
    assert run["stdout"] == "of the project\n"
    [note] = run["notes"]
    assert note.startswith(".idea is new in the project")
    (project / ".idea").rmdir()
    assert (project / "made").read_text() == "new\n"
    assert list((project / ".git" / "hooks").iterdir()) == []
    assert (project / ".envrc").read_text() == "ours\n"
    wait_until(lambda: remove(project / ".envrc"))  # not before its sandbox is gone
    made = await call(agent, "sandbox_create", name="codex", compatibility_mode="codex", image="host")
    policy = made["policy"]
    assert {"api.openai.com", "cdn.openai.com"} <= set(policy["allowed_hosts"])
    assert (policy["read_only"], policy["powerless"]) == (True, True)
    assert [mount["source"] for mount in policy["mounts"]] == [str(project)]
    strict = await call(
        agent, "sandbox_exec", name="codex", command=["bash", "-c", "touch /workspace/ok; touch /usr/no; touch /no"]
    )
    assert strict["exit_code"] != 0
    assert (project / "ok").exists()
    await call(agent, "sandbox_remove", name="codex")


async def test_without_a_wish_it_is_the_whole_network_and_no_folder(agent: Client) -> None:
    """As the first rows of both tables have it; metadata services stay closed."""
    made = await call(agent, "sandbox_create", name="plain", image="host")
    assert made["policy"]["allowed_hosts"] == ["*"]
    assert "mounts" not in made["policy"]
    script = "import socket\ntry: socket.getaddrinfo('metadata.google.internal', 80)\nexcept OSError: print('none')"
    run = await call(agent, "sandbox_exec", name="plain", command=["python3", "-c", script])
    assert (run["stdout"], [each["host"] for each in run["denied"]]) == ("none\n", ["metadata.google.internal"])
    await call(agent, "sandbox_remove", name="plain")


async def test_restrictive_has_no_network_and_writes_nothing_but_tmp(agent: Client) -> None:
    script = "import socket, pathlib\npathlib.Path('/tmp/yes').touch()\n"
    script += "for path in ('/no', '/workspace/no', '/usr/no'):\n  try: open(path, 'w'); print('written', path)\n"
    script += "  except OSError: pass\ntry: socket.getaddrinfo('refused.example', 443)\nexcept OSError: print('none')\n"
    run = await call(agent, "sandbox_run", command=["python3", "-c", script], profile="restrictive", image="host")
    assert (run["stdout"], run["exit_code"]) == ("none\n", 0), run
    assert [each["host"] for each in run["denied"]] == ["refused.example"]


async def test_no_network_is_none(agent: Client) -> None:
    script = "import socket\ntry: socket.getaddrinfo('api.anthropic.com', 443)\nexcept OSError: print('none')"
    run = await call(
        agent,
        "sandbox_run",
        command=["python3", "-c", script],
        network=False,
        compatibility_mode="claude",
        image="host",
    )
    assert run["stdout"] == "none\n"
    assert [each["host"] for each in run["denied"]] == ["api.anthropic.com"]


async def test_permissive_is_for_a_person_to_allow(machine: Machine, agent: Client, project: Path) -> None:
    for tool, arguments in (("sandbox_run", {"command": ["id"]}), ("sandbox_create", {"name": "wide"})):
        problem = await fail(agent, tool, **arguments, profile="permissive", image="host")
        assert (problem["code"], problem["field"]) == ("permissive_refused", "profile")
        assert "--allow-permissive" in problem["hint"]
    assert (await call(agent, "sandbox_list"))["sandboxes"] == []
    (machine.home / ".ssh").mkdir(exist_ok=True)
    (machine.home / ".ssh" / "id_ed25519").write_text("secret")
    (machine.home / "notes").write_text("at home\n")
    env = {"COLOUR": "blue", "GITHUB_TOKEN": "ghp_x"}
    async with kernel_agent(machine, project, "--allow-permissive", **env) as allowed:
        script = 'cat readme ~/notes; echo "$COLOUR,$GITHUB_TOKEN"; ls -A ~/.ssh 2>/dev/null; true'
        run = await call(
            allowed, "sandbox_run", command=["bash", "-c", script], profile="permissive", network=False, image="host"
        )
    assert run["stdout"] == "of the project\nat home\nblue,\n"


async def test_a_sandbox_by_name_lasts(machine: Machine, agent: Client, project: Path) -> None:
    made = await call(agent, "sandbox_create", name="dev", network=False, image="host")
    assert (made["name"], made["state"], made["session_id"]) == ("dev", "running", "dev")
    assert (await fail(agent, "sandbox_create", name="dev", network=False, image="host"))["code"] == "session_exists"
    data = base64.b64encode(b"\xff\0").decode()
    await call(agent, "sandbox_file_write", name="dev", path="data", content=data, encoding="base64")
    run = await call(
        agent, "sandbox_exec", name="dev", command=["od", "-tx1", "data"], cwd="/workspace", timeout_ms=9000
    )
    assert "ff 00" in run["stdout"]
    for _ in range(2):  # the same done twice is the same
        assert await call(agent, "sandbox_stop", name="dev") == {"name": "dev", "state": "stopped"}
    problem = await fail(agent, "sandbox_exec", name="dev", command=["true"])
    assert (problem["code"], problem["hint"]) == ("session_stopped", "Its files are kept. Start it with sandbox_start.")
    [listed] = (await call(agent, "sandbox_list"))["sandboxes"]
    assert (listed["name"], listed["state"], listed["image"], listed["profile"]) == (
        "dev",
        "stopped",
        "host",
        "moderate",
    )
    async with kernel_agent(machine, project) as other:  # the user's next agent
        assert [each["name"] for each in (await call(other, "sandbox_list"))["sandboxes"]] == ["dev"]
        for _ in range(2):
            assert await call(other, "sandbox_start", name="dev") == {"name": "dev", "state": "running"}
        found = await call(other, "sandbox_file_read", name="dev", path="data", encoding="base64")
        assert (found["content"], found["encoding"]) == (data, "base64")
    assert await call(agent, "sandbox_remove", name="dev") == {"ok": True}
    assert (await fail(agent, "sandbox_start", name="dev"))["code"] == "session_not_found"


async def test_only_what_is_its_own_is_seen(machine: Machine, agent: Client) -> None:
    """It does not see what the same user made otherwise, though it is in the same tenant."""
    mine = machine.k8e("sandbox", "create", "--session-id", "private", "--runtime", "native").json["session_id"]
    for tool, arguments in (
        ("sandbox_exec", {"command": ["id"]}),
        ("sandbox_remove", {}),
        ("sandbox_stop", {}),
        ("sandbox_file_read", {"path": "x"}),
        ("sandbox_file_write", {"path": "x", "content": ""}),
    ):
        assert (await fail(agent, tool, name=mine, **arguments))["code"] == "session_not_found"
    assert (await call(agent, "sandbox_list"))["sandboxes"] == []
    assert mine in machine.live_sessions()
    machine.k8e("sandbox", "destroy", mine)


@pytest.mark.parametrize(
    ("tool", "arguments", "field"),
    [
        ("sandbox_run", {}, "command"),
        ("sandbox_run", {"command": "id"}, "command"),
        ("sandbox_run", {"command": []}, "command"),
        ("sandbox_run", {"command": ["id"], "image": "-v/:/host"}, "image"),
        ("sandbox_run", {"command": ["id"], "image": "../../etc"}, "image"),
        ("sandbox_run", {"command": ["id"], "profile": "--privileged"}, "profile"),
        ("sandbox_run", {"command": ["id"], "compatibility_mode": "root"}, "compatibility_mode"),
        ("sandbox_run", {"command": ["id"], "network": "host"}, "network"),
        ("sandbox_run", {"command": ["id"], "image": "host", "env": {"--privileged": "1"}}, "env"),
        ("sandbox_run", {"command": ["id"], "image": "host", "env": {"A=B": "1"}}, "env"),
        ("sandbox_run", {"command": ["id"], "image": "host", "cwd": "x\0"}, "cwd"),
        ("sandbox_run", {"command": ["id"], "image": "host", "timeout_ms": -1}, "timeout"),
        ("sandbox_run", {"command": ["id"], "mounts": ["/:/host"]}, "mounts"),
        ("sandbox_run", {"command": ["id"], "code": "id"}, "code"),
        ("sandbox_run", {"command": "ls -la"}, "command"),
        ("sandbox_create", {"name": "../../x"}, "name"),
        ("sandbox_create", {"name": "-v"}, "name"),
        ("sandbox_create", {"name": "a b"}, "name"),
        ("sandbox_create", {"name": ""}, "name"),
        ("sandbox_create", {"name": "ok", "image": "-v/:/host"}, "image"),
        ("sandbox_remove", {"name": "../../x"}, "name"),
        ("sandbox_exec", {"name": "x"}, "command"),
        ("sandbox_exec", {"name": "../../x", "command": ["id"]}, "name"),
        ("sandbox_stop", {"name": "/"}, "name"),
    ],
)
async def test_a_mistake_names_its_field_and_changes_nothing(
    machine: Machine, agent: Client, project: Path, tool: str, arguments: dict[str, Any], field: str
) -> None:
    before = list_tree(project)
    problem = await fail(agent, tool, **arguments)
    assert (problem["code"], problem["field"]) == ("invalid_argument", field)
    wait_until(lambda: machine.live_sessions() == [])
    assert list_tree(project) == before


async def test_a_directory_that_is_not_there_is_said_to_be(agent: Client) -> None:
    run = await agent.call_tool(
        "sandbox_run", {"command": ["id"], "image": "host", "network": False, "cwd": "../../../nowhere"}
    )
    assert run.is_error
    problem = json.loads(run.content[0].text)  # type: ignore[union-attr]
    assert (problem["code"], problem["field"]) == ("workdir_not_found", "cwd")
    assert problem["detail"] == "'/workspace/../../../nowhere': No such file or directory"


async def test_a_home_is_no_project(machine: Machine) -> None:
    async with kernel_agent(machine, machine.home) as agent:
        problem = await fail(agent, "sandbox_run", command=["id"], compatibility_mode="claude", image="host")
        assert (problem["code"], problem["field"]) == ("project_refused", "compatibility_mode")


async def test_a_temporary_sandbox_is_gone_with_a_client_that_leaves(machine: Machine, project: Path) -> None:
    arguments = {"command": ["sleep", "543"], "image": "host", "network": False, "timeout_ms": 600_000}
    message = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "sandbox_run", "arguments": arguments},
    }
    with machine.start("sandbox-mcp", stderr=None) as process:
        agent = Pipes(process)
        agent.start()
        agent.write(message)
        wait_until(lambda: len(machine.live_sessions()) == 1)
        process.kill()
    wait_until(lambda: machine.live_sessions() == [])


def test_over_a_gateway_there_is_no_project(machine: Machine) -> None:
    env = {"K8E_SANDBOX_ENDPOINT": "127.0.0.1:1"}
    done = subprocess.run(
        [AGENTKERNEL, "mcp", "server"], input=b"", capture_output=True, env={**machine.env, **env}, cwd=machine.home
    )
    assert (done.returncode, done.stdout, json.loads(done.stderr)["code"]) == (1, b"", "mcp_not_remote")
