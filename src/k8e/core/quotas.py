"""What one payer may have at the same time, and how quickly they may ask for more (`[quotas]` in docs/settings.md).

Who has reached a limit is refused at once and told when to come back, rather than kept waiting.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Final

from k8e.core.access import Payer
from k8e.core.clock import Clock
from k8e.core.errors import Fault, Kind
from k8e.core.live import Live
from k8e.core.model import Phase
from k8e.engine import Limits
from k8e.settings import QuotasSettings

_SOON: Final = 1.0  # commands and sessions end when they end; this is when to look again
_LATER: Final = 10.0
_MINUTE: Final = 60.0


class Quotas:
    def __init__(self, settings: QuotasSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._runs: collections.Counter[Payer] = collections.Counter()
        # When the payer will have the full number of creations again: all that has to be remembered of a rate.
        self._full_at: dict[Payer, float] = {}

    def check_session(self, payer: Payer, limits: Limits, sessions: Iterable[Live]) -> None:
        """Whether there may be one more. Counts it, where it is the rate that counts."""
        theirs = [live for live in sessions if live.payer == payer]
        most = self._settings.sessions
        if most and len(theirs) >= most:
            raise _exhausted("too_many_sessions", f"you have {most} sessions already", _LATER)
        disk = sum(live.record.limits.disk for live in theirs) + limits.disk
        if self._settings.disk and disk > self._settings.disk:
            error = f"your sessions would have {disk} bytes of disk together, the limit is {self._settings.disk}"
            raise _exhausted("too_much_disk", error, _LATER)
        self.check_start(payer, limits, theirs)
        self._count_creation(payer)

    def check_start(self, payer: Payer, limits: Limits, others: Iterable[Live]) -> None:
        """Whether one more may run. Those that are stopped take no processor and no memory."""
        theirs = [live.record.limits for live in others if live.payer == payer and live.phase is not Phase.STOPPED]
        cpus = sum(one.cpus for one in theirs) + limits.cpus
        if self._settings.cpus and cpus > self._settings.cpus + 1e-9:
            error = f"your sessions would have {cpus:g} processors together, the limit is {self._settings.cpus:g}"
            raise _exhausted("too_many_cpus", error, _LATER)
        memory = sum(one.memory for one in theirs) + limits.memory
        if self._settings.memory and memory > self._settings.memory:
            error = f"your sessions would have {memory} bytes of memory together, the limit is {self._settings.memory}"
            raise _exhausted("too_much_memory", error, _LATER)

    def check_child(self, parent: Live) -> None:
        """Whether there may be one more. It is a session like any other besides."""
        most = self._settings.children
        if most and len(parent.children) >= most:
            raise _exhausted("too_many_children", f"session {parent.session_id} has {most} children already", _LATER)

    def _count_creation(self, payer: Payer) -> None:
        most = self._settings.creates_per_minute
        if not most:
            return
        now, each = self._clock.monotonic(), _MINUTE / most
        full_at = max(self._full_at.get(payer, now), now) + each
        if full_at - now > _MINUTE + 1e-9:
            error = f"you have created {most} sessions within a minute"
            raise _exhausted("too_many_creates", error, full_at - now - _MINUTE)
        self._full_at[payer] = full_at
        if len(self._full_at) > 1000:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}

    def take_run(self, payer: Payer, sessions: Iterable[Live]) -> Callable[[], None]:
        """One more run, until what is returned is called. Those in the background are counted by their sessions."""
        if most := self._settings.concurrent_runs:
            background = sum(len(live.background) for live in sessions if live.payer == payer)
            if self._runs[payer] + background >= most:
                raise _exhausted("too_many_runs", f"you have {most} runs at the same time already", _SOON)
        self._runs[payer] += 1
        given_back = False

        def give_back() -> None:
            nonlocal given_back
            if not given_back:
                given_back = True
                self._runs[payer] -= 1
                if not self._runs[payer]:
                    del self._runs[payer]

        return give_back


def _exhausted(code: str, error: str, retry_after: float) -> Fault:
    hint = "End something of yours, or try again later."
    return Fault(Kind.EXHAUSTED, code, error, hint=hint, retry_after=retry_after)
