"""Agents of pods, and gateways of all kinds: good ones, and those that send what no gateway would."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from devel.sandboxes import POD_AGENT, Launched, Variation, launch_bare
from k8e.link.noise import GatewayKey, PodDialer
from k8e.link.noise.dial import CHANNEL_NAME
from k8e.link.noise.handshake import Initiator
from k8e.link.noise.stream import PREFIX, RecordReader, seal_records
from tests.frames import Disconnected, RawLink

HERE = "127.0.0.1"
NEIGHBOUR = "127.0.0.2"  # another source address, as another pod has


@dataclass(frozen=True, slots=True)
class Pod:
    launched: Launched
    key: GatewayKey

    @property
    def uid(self) -> str:
        return str(uuid.UUID(bytes=self.launched.instance))

    @property
    def port(self) -> int:
        return self.launched.port

    def dialer(self, port: int | None = None, **changes: object) -> PodDialer:
        options: dict[str, object] = {"uid": self.uid, "key": self.key, **changes}
        return PodDialer(HERE, self.port if port is None else port, **options)  # type: ignore[arg-type]

    def connect(self, source: str = HERE, deadline: float = 20.0) -> socket.socket:
        return socket.create_connection((HERE, self.port), timeout=deadline, source_address=(source, 0))

    def gateway(self, source: str = HERE) -> SealedLink:
        connection = self.connect(source)
        try:
            return SealedLink(self, connection)
        except BaseException:
            connection.close()
            raise


@contextlib.contextmanager
def launch_pod(variation: Variation | None = None, key: GatewayKey | None = None) -> Iterator[Pod]:
    key = key or GatewayKey.generate()
    chosen = replace(variation or Variation(agent=POD_AGENT), gateway=key.public)
    with launch_bare(chosen) as launched:
        yield Pod(launched, key)


class SealedLink(RawLink):
    """One connection of a gateway, blocking; `sealed` sends what may be no record at all."""

    def __init__(self, pod: Pod, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""
        self.sent: list[bytes] = []
        initiator = Initiator(pod.key.private, CHANNEL_NAME + pod.launched.instance)
        greeting = initiator.greet()
        self.put(PREFIX.pack(len(greeting)) + greeting)
        (length,) = PREFIX.unpack(self.take_raw(PREFIX.size))
        self.peer, _, self.sealing, opening = initiator.finish(self.take_raw(length))
        self._reader = RecordReader(opening)

    def put(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.sent.append(data)
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def take_raw(self, count: int) -> bytes:
        return take(self.socket, count)

    def send(self, data: bytes) -> None:
        self.put(b"".join(seal_records(self.sealing, data)))

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                received = self.socket.recv_into(self._reader.buffer())
            except ConnectionResetError:
                received = 0
            if not received:
                raise Disconnected
            self._buffer += b"".join(self._reader.advance(received))
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def take(connection: socket.socket, count: int) -> bytes:
    taken = b""
    while len(taken) < count:
        try:
            more = connection.recv(count - len(taken))
        except ConnectionResetError:
            more = b""
        if not more:
            raise Disconnected
        taken += more
    return taken


def is_closed(connection: socket.socket) -> bool:
    """Waits for the end of the connection; whatever comes before is passed over."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@contextlib.contextmanager
def greeted(pod: Pod) -> Iterator[SealedLink]:
    with pod.gateway() as link:
        link.greet()
        yield link
