"""Sessions as callers find and use them. A silent sandbox is asked once more before its session is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from k8e.core import checks
from k8e.core.log.daemon_log import warn
from k8e.core.model import Caller
from k8e.core.parts import Parts
from k8e.core.sessions.ends import LOST, OUT_OF_MEMORY, SILENCE, UNRESPONSIVE, describe_loss, describe_unusable
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.observer import Observer
from k8e.core.sessions.registry import Registry
from k8e.core.translation import translate, translated
from k8e.engine import EngineError, Observation, Place
from k8e.link.errors import AgentError, LinkError, LinkLost, LinkTimeout
from k8e.link.model import Sandbox

_LAST: Final = 3.0  # for its last answer: the daemon itself may have stood still for all of the time before
_PAUSE: Final = 0.5  # before one that could not be reached is asked again


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that can be used, and the way into it."""

    live: Live
    sandbox: Sandbox
    place: Place


class Sessions:
    def __init__(self, parts: Parts, registry: Registry, observer: Observer, lifecycle: Lifecycle) -> None:
        self._parts = parts
        self._registry = registry
        self._observer = observer
        self._lifecycle = lifecycle
        self._doubted: dict[str, asyncio.Task[None]] = {}  # by sandbox: it did not answer in time and is asked again

    def find(self, caller: Caller, session_id: str) -> Live:
        checks.check_caller(caller)
        return self._registry.find(caller, checks.check_name("session_id", session_id))

    async def open(self, caller: Caller, session_id: str) -> Opened:
        return await self.enter(self.find(caller, session_id))

    async def enter(self, live: Live) -> Opened:
        if not live.usable:
            raise describe_unusable(live)
        try:
            sandbox, place = await self._parts.engine.attach(live.sandbox)
        except (EngineError, LinkError) as error:
            await self.examine(live)
            if not live.usable:
                raise describe_loss(live) from error
            raise translate(error, "reaching the sandbox") from error
        return Opened(live, sandbox, place)

    async def examine(self, live: Live) -> Observation:
        """Observes a sandbox; the session of a dead one is ended, or stopped if it is persistent."""
        seen = await self._observer.observe(live)
        live.memory_kills.see(seen.oom_kills)
        if not seen.alive and live.usable:
            warn("sandbox_died", session=live.session_id, sandbox=live.sandbox, oom_kills=seen.oom_kills)
            self._lifecycle.give_up(live, OUT_OF_MEMORY if live.memory_kills.recent else LOST)
        return seen

    def doubt(self, live: Live) -> None:
        """A sandbox did not answer in time: it is asked once more, and ended if it stays silent."""
        if live.usable and live.sandbox not in self._doubted:
            self._doubted[live.sandbox] = asking = self._parts.tasks.spawn(self._ask(live))
            asking.add_done_callback(lambda _: self._doubted.pop(live.sandbox))

    @contextmanager
    def using(self, live: Live, subject: str) -> Iterator[None]:
        """Around each request to the agent: it counts as a use, and a sandbox that does not answer is doubted."""
        with live.in_use(), translated(subject):
            try:
                yield
            except (LinkLost, LinkTimeout):
                self.doubt(live)
                raise

    async def _ask(self, live: Live) -> None:
        if await self._answers_within(live, SILENCE) or await self._answers_within(live, _LAST):
            return
        if live.usable and (await self.examine(live)).alive and live.usable:
            warn("sandbox_silent", session=live.session_id, sandbox=live.sandbox)
            self._lifecycle.give_up(live, UNRESPONSIVE)

    async def _answers_within(self, live: Live, seconds: float) -> bool:
        """Also true of a session that is not active any more."""
        try:
            async with asyncio.timeout(seconds):
                while live.usable and not await self._answers(live):  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            return False
        return True

    async def _answers(self, live: Live) -> bool:
        try:
            sandbox, _ = await self._parts.engine.attach(live.sandbox)
            await sandbox.commands()
        except AgentError:
            return True  # no is an answer
        except (LinkError, EngineError) as error:
            await self.examine(live)  # a dead one is ended at once
            # What the engine itself fails at says nothing of the sandbox.
            return isinstance(error, EngineError) and not isinstance(error.__cause__, LinkError)
        return True

    async def save_uses(self) -> None:
        """Writes down when sessions were last used."""
        stored = [live for live in self._registry if live.stored]
        uses = [(live.sandbox, *times) for live in stored if (times := live.use.take_unsaved())]
        if uses:
            await self._parts.store.set_used(uses)
