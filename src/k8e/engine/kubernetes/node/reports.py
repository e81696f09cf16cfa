"""Tells gateways what was refused to their sandboxes on this node, when they ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from k8e.engine import EngineError, Refusal
from k8e.engine.kubernetes.node_channel import MOST_REQUEST, ChannelBroken, accept
from k8e.link.noise import GatewayKey

log = logging.getLogger(__name__)

_STRANGERS: Final = 32  # connections that have not proved anything
_GREETING: Final = 5.0  # seconds to prove it
_GATEWAYS: Final = 64

Gateways = Callable[[], Mapping[str, bytes]]  # their public keys, by label
Answer = Callable[[str, str], Sequence[Refusal]]  # the gateway's label, the pod's uid; EngineError


class Reports:
    def __init__(self, key: GatewayKey, gateways: Gateways, answer: Answer) -> None:
        self._key = key
        self._gateways = gateways
        self._answer = answer
        self._strangers = self._known = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, address: str, port: int) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._serve, address, port, limit=1 << 16)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._open:
                writer.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self._strangers >= _STRANGERS or self._known >= _GATEWAYS:
                return
            self._strangers += 1
            try:
                async with asyncio.timeout(_GREETING):
                    channel, label = await accept(reader, writer, self._key, self._gateways())
                    question = await channel.receive(MOST_REQUEST)  # only the gateway can seal one
            finally:
                self._strangers -= 1
            self._known += 1
            try:
                while True:
                    await channel.send(self._reply(label, question))
                    question = await channel.receive(MOST_REQUEST)
            finally:
                self._known -= 1
        except (ChannelBroken, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.debug("reports: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    def _reply(self, label: str, question: Any) -> Any:
        uid = question.get("refusals") if isinstance(question, dict) else None
        if not isinstance(uid, str):
            return {"error": "not a question"}
        try:
            found = self._answer(label, uid)
        except EngineError as error:
            return {"error": str(error)}
        return {"refusals": [[each.host, each.address, each.port, each.reason, each.at] for each in found]}
