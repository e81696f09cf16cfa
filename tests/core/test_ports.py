"""Connections to servers inside: whose, how many, and for how long."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from k8e.core import ports
from k8e.core.errors import Fault, Kind
from k8e.core.model import SessionSpec
from k8e.core.ports import OpenPort
from tests.core.rig import ALICE, BOB, ManualClock, Rig, fault
from tests.sandboxes import needs_root

pytestmark = needs_root

# Sends back what it gets, and the end of it, too.
ECHO = """
import socket, threading
server = socket.create_server(("127.0.0.1", 7000), backlog=200)
def serve(client):
    while piece := client.recv(65536):
        client.sendall(piece)
    client.close()
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


async def serve(rig: Rig, session: str) -> str:
    """A server in the background, once it can be reached."""
    run = await rig.start_background(session, f"exec python3 -c '{ECHO}'")
    while True:
        try:
            await (await connect(rig, session)).close()
        except Fault as fault:
            if fault.code != "port_closed":
                raise
            await asyncio.sleep(0.01)
        else:
            return run


async def connect(rig: Rig, session: str) -> OpenPort:
    return await rig.service.ports.connect(ALICE, session, 7000)


async def test_bytes_go_both_ways_and_each_way_has_its_end(rig: Rig) -> None:
    session = await rig.create()
    with fault(Kind.UNAVAILABLE, "port_closed"):
        await connect(rig, session)
    await serve(rig, session)
    port = await connect(rig, session)
    await port.write(b"ping")
    assert await port.read() == b"ping"
    await port.write(b"last")
    await port.close_write()
    assert [await port.read(), await port.read()] == [b"last", b""]
    await port.close()
    await rig.service.sessions.destroy(ALICE, session)
    await rig.service.audit.sync()
    noted = [each for each in rig.read_audit() if each["event"] == "port_connected"]
    assert {(each["session"], each["caller"], each["port"]) for each in noted} == {(session, ALICE.label, 7000)}


async def test_they_are_for_those_who_may_use_the_session(rig: Rig) -> None:
    session = await rig.create()
    with fault(Kind.NOT_FOUND, "session_not_found"):
        await rig.service.ports.connect(BOB, session, 7000)
    for number in (0, 65536, -1):
        with fault(Kind.INVALID, "invalid_argument", "port"):
            await rig.service.ports.connect(ALICE, session, number)


async def test_there_are_only_so_many_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MOST", 3)
    session = await rig.create()
    await serve(rig, session)
    opened = [await connect(rig, session) for _ in range(3)]
    with fault(Kind.EXHAUSTED, "too_many_connections"):
        await connect(rig, session)
    await opened.pop().close()
    opened.append(await connect(rig, session))
    await rig.service.ports.close()  # as a daemon that stops does
    for port in opened:
        with pytest.raises(Fault):
            await port.read()
        await port.close()
    assert not rig.service.ports._open


async def test_an_open_one_is_a_use_and_ends_with_its_session(rig: Rig, clock: ManualClock) -> None:
    session = await rig.create(spec=SessionSpec(ttl=60))
    server = await serve(rig, session)
    port = await connect(rig, session)
    await rig.service.runs.kill(ALICE, server)
    await rig.poll_to_the_end(server)
    clock.advance(120)
    assert await rig.service.expire() == []
    await port.close()
    await serve(rig, session)
    port = await connect(rig, session)
    await rig.service.sessions.destroy(ALICE, session)
    with contextlib.suppress(Fault):  # the server's end may come before the sandbox's
        assert await port.read() == b""
    await port.close()
    assert not rig.service.ports._open
    await rig.assert_no_trace()


async def test_a_server_that_takes_no_connection_is_said_to_be_silent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_ACCEPTED", 0.5)
    session = await rig.create()
    code = 'import socket, time; server = socket.create_server(("127.0.0.1", 7000), backlog=0); time.sleep(1000)'
    await rig.start_background(session, f"exec python3 -c '{code}'")
    opened: list[OpenPort] = []
    refused: Fault | None = None
    while refused is None or refused.code == "port_closed":  # until it listens, and then until its queue is full
        try:
            opened.append(await connect(rig, session))
        except Fault as fault:
            refused = fault
            await asyncio.sleep(0.01)
    assert (refused.kind, refused.code) == (Kind.UNAVAILABLE, "port_silent")
    assert len(rig.service.ports._open.get(rig.sandbox_of(session), ())) == len(opened)
    assert (await rig.run(session, "echo well")).stdout == b"well\n"
    for port in opened:
        await port.close()
