"""Dials the agent of a pod, and starts it: the two ends of docs/kubernetes-channel.md."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from k8e.link.errors import LinkLost, ProtocolViolation
from k8e.link.noise.handshake import ANSWER_SIZE, HandshakeFailed, Initiator
from k8e.link.noise.keys import GatewayKey
from k8e.link.noise.stream import PREFIX, SealedStream

AGENT_PORT: Final = 10539
CHANNEL_NAME: Final = b"k8e pod channel 1"


def pod_arguments(
    gateway: bytes, *, address: str = "$(K8E_POD_IP)", port: int = AGENT_PORT, uid: str = "$(K8E_POD_UID)"
) -> list[str]:
    """Returns the arguments of `k8e-agent-pod`. Kubernetes itself expands the names, from the downward API."""
    return ["--address", address, "--port", str(port), "--gateway", gateway.hex(), "--instance", uid]


class PodDialer:
    """Connects to the agent of the pod with this UID. At the first contact its key is handed to `pin`, before anything
    else is said; from then on only the agent with that key will do."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        uid: str,
        key: GatewayKey,
        pinned: bytes | None = None,
        pin: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> None:
        self.instance = uuid.UUID(uid).bytes
        self.pinned = pinned
        self._address = ipaddress.ip_address(address)
        self._port = port
        self._key = key
        self._pin = pin

    async def __call__(self) -> SealedStream:
        family = socket.AF_INET if self._address.version == 4 else socket.AF_INET6
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(connection, (str(self._address), self._port))
            return await self._shake_hands(connection)
        except BaseException:
            connection.close()
            raise

    async def _shake_hands(self, connection: socket.socket) -> SealedStream:
        loop = asyncio.get_running_loop()
        initiator = Initiator(self._key.private, CHANNEL_NAME + self.instance)
        greeting = initiator.greet()
        await loop.sock_sendall(connection, PREFIX.pack(len(greeting)) + greeting)
        # The agent says no more before it is spoken to, so nothing of the stream is read here.
        (length,) = PREFIX.unpack(await self._receive(connection, PREFIX.size))
        if length != ANSWER_SIZE:
            raise LinkLost("the answer to the handshake has the wrong size: this is no agent of a pod")
        try:
            peer, _, sealing, opening = initiator.finish(await self._receive(connection, length))
        except HandshakeFailed as error:
            # Another pod at this address, or bytes changed on the way. Neither proves that the pod is gone.
            raise LinkLost(f"the handshake failed: {error}") from error
        await self._check(peer)
        return SealedStream(connection, sealing, opening)

    async def _receive(self, connection: socket.socket, count: int) -> bytes:
        received = b""
        while len(received) < count:
            more = await asyncio.get_running_loop().sock_recv(connection, count - len(received))
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
            received += more
        return received

    async def _check(self, peer: bytes) -> None:
        if self.pinned is None:
            if self._pin is not None:
                await self._pin(peer)
            self.pinned = peer
        elif not hmac.compare_digest(self.pinned, peer):
            raise ProtocolViolation("this is another agent: its key is not the pod's")
