"""Tells the engine how long each sandbox may live without a word from a daemon. A session's ttl begins anew with each
use, and core ends what expired; where sandboxes go on when every daemon is gone, they end by this alone."""

from __future__ import annotations

from typing import Final

from k8e.core.log.daemon_log import warn
from k8e.core.model import Session
from k8e.core.parts import Parts
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import AT_ONCE, Registry
from k8e.core.tasks import do_in_turn
from k8e.engine import EngineError

_MARGIN: Final = 60.0  # seconds by which core is first, which can say why; clocks may differ by as much
_AHEAD: Final = 0.25  # of the ttl: what is used all the time is prolonged four times in each


def allow_life(session: Session) -> float:
    """Seconds from a use on. 0: the engine decides, because the session does not expire."""
    return 0.0 if session.persistent else session.ttl * (1 + _AHEAD) + _MARGIN


class Lifetimes:
    def __init__(self, parts: Parts, registry: Registry) -> None:
        self._parts = parts
        self._registry = registry
        self._until: dict[str, float] = {}  # by sandbox, as the engine was told; of the monotonic clock

    async def review(self) -> None:
        """Part of the upkeep."""
        found = {live.sandbox: live for live in self._registry if live.usable and not live.session.persistent}
        self._until = {sandbox: until for sandbox, until in self._until.items() if sandbox in found}
        try:
            await do_in_turn(self._prolong, [live for live in found.values() if self._is_due(live)], AT_ONCE)
        except EngineError as error:
            warn("not_prolonged", cause=error)

    def _is_due(self, live: Live) -> bool:
        used = self._parts.clock.monotonic() if live.busy else live.use.used_at
        return self._until.get(live.sandbox, 0.0) < used + live.session.ttl + _MARGIN

    async def _prolong(self, live: Live) -> None:
        life = allow_life(live.session)
        until = self._parts.clock.monotonic() + life
        await self._parts.engine.prolong(live.sandbox, life)
        self._until[live.sandbox] = until
