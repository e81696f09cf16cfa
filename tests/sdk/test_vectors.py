"""The list that drives both SDKs (sdk/vectors.json), here with both clients of the Python one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import sandbox_client
from sandbox_client import AsyncSandboxClient, SandboxClient
from tests.sdk.test_texts import COMMAND

VECTORS = json.loads((Path(__file__).resolve().parent.parent.parent / "sdk" / "vectors.json").read_text())
RUNS, FILES, ERRORS = VECTORS["runs"], VECTORS["files"], VECTORS["errors"]
APPROVALS, CHILDREN, LASTING = VECTORS["approvals"], VECTORS["children"], VECTORS["lasting"]
Vector = dict[str, Any]


def named(vectors: list[Vector]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


def options_of(vector: Vector) -> dict[str, Any]:
    options = {key: vector[key] for key in ("language", "timeout", "env", "workdir") if key in vector}
    return options | ({"stdin": base64.b64decode(vector["stdin"])} if "stdin" in vector else {})


def check_run(vector: Vector, result: sandbox_client.RunResult) -> None:
    assert (result.exit_code, result.status) == (vector["exit_code"], vector["status"])
    if vector.get("truncated"):
        assert result.truncated
        assert result.stdout_bytes == vector["stdout_bytes"]
        return
    stdout, stderr = base64.b64decode(vector["stdout"]), base64.b64decode(vector["stderr"])
    assert (result.raw_stdout, result.raw_stderr) == (stdout, stderr)
    assert (result.stdout, result.stderr) == (stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (len(stdout), len(stderr), False)


@named(RUNS)
def test_a_run(client: SandboxClient, session: str, vector: Vector) -> None:
    check_run(vector, client.exec(session, vector["code"], **options_of(vector)))


@named(RUNS)
async def test_a_run_awaited(async_client: AsyncSandboxClient, session: str, vector: Vector) -> None:
    check_run(vector, await async_client.exec(session, vector["code"], **options_of(vector)))


def check_pieces(vector: Vector, chunks: list[sandbox_client.Chunk], result: sandbox_client.RunResult) -> None:
    pieces = {stream: [chunk for chunk in chunks if chunk.stream == stream] for stream in ("stdout", "stderr")}
    for stream, expected in (("stdout", vector["stdout"]), ("stderr", vector["stderr"])):
        data = b"".join(chunk.data for chunk in pieces[stream])
        if vector.get("truncated") and stream == "stdout":
            assert len(data) == vector["stdout_bytes"]
            continue
        assert data == base64.b64decode(expected)
        assert "".join(pieces[stream]) == data.decode("utf-8", "replace")
    assert (result.exit_code, result.status) == (vector["exit_code"], vector["status"])


@named(RUNS)
def test_a_live_run(client: SandboxClient, session: str, vector: Vector) -> None:
    stream = client.exec_stream(session, vector["code"], **options_of(vector))
    check_pieces(vector, list(stream), stream.result)


@named(RUNS)
async def test_a_live_run_awaited(async_client: AsyncSandboxClient, session: str, vector: Vector) -> None:
    stream = async_client.exec_stream(session, vector["code"], **options_of(vector))
    check_pieces(vector, [chunk async for chunk in stream], stream.result)


@named(FILES)
def test_a_file(client: SandboxClient, session: str, vector: Vector) -> None:
    content = base64.b64decode(vector["content"]) * vector.get("repeat", 1)
    assert client.write_file(session, vector["path"], content) == len(content)
    assert client.read_bytes(session, vector["path"]) == content
    if "text" in vector:
        assert client.read_file(session, vector["path"]) == vector["text"]
        assert client.write_file(session, vector["path"], vector["text"], "a") == len(content)
        assert client.read_file(session, vector["path"]) == vector["text"] * 2
    assert len([info for info in client.list_files(session) if info.path.endswith(vector["path"])]) == 1
    client.exec(session, ["/usr/bin/rm", "--", vector["path"]])


@named(FILES)
async def test_a_file_awaited(async_client: AsyncSandboxClient, session: str, vector: Vector) -> None:
    content = base64.b64decode(vector["content"]) * vector.get("repeat", 1)
    assert await async_client.write_file(session, vector["path"], content) == len(content)
    assert await async_client.read_bytes(session, vector["path"]) == content
    await async_client.exec(session, ["/usr/bin/rm", "--", vector["path"]])


@pytest.fixture(scope="module")
def boss(admin: tuple[str, str]) -> Iterator[SandboxClient]:
    endpoint, key = admin
    with SandboxClient(endpoint, api_key=key) as made:
        yield made


def check_approval(vector: Vector, settled: sandbox_client.Approval) -> None:
    assert (settled.status, settled.approved) == (vector["status"], vector["status"] == "approved")
    assert (settled.action, settled.reason) == (vector["shown"], vector.get("reason", ""))
    assert bool(settled.answered_by) == bool(settled.answered_at) == ("answer" in vector)


@named(APPROVALS)
def test_an_approval(client: SandboxClient, boss: SandboxClient, session: str, vector: Vector) -> None:
    asked = client.confirm_action(session, vector["action"], 0, expires_in=vector.get("expires_in", 0))
    assert (asked.status, asked.approved, asked.action, asked.session_id) == (
        "pending",
        False,
        vector["shown"],
        session,
    )
    if "answer" in vector:
        assert asked in client.list_approvals()
        with pytest.raises(sandbox_client.PermissionDenied):
            client.approve_action(asked.approval_id)
        boss.approve_action(asked.approval_id, vector["answer"], reason=vector["reason"])
        with pytest.raises(sandbox_client.Conflict):
            boss.approve_action(asked.approval_id, not vector["answer"])
    settled = client.await_approval(asked.approval_id, 20)
    check_approval(vector, settled)
    assert settled.approval_id not in [one.approval_id for one in client.list_approvals()]
    assert settled in client.list_approvals(all_states=True)


@named(APPROVALS)
async def test_an_approval_awaited(
    async_client: AsyncSandboxClient, boss: SandboxClient, session: str, vector: Vector
) -> None:
    """Somebody waits in the call that asks."""
    asking = asyncio.create_task(
        async_client.confirm_action(session, vector["action"], 20, expires_in=vector.get("expires_in", 20))
    )
    if "answer" in vector:
        while not (pending := await async_client.list_approvals()):
            pass
        await asyncio.to_thread(boss.approve_action, pending[0].approval_id, vector["answer"], reason=vector["reason"])
    check_approval(vector, await asking)


def child_options(vector: Vector) -> dict[str, Any]:
    names = ("agent_type", "workspace_path", "allowed_hosts", "memory", "cpus", "env", "read_only", "powerless")
    return {name: vector[name] for name in names if name in vector}


@named(CHILDREN)
def test_a_child(client: SandboxClient, session: str, vector: Vector) -> None:
    client.write_file(session, "shared", "the parent's\n")
    child = client.run_subagent(session, **child_options(vector))
    assert (client.get_session(child).parent_session_id, client.get_session(session).children) == (session, (child,))
    assert client.exec(child, vector["code"]).raw_stdout == base64.b64decode(vector["stdout"])
    with pytest.raises(sandbox_client.PermissionDenied, match="child itself"):
        client.run_subagent(child)
    client.destroy_session(child)


async def test_a_child_awaited(async_client: AsyncSandboxClient, session: str) -> None:
    child = await async_client.run_subagent(session, "reviewer", "part")
    assert (await async_client.exec(child, "pwd")).stdout == "/workspace/part\n"
    await async_client.destroy_session(child)


@named(LASTING)
def test_a_session_that_lasts(client: SandboxClient, runtime: str, vector: Vector) -> None:
    secrets, labels = vector.get("secrets", {}), vector.get("labels", {})
    made = client.create_session(runtime, persistent=True, env=vector["env"], secrets=secrets, labels=labels)
    try:
        shown = client.get_session(made)
        assert (shown.persistent, shown.labels, shown.secret_keys) == (True, labels, tuple(secrets))
        assert client.exec(made, vector["before"]).raw_stdout == base64.b64decode(vector["before_stdout"])
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(client.exec, made, "touch begun; sleep 1000", 600)
            client.exec(made, "until [ -e begun ]; do sleep 0.05; done")
            assert client.stop_session(made).phase == "stopped"
            assert (ended.result().status, bool(ended.result().reason)) == ("killed", True)
        assert client.stop_session(made).phase == "stopped"
        with pytest.raises(sandbox_client.Conflict, match="stopped"):
            client.exec(made, "true")
        if secrets:
            with pytest.raises(sandbox_client.InvalidArgument) as caught:
                client.start_session(made)
            assert (caught.value.code, caught.value.field) == ("secrets_missing", "secrets")
        assert client.start_session(made, env=vector.get("start_env"), secrets=secrets).phase == "active"
        assert client.exec(made, vector["after"]).raw_stdout == base64.b64decode(vector["after_stdout"])
    finally:
        client.destroy_session(made)


async def test_a_session_that_lasts_awaited(async_client: AsyncSandboxClient, runtime: str) -> None:
    made = await async_client.create_session(runtime, persistent=True)
    assert (await async_client.stop_session(made)).phase == "stopped"
    assert (await async_client.start_session(made)).phase == "active"
    await async_client.destroy_session(made)
    assert await async_client.list_images() == []


def test_of_namesakes_one_tenants_are_meant(admin: tuple[str, str], boss: SandboxClient, runtime: str) -> None:
    twins = VECTORS["namesakes"]
    name = twins["session_id"]
    each = {tenant: SandboxClient(admin[0], tenant, api_key=admin[1], only_tenant=True) for tenant in twins["tenants"]}
    for tenant, one in each.items():
        assert one.create_session(runtime, session_id=name) == name
        one.write_file(name, "who", tenant)
    with pytest.raises(getattr(sandbox_client, twins["error"])) as caught:
        boss.get_session(name)
    assert caught.value.code == twins["code"]
    for tenant, one in each.items():
        assert [session.tenant_id for session in one.list_sessions()] == [tenant]
        assert one.read_file(name, "who") == tenant
        assert one.exec(name, "cat who").stdout == tenant
        assert "".join(one.exec_stream(name, "cat who")) == tenant
        one.destroy_session(name)
        one.close()


@named(ERRORS)
def test_a_mistake(client: SandboxClient, session: str, runtime: str, vector: Vector) -> None:
    with pytest.raises(sandbox_client.SandboxError) as caught:
        match vector["call"]:
            case "exec":
                command = vector.get("argv", "true")
                client.exec(vector.get("session", session), command, vector.get("timeout", 30))
            case "approve":
                client.approve_action(vector["approval"])
            case "confirm":
                client.confirm_action(session, vector["action"], 0)
            case "poll":
                client.poll(vector["run"])
            case "read":
                client.read_file(session, vector["path"])
            case "stop":
                client.stop_session(vector.get("session", session))
            case "start":
                client.start_session(vector.get("session", session), env=vector.get("env"))
            case "subagent":
                client.run_subagent(vector.get("session", session), **child_options(vector))
            case _:
                options = {"session_id": vector.get("session_id", "")}
                client.create_session(vector.get("runtime", runtime), vector.get("allowed_hosts"), **options)
    assert type(caught.value).__name__ == vector["error"]
    assert caught.value.code == vector["code"]
    assert caught.value.field == vector.get("field", caught.value.field)
    assert not COMMAND.search(caught.value.hint)


@pytest.fixture
async def async_client(machine: object) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient() as made:
        yield made
