"""Opens the link to a warm pod's agent before its claim is confirmed: the controller names the pod some time before the
claim's state does, and the handshake takes about as long. Nothing of a session goes through the link before `take`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes import names
from k8e.engine.tasks import cancel_and_wait
from k8e.link import AgentLink
from k8e.link.errors import LinkError

Open = Callable[[Pod], Coroutine[Any, Any, AgentLink]]


class EarlyLink:
    def __init__(self, open_link: Open) -> None:
        self._open = open_link
        self._uid = ""
        self._opening: asyncio.Task[AgentLink] | None = None

    def begin(self, pod: Pod) -> None:
        """For the first pod that is named, if its agent's key is known: else the key would be written for a pod that
        may become another's."""
        meta = pod.metadata
        if self._opening is None and meta is not None and names.AGENT_KEY in (meta.annotations or {}):
            self._uid = meta.uid or ""
            self._opening = asyncio.create_task(self._open(pod))

    async def take(self, pod: Pod) -> AgentLink:
        """The link to that pod, the early one if it is: one that failed, or is another pod's, is opened now."""
        opening, self._opening = self._opening, None
        if opening is None or pod.metadata is None or pod.metadata.uid != self._uid:
            await _discard(opening)
            return await self._open(pod)
        try:
            await asyncio.wait([opening])
        except asyncio.CancelledError:
            await _discard(opening)
            raise
        try:
            return opening.result()
        except LinkError:
            return await self._open(pod)

    async def close(self) -> None:
        opening, self._opening = self._opening, None
        await _discard(opening)


async def _discard(opening: asyncio.Task[AgentLink] | None) -> None:
    if opening is not None:
        await cancel_and_wait(opening)
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
