"""Servers in a sandbox that are reached from outside, and `agentkernel ps` meanwhile: on both runtimes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cli.agentkernel.ports import Port, accept, listen, stop
from tests.agentkernel.house import AGENTKERNEL, House
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import DEADLINE, Machine, wait_until
from tests.sandboxes import needs_root

pytestmark = needs_root
RUN = ("run", "--image", "host", "--no-network", "-p", "0:8000")

# Answers each connection with what it was sent, reversed, once the client has sent all; `large`: 8 MiB; `cut`: nothing.
SERVER = r"""
import socket, sys, threading
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 8000), family=family, backlog=128)
def answer(client):
    content = b""
    while piece := client.recv(65536):
        content += piece
    if content == b"large":
        content = bytes(8 << 20)
    if content == b"where":
        content = "|".join(map(attempt, sys.argv[2:])).encode()
    client.sendall(content[::-1])
    client.close()
def attempt(target):
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
        return "reached"
    except OSError as error:
        return "refused"
print("ready", flush=True)
while True:
    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module", params=["gvisor", "native"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with open_machine(request.param) as machine:
        yield machine


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> House:
    return House(machine.folder, tmp_path)


@contextlib.contextmanager
def running(house: House, *command: str, descriptors: int = 1024) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A command in a sandbox without a network, which has said that it is there: the machine's port that leads to its
    port 8000, and the client."""
    with subprocess.Popen(
        [
            "prlimit",
            f"--nofile={descriptors}",
            AGENTKERNEL,
            "run",
            "--image",
            "host",
            "--no-network",
            "-p",
            "0:8000",
            *command,
        ],
        env=house.env,
        cwd=house.project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout
            assert process.stderr
            line = process.stderr.readline()
            found = re.fullmatch(rb"agentkernel: \S+:(\d+) leads to port 8000 of the sandbox\n", line)
            assert found, line
            assert process.stdout.readline() == b"ready\n"
            yield int(found[1]), process
        finally:
            process.kill()
            process.wait(DEADLINE)


@contextlib.contextmanager
def serving(
    house: House, *words: str, address: str = "127.0.0.1", descriptors: int = 1024
) -> Iterator[tuple[int, int]]:
    """A server in a sandbox: its port on the machine, and the client's process."""
    with running(house, "python3", "-c", SERVER, address, *words, descriptors=descriptors) as (port, process):
        yield port, process.pid
        process.terminate()
        assert process.wait(DEADLINE) in (128 + signal.SIGTERM, -signal.SIGKILL)


def ask(port: int, content: bytes, address: str = "127.0.0.1") -> bytes:
    with socket.create_connection((address, port), DEADLINE) as client:
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        pieces = []
        while piece := client.recv(1 << 20):
            pieces.append(piece)
        return b"".join(pieces)


def test_a_server_is_reached_and_reaches_nothing(house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        reachable = f"127.0.0.1:{own.getsockname()[1]}"
        with serving(house, "127.0.0.1:8000", reachable, "192.0.2.1:80") as (port, _):
            assert ask(port, b"abc") == b"cba"
            content = os.urandom(3 << 20)
            assert hashlib.sha256(ask(port, content)).digest() == hashlib.sha256(content[::-1]).digest()
            assert ask(port, b"large") == bytes(8 << 20)
            # Its own port, and neither the machine's loopback, where the client listens, nor anything else.
            assert ask(port, b"where")[::-1] == b"reached|refused|refused"
            with contextlib.ExitStack() as crowd:
                clients = [
                    crowd.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)) for _ in range(20)
                ]
                for number, client in enumerate(clients):
                    client.sendall(b"<%d" % number)
                    client.shutdown(socket.SHUT_WR)
                assert [client.recv(100)[::-1] for client in clients] == [b"<%d" % number for number in range(20)]
            (listed,) = house.object("ps")["sandboxes"]
            assert (listed["image"], listed["state"], listed["persistent"]) == ("host", "running", False)
            assert [each["command"] for each in listed["commands"]] == ["python3"]
            assert f"{listed['name']}  host   {listed['runtime']}" in house.ok("ps")
    wait_until(lambda: house.object("ps") == {"sandboxes": []})


def test_without_a_server_a_client_is_told_and_nothing_is_left(house: House) -> None:
    """Also with a client that is killed while a connection is open."""
    with serving(house, address="::1") as (port, pid):
        assert ask(port, b"abc") == b"cba"
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as client:
            client.sendall(b"not all yet")
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    wait_until(lambda: house.object("ps") == {"sandboxes": []})
    with running(house, "sh", "-c", "echo ready; cat") as (port, process):
        with pytest.raises(OSError):  # noqa: PT011 - whichever step of it the reset meets
            ask(port, b"abc")
        assert process.stdin
        process.stdin.close()
        assert process.wait(DEADLINE) == 0


def test_clients_beyond_the_descriptors_do_not_close_the_port(house: House) -> None:
    with serving(house, descriptors=48) as (port, _):
        assert ask(port, b"abc") == b"cba"
        with contextlib.ExitStack() as crowd:
            for _ in range(60):
                crowd.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE))

        def is_served() -> bool:
            try:
                return ask(port, b"abc") == b"cba"
            except ConnectionError:
                return False  # while the crowd goes

        wait_until(is_served)


def test_a_client_beyond_the_limit_is_reset_at_once() -> None:
    room = threading.Semaphore(0)
    listener = listen(Port("127.0.0.1", 0, 8000))
    accepting = threading.Thread(target=accept, args=(listener, "none", 8000, room))
    accepting.start()
    try:
        for _ in range(2):
            with pytest.raises(OSError) as reset:  # noqa: PT011 - whichever step of it the reset meets
                ask(listener.getsockname()[1], b"abc")
            assert not isinstance(reset.value, TimeoutError)
    finally:
        stop(listener, socket.SHUT_RDWR)
        accepting.join(DEADLINE)
        listener.close()
    assert not accepting.is_alive(), "it ends with its socket"


def test_over_http(house: House) -> None:
    """As any client of the socket has it."""
    with serving(house) as (_, _):
        (listed,) = house.object("ps")["sandboxes"]
        target = f"http://localhost/v1/sessions/{listed['name']}/ports"
        curl = ["curl", "-sS", "--unix-socket", str(house.folder / "r" / "k8e.sock"), "-H", "Expect:"]
        curl += ["-H", "Content-Type: application/octet-stream", "--data-binary", "abc"]
        assert subprocess.run([*curl, f"{target}/8000"], capture_output=True, check=True).stdout == b"cba"
        for port, code in (("8001", "port_closed"), ("0", "invalid_argument"), ("x", "invalid_argument")):
            done = subprocess.run([*curl, f"{target}/{port}"], capture_output=True, check=True)
            assert json.loads(done.stdout)["code"] == code
        done = subprocess.run([*curl, target.replace(listed["name"], "other") + "/80"], capture_output=True, check=True)
        assert json.loads(done.stdout)["code"] == "session_not_found"
