"""The channel between a gateway and the helper of a node: requests and answers in JSON, sealed as the channel to an
agent is (docs/kubernetes-channel.md). The gateway dials. Each knows the other's key from the cluster's objects."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import struct
from collections.abc import Mapping
from typing import Any, Final

from cryptography.exceptions import InvalidTag

from k8e.engine.kubernetes.names import gateway_label
from k8e.link.noise import GatewayKey
from k8e.link.noise.handshake import (
    ANSWER_SIZE,
    KEY_SIZE,
    TAG_SIZE,
    TEXT_LIMIT,
    CipherState,
    HandshakeFailed,
    Initiator,
    NoncesExhausted,
    Responder,
)
from k8e.link.noise.stream import PREFIX

HELPER_PORT: Final = 10541
PROLOGUE: Final = b"k8e node channel 1"
LABEL_SIZE: Final = 16
MOST_REQUEST: Final = 4096
MOST_ANSWER: Final = 4 << 20
_LENGTH: Final = struct.Struct("<I")


class ChannelBroken(Exception):
    """The other side is not the one that was meant, has gone, or sends what it should not."""


class Channel:
    """Whole messages, in order."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sealing: CipherState, opening: CipherState
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sealing = sealing
        self._opening = opening

    async def send(self, message: Any) -> None:
        content = json.dumps(message).encode()
        content = _LENGTH.pack(len(content)) + content
        for start in range(0, len(content), TEXT_LIMIT):
            sealed = self._sealing.seal(content[start : start + TEXT_LIMIT])
            self._writer.write(PREFIX.pack(len(sealed)) + sealed)
        await self._writer.drain()

    async def receive(self, most: int) -> Any:
        try:
            content = await self._receive_record()
            (length,) = _LENGTH.unpack_from(content)
            if length > most:
                raise ChannelBroken(f"a message of {length} bytes")
            while len(content) < _LENGTH.size + length:
                content += await self._receive_record()
            return json.loads(content[_LENGTH.size : _LENGTH.size + length])
        except (InvalidTag, NoncesExhausted, ValueError, struct.error) as error:
            raise ChannelBroken(f"not a message of the other side: {type(error).__name__}") from error

    async def _receive_record(self) -> bytes:
        (length,) = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
        if length <= TAG_SIZE:
            raise ChannelBroken("an empty record")
        return self._opening.open(await self._reader.readexactly(length))

    def close(self) -> None:
        self._writer.close()


async def dial(address: str, port: int, own: GatewayKey, helper: bytes) -> Channel:
    """OSError, ChannelBroken."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        initiator = Initiator(own.private, PROLOGUE)
        greeting = initiator.greet(gateway_label(own.public).encode())
        writer.write(PREFIX.pack(len(greeting)) + greeting)
        (length,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        if length != ANSWER_SIZE:
            raise ChannelBroken("the answer has the wrong size")
        peer, _, sealing, opening = initiator.finish(await reader.readexactly(length))
        if not hmac.compare_digest(peer, helper):
            raise ChannelBroken("it is not the helper that the cluster names")
        return Channel(reader, writer, sealing, opening)
    except BaseException as error:
        writer.close()
        if isinstance(error, HandshakeFailed | asyncio.IncompleteReadError):
            raise ChannelBroken(str(error)) from error
        raise


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: GatewayKey, gateways: Mapping[str, bytes]
) -> tuple[Channel, str]:
    """Returns the label of the gateway as well. That it is the one is known when its first message opens."""
    (length,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
    if length != KEY_SIZE + LABEL_SIZE:
        raise ChannelBroken("the first message has the wrong size")
    greeting = await reader.readexactly(length)
    label = greeting[KEY_SIZE:].decode(errors="replace")
    if label not in gateways:
        raise ChannelBroken("not one of our gateways")
    try:
        answer, _, sealing, opening = Responder(own.private, gateways[label], PROLOGUE).answer(greeting)
    except HandshakeFailed as error:
        raise ChannelBroken(str(error)) from error
    writer.write(PREFIX.pack(len(answer)) + answer)
    return Channel(reader, writer, sealing, opening), label


class HelperLinks:
    """One open channel for each helper, and one question at a time."""

    def __init__(self, own: GatewayKey) -> None:
        self._own = own
        self._channels: dict[tuple[str, int, str], Channel] = {}
        self._locks: dict[tuple[str, int, str], asyncio.Lock] = {}

    async def ask(self, address: str, port: int, key: str, question: Any) -> Any:
        """OSError, ChannelBroken. Asked again once, when a channel that was open is not any more."""
        place = (address, port, key)
        async with self._locks.setdefault(place, asyncio.Lock()):
            known = self._channels.pop(place, None)
            if known is not None:
                with contextlib.suppress(OSError, ChannelBroken, asyncio.IncompleteReadError):
                    return await self._ask(place, known, question)
            try:
                return await self._ask(place, await dial(address, port, self._own, bytes.fromhex(key)), question)
            except (asyncio.IncompleteReadError, ValueError) as error:
                raise ChannelBroken(str(error)) from error

    async def _ask(self, place: tuple[str, int, str], channel: Channel, question: Any) -> Any:
        try:
            await channel.send(question)
            answer = await channel.receive(MOST_ANSWER)
        except BaseException:
            channel.close()
            raise
        self._channels[place] = channel
        return answer

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
