"""Unauthenticated peers at the gateway's port: they share a little, and take nothing from authenticated ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from k8e.cli.remote.connection import read_detail
from k8e.core.access.access import Payer
from k8e.core.access.keys import Keys
from k8e.core.log.refusal_log import BURST, NAME
from k8e.doors.addresses import name_source
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.grpc import connection
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.connection import UNAUTHENTICATED_BYTES, Pause, ProxySide
from k8e.doors.grpc.dispatcher import UNAUTHENTICATED_CALLS
from k8e.doors.grpc.methods import METHODS
from k8e.doors.grpc.proxy import Proxy
from k8e.doors.grpc.server import GrpcServer
from k8e.doors.mcp.endpoint import McpEndpoint
from k8e.doors.request_memory import RequestMemory
from k8e.identity import anonymous
from tests.cli.machine import wait_until
from tests.core.rig import open_rig
from tests.gateway.house import ALONE, Guest, House, open_house


def test_addresses_of_one_subscriber_are_one_source() -> None:
    assert name_source("2001:db8:1:2:3:4:5:6") == name_source("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert name_source("2001:db8:1:3::9") != name_source("2001:db8:1:2::9")
    assert name_source("::ffff:192.0.2.1") == name_source("192.0.2.1") == "192.0.2.1"
    assert (name_source("::1"), name_source("fe80::1%eth0")) == ("::1", "fe80::/64")


def read_log(house: House, name: str) -> list[dict[str, Any]]:
    files = (house.machine.folder / "s").glob(f"{name}*")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_unauthenticated_calls_do_not_push_other_events_out_of_the_log() -> None:
    with open_house('[audit]\nsize = "64k"\nfiles = 1\n') as house:
        tenant, unauthenticated = house.tenant("acme"), house.unauthenticated()
        session = tenant.create()
        for _ in range(5 * BURST):
            code, detail = unauthenticated.refused("Status", pb.StatusRequest())
            assert (code, detail and detail.code) == (grpc.StatusCode.UNAUTHENTICATED, "not_logged_in")
        tenant.run(session, "true")
        wait_until(lambda: any(line["event"] == "run_ended" for line in read_log(house, "audit.log")))
        events = [line["event"] for line in read_log(house, "audit.log")]
        assert {"daemon_started", "key_created", "session_created", "run_started", "run_ended"} <= set(events)
        assert "access_refused" not in events
        refused = [line for line in read_log(house, NAME) if line["event"] == "access_refused"]
        assert BURST <= len(refused) < 2 * BURST
        assert {(line["caller"], line["source"], line["code"]) for line in refused} == {
            ("nobody", "127.0.0.1", "not_logged_in")
        }
        assert (house.machine.folder / "s" / "daemon.log").read_text().count("caller=nobody") < 10


class Relay:
    """A way to the gateway on which connections come from another address of this machine."""

    def __init__(self, address: str, endpoint: str) -> None:
        self._address = address
        self._far = endpoint
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._serve)

    def _start(self, work: Callable[..., None], *ends: socket.socket) -> None:
        thread = threading.Thread(target=work, args=ends)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = connect(self._far, self._address)
                far.settimeout(None)
                self._sockets.append(far)
                self._start(self._copy, near, far)
                self._start(self._copy, far, near)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()


def test_silent_logins_from_many_addresses_keep_no_tenant_out(house: House) -> None:
    tenant = house.tenant("acme")
    session = tenant.create()
    method, over = METHODS["Login"], threading.Event()

    def send() -> Iterator[pb.LoginRequest]:
        over.wait()
        yield from ()

    silent: list[Any] = []
    with contextlib.ExitStack() as stack:
        for number in range(2, 8):
            relay = Relay(f"127.0.0.{number}", house.endpoint)
            stack.callback(relay.close)
            unauthenticated = Guest(
                relay.endpoint, house.authority, anonymous.KEY.encode(), anonymous.CERTIFICATE.encode()
            )
            stack.callback(unauthenticated.close)
            make: Any = unauthenticated.channel.stream_stream(
                method.path, method.request.SerializeToString, method.response.FromString
            )
            silent += [make(send(), timeout=60) for _ in range(UNAUTHENTICATED_CALLS)]
        stack.callback(over.set)
        wait_until(lambda: sum(call.done() for call in silent) >= len(silent) - UNAUTHENTICATED_CALLS)
        assert sum(not call.done() for call in silent) <= UNAUTHENTICATED_CALLS
        ended = next(call for call in silent if call.done())
        detail = read_detail(ended)
        assert detail is not None
        assert (ended.code(), detail.code, detail.retry_after > 0) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too_many_calls",
            True,
        )
        for number in range(50):
            assert tenant.run(session, f"echo {number}").stdout == f"{number}\n".encode()
        assert house.tenant("latecomer").call("Status", pb.StatusRequest()).available


def connect(endpoint: str, address: str, said: bytes = b"") -> socket.socket:
    _, _, port = endpoint.rpartition(":")
    connection = socket.create_connection(("127.0.0.1", int(port)), 30, source_address=(address, 0))
    with contextlib.suppress(OSError):
        connection.sendall(said)
    return connection


def count_open(connections: list[socket.socket]) -> int:
    """Counts those that the gateway has not ended."""
    ended = 0
    for one in connections:
        one.setblocking(False)
        try:
            ended += one.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            pass
        except OSError:
            ended += 1
    return len(connections) - ended


# Nothing, something that is no TLS, and the beginning of a handshake.
SAID = (b"", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


def test_idle_connections_leave_descriptors_for_authenticated_ones() -> None:
    """More connections than the daemon has descriptors, from several addresses, none of which ends by itself."""
    with open_house(descriptors=400) as house:
        tenant = house.tenant("acme")
        session = tenant.create()
        log = house.machine.folder / "s" / "daemon.log"
        before = log.stat().st_size
        held = [connect(house.endpoint, f"127.0.0.{n % 5 + 2}", SAID[n % 3]) for n in range(600)]
        try:
            wait_until(lambda: count_open(held) < 100)
            for number in range(20):
                assert house.ask("GET", "/v1/sessions")[0] == 200
                assert tenant.run(session, f"echo {number}").stdout == f"{number}\n".encode()
            late = house.tenant("latecomer")
            assert late.run(late.create(), "echo hi").stdout == b"hi\n"
            assert house.machine.k8e("sandbox", "status").code == 0
            assert count_open(held[:400]) == 0, "newcomers take the places of the oldest"
            assert log.stat().st_size - before < 64 << 10
        finally:
            for connection in held:
                connection.close()


def test_a_daemon_without_descriptors_does_not_fill_its_log() -> None:
    """It says so once, and answers again as soon as it has some."""
    with open_house() as house:
        pid, log = house.machine.daemon_pid, house.machine.folder / "s" / "daemon.log"
        before = log.stat().st_size
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), hard))
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(50)]
        try:
            for one in waiting:
                one.connect(str(house.machine.folder / "r" / "k8e.sock"))
            wait_until(lambda: "connection_not_taken" in log.read_text())
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
            for one in waiting:
                one.close()
        assert house.ask("GET", "/v1/sessions")[0] == 200
        assert log.stat().st_size - before < 16 << 10


async def test_who_says_nothing_or_too_much_is_not_kept(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        keys = Keys(tmp_path / "identity")
        connection_limits = ConnectionLimits(first_request=0.2)
        gateway = GrpcServer(rig.service, keys, McpEndpoint(rig.service, keys), tmp_path, connection_limits)
        await gateway.open("127.0.0.1:0", [])
        try:
            _, _, port = gateway.endpoint.rpartition(":")
            for said in SAID:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.write(said)
                with contextlib.suppress(ConnectionError):
                    async with asyncio.timeout(60):
                        await reader.read()
                writer.close()
            authority, _ = await keys.open()
            credentials = grpc.ssl_channel_credentials(
                authority.certificate, anonymous.KEY.encode(), anonymous.CERTIFICATE.encode()
            )
            async with grpc.aio.secure_channel(gateway.endpoint, credentials, list(ALONE)) as channel:
                call: Any = channel.unary_unary(METHODS["Login"].path)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(b"x" * (1 << 20), timeout=60)
                codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
                assert refused.value.code() in codes
        finally:
            await gateway.close(0)
        assert not (tmp_path / "gw.sock").exists()
    assert (connection_limits._used, connection_limits._unauthenticated.count) == (0, 0)


async def test_many_unauthenticated_calls_send_no_more_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All on one connection, each of them small, and together more than an unauthenticated peer may send."""
    monkeypatch.setattr(connection, "UNAUTHENTICATED_WAIT", 0.2)
    async with open_rig(tmp_path) as rig:
        keys = Keys(tmp_path / "identity")
        gateway = GrpcServer(rig.service, keys, McpEndpoint(rig.service, keys), tmp_path, ConnectionLimits())
        await gateway.open("127.0.0.1:0", [])
        try:
            authority, _ = await keys.open()
            credentials = grpc.ssl_channel_credentials(
                authority.certificate, anonymous.KEY.encode(), anonymous.CERTIFICATE.encode()
            )
            async with grpc.aio.secure_channel(gateway.endpoint, credentials, list(ALONE)) as channel:
                call: Any = channel.unary_unary(METHODS["Status"].path)
                codes = []
                for _ in range(2 * UNAUTHENTICATED_BYTES // (16 << 10)):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call(b"x" * (16 << 10), timeout=60)
                    codes.append(refused.value.code())
            assert codes[0] is grpc.StatusCode.UNAUTHENTICATED
            assert grpc.StatusCode.UNAVAILABLE in codes, "the connection ended"
        finally:
            await gateway.close(0)


async def test_a_large_upload_is_read_on_once_its_caller_is_authenticated(tmp_path: Path) -> None:
    """Its bytes arrive before its call is dispatched: reading pauses at the limit and the connection stays."""
    content, received, ended = bytes(8 << 20), bytearray(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(64 << 10):
                received.extend(piece)
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(serve, tmp_path / "grpc.sock")
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(listener, str(tmp_path / "grpc.sock"), ConnectionLimits(), RequestMemory())
    proxy.open()
    _, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(content)
    async with asyncio.timeout(60):
        while len(received) <= UNAUTHENTICATED_BYTES:
            await asyncio.sleep(0.01)
        before = 0
        while before != len(received):
            before = len(received)
            await asyncio.sleep(0.1)
        assert before < len(content)
        (one,) = proxy._connections.values()
        assert one.authenticate(Payer(-1, "acme"))
        while len(received) < len(content):
            await asyncio.sleep(0.01)
        writer.close()
        await ended.wait()
    proxy.close()
    server.close()


async def test_reading_goes_on_when_no_reason_is_left_to_pause() -> None:
    """The other end's peer does not read, and there is no room for more bytes, at the same time."""
    ours, theirs = socket.socketpair()
    heard = asyncio.Event()
    outer, inner = ProxySide(lambda data: heard.set(), lambda _: None), ProxySide(lambda data: None, lambda _: None)
    outer.other, inner.other = inner, outer
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: outer, sock=ours)
        for first, last in ((inner.resume_writing, Pause.MEMORY), (lambda: outer.resume(Pause.MEMORY), Pause.PEER)):
            inner.pause_writing()
            outer.pause(Pause.MEMORY)
            first()
            assert not transport.is_reading()
            outer.resume(last)
            assert transport.is_reading()
        theirs.send(b"x")
        await heard.wait()
        transport.abort()


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6 here")
@pytest.mark.parametrize("listen", ["[::]:0", "0.0.0.0:0"])
async def test_every_address_is_one_family_or_both(tmp_path: Path, listen: str) -> None:
    async with open_rig(tmp_path) as rig:
        keys = Keys(tmp_path / "identity")
        gateway = GrpcServer(rig.service, keys, McpEndpoint(rig.service, keys), tmp_path)
        await gateway.open(listen, [])
        port = int(gateway.endpoint.rpartition(":")[2])
        try:
            assert "BEGIN" in await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            if listen.startswith("["):
                assert "BEGIN" in await asyncio.to_thread(ssl.get_server_certificate, ("::1", port))
        finally:
            await gateway.close(0)
