"""A gateway in a real daemon, over the test engine, and guests who come to it with whatever they have."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.managers import BaseManager
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message

from k8e.cli.remote.connection import list_options, log_in, read_detail, read_key
from k8e.cli.remote.profiles import Credentials
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from k8e.identity import anonymous
from k8e.identity.authority import make_request
from tests.cli.machine import Machine, make_folder, run_launcher
from tests.core.bare_engine import BareEngine

PATIENCE = 60.0
# A connection of one's own, though the address and the options be the same.
ALONE = (
    *list_options(),
    ("grpc.use_local_subchannel_pool", 1),
    # Who is refused tries again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


@dataclass
class Guest:
    """A client of the gateway, with its own connection and certificate."""

    endpoint: str
    roots: bytes
    key: bytes | None = field(repr=False)
    certificate: bytes | None

    def __post_init__(self) -> None:
        credentials = grpc.ssl_channel_credentials(self.roots, self.key, self.certificate)
        self.channel = grpc.secure_channel(self.endpoint, credentials, ALONE)

    def close(self) -> None:
        self.channel.close()

    def begin(self, name: str, *messages: Message, seconds: float = PATIENCE) -> Any:
        """The call, under way: what comes back can be iterated."""
        method = METHODS[name]
        call = self.channel.stream_stream(method.path, _serialize, method.response.FromString)
        return call(iter(messages), timeout=seconds)

    def call(self, name: str, *messages: Message, seconds: float = PATIENCE) -> Any:
        """The answer, or its last part."""
        *_, last = self.begin(name, *messages, seconds=seconds)
        return last

    def refused(self, name: str, *messages: Message) -> tuple[grpc.StatusCode, pb.ErrorDetail | None]:
        try:
            answer = self.call(name, *messages)
        except grpc.RpcError as error:
            return error.code(), read_detail(error)
        raise AssertionError(f"{name} was answered: {answer}")

    def send(self, path: str, *contents: bytes, seconds: float = PATIENCE) -> grpc.StatusCode:
        """Bytes as they are, to any method; how it ended."""
        method: Any = self.channel.stream_stream(path)
        call = method(iter(contents), timeout=seconds)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        code: grpc.StatusCode = call.code()
        return code

    # What most tests begin with

    def create(self, **fields: Any) -> str:
        return str(self.call("CreateSession", pb.CreateSessionRequest(**fields)).session_id)

    def run(self, session: str, command: str, **fields: Any) -> pb.ExecResponse:
        request = pb.ExecRequest(session_id=session, command=command, **fields)
        answer: pb.ExecResponse = self.call("Exec", request)
        return answer

    def destroy_all(self) -> None:
        for session in self.call("ListSessions", pb.ListSessionsRequest()).sessions:
            with contextlib.suppress(grpc.RpcError):
                self.call("DestroySession", pb.DestroySessionRequest(session_id=session.session_id))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class House:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._guests: list[Guest] = []
        login, self._root_key = self._log_in_locally()
        self.endpoint: str = login["endpoint"]
        self.authority = login["ca_certificate"].encode()
        self._root_certificate = login["certificate"].encode()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """The unix socket, as root."""
        connection = UnixConnection(str(self.machine.folder / "r" / "k8e.sock"))
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        try:
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _log_in_locally(self) -> tuple[Any, bytes]:
        key, request = make_request()
        status, login = self.ask("POST", "/v1/login", {"csr": request})
        assert status == 200, login
        return login, key

    def make_key(self, name: str, **spec: Any) -> str:
        status, answer = self.ask("POST", "/v1/keys", {"name": name, **spec})
        assert status == 201, answer
        return str(answer["key"])

    def delete_key(self, name: str) -> None:
        assert self.ask("DELETE", f"/v1/keys/{name}") == (200, {"ok": True})

    def log_in(self, text: str) -> Credentials:
        return log_in(self.endpoint, read_key(text))

    def guest(self, text: str) -> Guest:
        """Who has this API key."""
        found = self.log_in(text)
        return self.meet(found.key.encode(), found.certificate.encode())

    def tenant(self, name: str, **spec: Any) -> Guest:
        return self.guest(self.make_key(name, tenant_ids=[name], **spec))

    def root(self) -> Guest:
        """A user of the gateway's own machine."""
        return self.meet(self._root_key, self._root_certificate)

    def unauthenticated(self) -> Guest:
        return self.meet(anonymous.KEY.encode(), anonymous.CERTIFICATE.encode())

    def meet(self, key: bytes | None, certificate: bytes | None) -> Guest:
        guest = Guest(self.endpoint, self.authority, key, certificate)
        self._guests.append(guest)
        return guest

    def close(self) -> None:
        self.root().destroy_all()
        for guest in self._guests:
            guest.close()


@contextlib.contextmanager
def open_house(settings: str = "", listen: str = "127.0.0.1:0", descriptors: int | None = None) -> Iterator[House]:
    with make_folder() as folder:
        with (folder / "k8e.toml").open("a") as file:
            file.write(f'[gateway]\nlisten = "{listen}"\n{settings}')
        machine = Machine(folder, folder)
        try:
            with run_launcher(machine, descriptors):
                house = House(machine)
                try:
                    yield house
                finally:
                    house.close()
                log = (folder / "s" / "daemon.log").read_text()
                assert "Traceback" not in log, log
        finally:
            # Not all can be destroyed by name: two tenants may have chosen the same.
            with ThreadPoolExecutor(1) as pool:  # the thread that opened it may have a loop of its own
                pool.submit(asyncio.run, clear_away(BareEngine(folder / "s" / "bare"))).result()


def _restore(name: str, content: bytes) -> Message:
    message: Message = getattr(pb, name).FromString(content)
    return message


def _reduce(message: Message) -> tuple[Any, ...]:
    return _restore, (message.DESCRIPTOR.name, message.SerializeToString())


for _name in pb.DESCRIPTOR.message_types_by_name:  # generated code has no place that pickle could import it from
    ForkingPickler.register(getattr(pb, _name), _reduce)


class _Elsewhere(BaseManager):
    """Houses and guests in a process of their own."""


_Elsewhere.register("Guest")  # those that a house has made
_Elsewhere.register("House", House, method_to_typeid={"tenant": "Guest", "root": "Guest"})


@contextlib.contextmanager
def house_in_a_child(machine: Machine) -> Iterator[House]:
    """For a test that has entered a network namespace: gRPC's threads of this process may be older, and outside of it.
    What comes back is a stand-in that hands calls on; answers are pickled, errors of gRPC cannot be."""
    with _Elsewhere(ctx=multiprocessing.get_context("spawn")) as child:
        house = cast(House, child.House(machine))  # type: ignore[attr-defined]
        try:
            yield house
        finally:
            house.close()


@contextlib.contextmanager
def make_machine() -> Iterator[Machine]:
    """A machine whose daemon, which is not started yet, has a gateway."""
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        with (folder / "k8e.toml").open("a") as file:
            file.write('[gateway]\nlisten = "127.0.0.1:0"\n')
        yield Machine(folder, folder)


async def clear_away(engine: BareEngine) -> None:
    for sandbox in await engine.list():
        await engine.destroy(sandbox)
    await engine.close()


def collect(frames: Iterable[Any]) -> tuple[bytes, bytes, pb.ExecResponse]:
    """A live run, from its first frame to its last: stdout, stderr, result."""
    streams = {pb.STREAM_STDOUT: b"", pb.STREAM_STDERR: b""}
    frames = list(frames)
    assert frames[0].HasField("started")
    assert frames[-1].HasField("result")
    for frame in frames[1:-1]:
        streams[frame.output.stream] += frame.output.data
    return streams[pb.STREAM_STDOUT], streams[pb.STREAM_STDERR], frames[-1].result
