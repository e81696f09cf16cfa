"""A sandbox that is allowed nothing has its own loopback and its resolver. Every target is this machine's: nothing is
sent to a foreign address."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator

import pytest

from k8e.engine import Observation, Refusal
from k8e.engine.local.network.network import Attachment
from k8e.link.model import AGENT, ExecOptions
from tests.engine.rig import ROOT, Rig, Room

EVERYBODY = pytest.mark.parametrize(
    "options", [{}, {"identity": ROOT}, {"identity": AGENT, "keep_capabilities": True}], ids=["user", "root", "agent"]
)


class Visited:
    """A listener of the host that counts who came."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.visits = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.visits += 1
            connection.sendall(b"hello")
            connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.listener.close()


@pytest.fixture
def host_service() -> Iterator[Visited]:
    """On every address of the machine, IPv4 and IPv6."""
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    service = Visited(listener)
    yield service
    service.close()


def own_addresses() -> list[str]:
    """The machine's, as it would use them itself. Asking which one leads to an address sends nothing."""
    found = ["127.0.0.1", "::1"]
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            found.append(probe.getsockname()[0])
    return found


async def test_only_loopback_and_one_wire_are_there(room: Room) -> None:
    code = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
    done = await room.python(code)
    assert done.stdout == b"['k8e0', 'lo']\n", done


async def test_all_routes_lead_along_the_wire(room: Room) -> None:
    code = """
for line in open("/proc/net/route").read().splitlines()[1:]:
    print(line.split()[0])
"""
    done = await room.python(code)
    assert set(done.stdout.split()) == {b"k8e0"}, done


VISIT = """
import socket, sys
port = int(sys.argv[1])
for address in sys.argv[2:]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as s:
            s.settimeout(20)
            try:
                s.connect((address, port))
                s.send(b"x")
            except OSError as error:
                continue
            if kind == socket.SOCK_STREAM:
                print("reached", address)
"""


@EVERYBODY
async def test_services_of_the_host_cannot_be_reached(room: Room, host_service: Visited, options: ExecOptions) -> None:
    port = host_service.listener.getsockname()[1]
    addresses = own_addresses()
    for address in addresses:
        with socket.create_connection((address, port)) as control:
            assert control.recv(16) == b"hello"
    before = host_service.visits
    assert before == len(addresses), "the host itself reaches them"
    done = await room.python(VISIT, str(port), *addresses, "0.0.0.0", "::", "::ffff:127.0.0.1", **options)
    assert (done.outcome.exit_code, done.stdout) == (0, b""), done
    assert host_service.visits == before


@EVERYBODY
async def test_abstract_sockets_of_the_host_cannot_be_reached(room: Room, options: ExecOptions) -> None:
    name = f"k8e-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    service = Visited(listener)
    try:
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
        done = await room.python(code, name, **options)
        assert b"ConnectionRefusedError" in done.stderr, done
        assert service.visits == 0
    finally:
        service.close()


ECHO = """
import socket, sys
family = socket.AF_INET6 if sys.argv[1] == "::1" else socket.AF_INET
with socket.socket(family) as listener:
    listener.bind((sys.argv[1], 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    connection.sendall(connection.recv(100))
    connection.close()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_loopback_works_inside(room: Room, address: str) -> None:
    process = await room.link.start(room.spec("/usr/bin/python3", "-c", ECHO, address))
    port = int(await process.stdout.read())
    client = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.send(b"hi")
print(connection.recv(9))
"""
    done = await room.python(client, address, str(port))
    assert done.stdout == b"b'hi'\n", done
    process.discard()
    assert (await process.wait()).exit_code == 0


async def test_ports_inside_are_reached_through_the_link_and_from_nowhere_else(rig: Rig, room: Room) -> None:
    process = await room.link.start(room.spec("/usr/bin/python3", "-c", ECHO, "127.0.0.1"))
    port = int(await process.stdout.read())
    with pytest.raises(OSError, match=os.strerror(111)):
        socket.create_connection(("127.0.0.1", port))
    async with rig.room() as other:
        done = await other.python(VISIT, str(port), "127.0.0.1", "::1")
        assert done.stdout == b""
    connection = await room.link.connect(port=port)
    await connection.write(b"hi")
    assert await connection.read() == b"hi"
    await connection.close()
    process.discard()
    await process.wait()


async def test_names_are_resolved_from_the_sandboxs_own_files_only(room: Room) -> None:
    code = """
import socket
print(socket.gethostbyname("localhost"))
try:
    socket.getaddrinfo("name.invalid", 80)
except socket.gaierror:
    print("unknown")
"""
    done = await room.python(code)
    assert done.stdout == b"127.0.0.1\nunknown\n", done


async def test_who_asks_about_a_sandbox_that_is_being_destroyed_does_not_bring_its_network_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses would have no owner, and would be missing to the next sandbox that gets its wire."""
    name = rig.new_name()
    await rig.engine.create(name, rig.spec())
    loop, network = asyncio.get_running_loop(), rig.engine._network
    remove_wires = network._machine.remove_wires
    questions = []

    def remove_while_asked(sandbox: str, marks: Iterable[int] | None) -> None:
        """In the middle: the resolver has left already, the wire is still there."""
        question = asyncio.run_coroutine_threadsafe(rig.engine.observe(name), loop)
        questions.append(question)
        assert question.result(5) == Observation(alive=False, oom_kills=0)
        remove_wires(sandbox, marks)

    monkeypatch.setattr(network._machine, "remove_wires", remove_while_asked)
    await rig.engine.destroy(name)
    assert len(questions) == 1
    assert not network.knows(name)


async def test_refusals_are_asked_for_when_the_sandbox_has_sent_something_and_else_not(
    rig: Rig, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = own_addresses()[-1]
    if address in ("127.0.0.1", "::1"):
        pytest.skip("this machine has no address but loopback")
    network, asked = rig.engine._network, []
    take_refused = network._take_refused

    def count(attachment: Attachment) -> list[Refusal]:
        asked.append(attachment)
        return take_refused(attachment)

    async def observe() -> list[str]:
        return [refusal.address for refusal in (await rig.engine.observe(room.name)).refusals]

    monkeypatch.setattr(network, "_take_refused", count)
    monkeypatch.setattr(network._watch, "has_news", lambda: False)  # other engines of this machine change their rules
    await observe()
    for port in (4, 5):
        asked.clear()
        for _ in range(12):  # gVisor's kernel may send something by itself, once or twice; each time two looks follow
            await room.output("true")
            assert await observe() == []
        assert len(asked) < 8
        asked.clear()
        await room.python(f"import socket; socket.socket(socket.{family(address)}).connect_ex(({address!r}, {port}))")
        assert await observe() == [address]
        assert len(asked) == 1


def family(address: str) -> str:
    return "AF_INET6" if ":" in address else "AF_INET"
