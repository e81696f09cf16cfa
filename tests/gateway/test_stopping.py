"""A daemon that is stopped, or killed, while commands run: every client is told, and so is the record."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e.core.access.access import Payer
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.grpc.connection import Connection
from k8e.doors.grpc.proxy import Proxy
from k8e.doors.request_memory import RequestMemory
from sandbox_client import OutcomeUnknown, RunLost, SandboxClient, Unavailable
from tests.cli.machine import Machine, run_launcher, wait_until
from tests.gateway.house import House, make_machine
from tests.gateway.test_silence import Remote, clear_up, remote  # noqa: F401 - a fixture

STOPPED = "the daemon was stopped, and ends foreground runs with itself"


@pytest.fixture
def machine() -> Iterator[Machine]:
    with make_machine() as machine:
        try:
            yield machine
        finally:
            clear_up(machine)


def test_a_stop_is_told_as_what_ended_the_command(machine: Machine, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(3) as pool, run_launcher(machine):
            house = House(machine)
            session = machine.run("true").json["session_id"]
            words = ("sandbox", "run", "--timeout", "1000", "--session-id", session)
            whole = stack.enter_context(machine.start(*words, "echo out; touch whole; sleep 1000"))
            raw = stack.enter_context(machine.start(*words, "echo out; touch raw; sleep 1000", "--raw"))
            far = Machine(tmp_path, tmp_path)
            key = house.make_key("far", scope="admin")
            far.overrides.update(K8E_SANDBOX_ENDPOINT=house.endpoint, K8E_SANDBOX_APIKEY=key)
            remote_raw = stack.enter_context(far.start(*words, "touch far; sleep 1000", "--raw"))
            client = SandboxClient(house.endpoint, api_key=key)
            live = client.exec_stream(session, "touch live; sleep 1000", 1000)
            chunks = pool.submit(list, live)
            running = pool.submit(client.exec, session, "echo out; touch library; sleep 1000", 1000)
            own = pool.submit(client.exec, session, "kill -TERM $$")
            assert (own.result().status, own.result().exit_code, own.result().reason) == ("killed", 143, "")
            started = {"whole", "raw", "far", "library", "live"}
            wait_until(lambda: started <= set(machine.run("ls", "--session-id", session).json["stdout"].split()))
        said, _ = whole.communicate(timeout=60)
        answer = json.loads(said)
        assert (whole.returncode, answer["status"], answer["exit_code"]) == (143, "killed", 143)
        assert (answer["reason"], answer["stdout"]) == (STOPPED, "out\n")
        said, told = raw.communicate(timeout=60)
        assert (raw.returncode, said, told) == (143, b"out\n", f"k8e: {STOPPED}\n".encode())
        _, told = remote_raw.communicate(timeout=60)
        assert (remote_raw.returncode, told) == (143, f"k8e: {STOPPED}\n".encode())
        result = running.result()
        assert (result.status, result.exit_code, result.reason, result.stdout) == ("killed", 143, STOPPED, "out\n")
        assert chunks.result() == []
        assert (live.result.status, live.result.exit_code, live.result.reason) == ("killed", 143, STOPPED)
        client.close()
    with run_launcher(machine):
        runs = machine.k8e("sandbox", "log", session).json["runs"]
        reasons = sorted(run.get("reason", "") for run in runs if run["exit_code"] == 143)
        assert reasons == ["", *[STOPPED] * 5]


def test_what_a_killed_daemon_ran_has_that_reason_on_record(machine: Machine) -> None:
    """The next daemon ends it; the id that the caller was told leads to it."""
    with run_launcher(machine) as daemon:
        house = House(machine)
        session = machine.run("true").json["session_id"]
        with SandboxClient(house.endpoint, api_key=house.make_key("far", scope="admin")) as client:
            stream = client.exec_stream(session, "echo ready; sleep 1000", 1000)
            chunks = iter(stream)
            assert next(chunks) == "ready\n"
            daemon.kill()
            daemon.wait()
            daemon.returncode = 0  # as expected
            with pytest.raises(RunLost) as lost:
                list(chunks)
    with run_launcher(machine):
        run = machine.k8e("sandbox", "poll", lost.value.run_id).json
        assert (run["run_id"], run["status"] in ("killed", "lost")) == (stream.run_id, True)
        assert run["reason"].startswith("the daemon that ran it ended without stopping")


def find_code(client: SandboxClient) -> str:
    with pytest.raises(Unavailable) as caught:
        client.status()
    return caught.value.code


def test_the_library_says_what_may_have_been_done(remote: Remote) -> None:  # noqa: F811
    """A change whose answer is lost, a run with its id, and a question that is lost without harm."""
    with SandboxClient(remote.house.endpoint, "acme", api_key=remote.key) as client, ThreadPoolExecutor(2) as pool:
        stream = client.exec_stream(remote.session, "echo ready; sleep 1000", 1000)
        chunks = iter(stream)
        assert next(chunks) == "ready\n"
        assert stream.run_id
        change = pool.submit(client.confirm_action, remote.session, "delete the data", 60)
        wait_until(lambda: bool(client.list_approvals()))
        (approval,) = client.list_approvals()
        question = pool.submit(client.await_approval, approval.approval_id, 60)
        remote.kill()
        with pytest.raises(OutcomeUnknown) as unknown:
            change.result()
        assert (unknown.value.code, isinstance(unknown.value, RunLost)) == ("connection_lost", False)
        with pytest.raises(RunLost) as lost:
            list(chunks)
        assert (lost.value.code, lost.value.run_id) == ("run_lost", stream.run_id)
        with pytest.raises(Unavailable):
            question.result()
        wait_until(lambda: find_code(client) == "unreachable")  # by a question, which may be lost
        with pytest.raises(Unavailable) as unreachable:
            client.write_file(remote.session, "x", "x")
        assert unreachable.value.code == "unreachable"
        assert all("k8e sandbox" not in error.value.hint for error in (unknown, lost, unreachable))


def test_a_command_ends_without_pythons_own_end(remote: Remote, tmp_path: Path) -> None:  # noqa: F811
    """In which gRPC's threads can hang it, and which takes time. What it printed is whole."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\natexit.register(lambda: open(os.environ['WITNESS'], 'w').close())\n"
    )
    witness = tmp_path / "witness"
    env = {"PYTHONPATH": str(tmp_path), "WITNESS": str(witness)}
    for machine in (remote.machine, remote.far):
        done = machine.k8e("sandbox", "sessions", env=env)
        assert done.json["sessions"]
        assert (done.code, witness.exists()) == (0, False)
    subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **env}, check=True)
    assert witness.exists(), "Python's own end is seen"


LAST = bytes(range(256)) * (2 << 10)  # more than the buffers on the way hold


@pytest.fixture
async def way(tmp_path: Path) -> AsyncIterator[tuple[Proxy, Connection, socket.socket, socket.socket]]:
    """An authenticated client's connection through the proxy, and its end where gRPC would be."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as inside, socket.create_server(("127.0.0.1", 0)) as listener:
        inside.bind(str(tmp_path / "grpc.sock"))
        inside.listen()
        inside.setblocking(False)
        proxy = Proxy(listener, str(tmp_path / "grpc.sock"), ConnectionLimits(), RequestMemory())
        proxy.open()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"question")
            grpc_end, _ = await loop.sock_accept(inside)
            with grpc_end:
                assert await loop.sock_recv(grpc_end, 100) == b"question"
                (connection,) = proxy._connections.values()
                assert connection.authenticate(Payer(-1, "acme"))
                yield proxy, connection, client, grpc_end
        proxy.close()
        await proxy.finish()


async def read_all(client: socket.socket) -> bytes:
    pieces = []
    while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


async def test_a_client_that_reads_slowly_has_its_answer_before_the_daemon_ends(
    way: tuple[Proxy, Connection, socket.socket, socket.socket],
) -> None:
    proxy, _, client, grpc_end = way
    await asyncio.get_running_loop().sock_sendall(grpc_end, LAST)
    grpc_end.close()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(proxy.finish())
        assert await read_all(client) == LAST


async def test_the_last_bytes_arrive_although_the_client_is_sending(
    way: tuple[Proxy, Connection, socket.socket, socket.socket],
) -> None:
    """What it sends cannot be forwarded any more, and was taken for the end of both directions."""
    _, connection, client, grpc_end = way
    connection._outer.pause_writing()  # as a client that does not read at the moment
    grpc_end.sendall(b"answer")
    grpc_end.close()
    client.sendall(b"window update")
    async with asyncio.timeout(60):
        assert await read_all(client) == b"answer"
