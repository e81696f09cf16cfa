"""The refusal log, beside the audit log: what sandboxes and unauthenticated peers were refused.

Code in a sandbox and peers at a port cause these lines, as many as they like. So they have files of their own
(`audit-refusals.log`), which push out nothing of the audit log; and each source has a rate, beyond which its lines are
counted instead of written. A line that ends in `_more` says how many, once a minute for each source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from k8e.core.clock import Clock
from k8e.core.log.audit import Audit
from k8e.core.log.metrics import Metrics
from k8e.settings import AuditSettings

NAME: Final = "audit-refusals.log"
BURST: Final = 100  # lines that one source causes at once
EVERY: Final = 10.0  # seconds until it may cause one more
PEERS_BURST: Final = 1000  # the same for all unauthenticated peers together, who may have many addresses
PEERS_EVERY: Final = 1.0
SUMMARY: Final = 60.0  # seconds between two counts of one source
SOURCES: Final = 1024  # of each kind that are told apart; the others of it are one
_OTHERS: Final = "others"


class Rate:
    """So many at once, then one after the other. What is remembered is when the burst will be whole again."""

    def __init__(self, burst: int, every: float) -> None:
        self._span = burst * every
        self._every = every
        self._whole_at = 0.0

    def take(self, now: float) -> bool:
        whole_at = max(self._whole_at, now) + self._every
        if whole_at - now > self._span + 1e-9:
            return False
        self._whole_at = whole_at
        return True

    def is_whole(self, now: float) -> bool:
        return now >= self._whole_at


@dataclass(slots=True)
class _Source:
    event: str
    about: Mapping[str, object]
    rate: Rate = field(default_factory=lambda: Rate(BURST, EVERY))
    left_out: int = 0
    told_at: float = 0.0


class RefusalLog:
    def __init__(self, beside: Path | None, settings: AuditSettings, metrics: Metrics, clock: Clock) -> None:
        """`beside`: the audit log. Without it nothing is kept."""
        self._audit = Audit(beside.with_name(NAME) if beside else None, settings, metrics, clock)
        self._clock = clock
        # By whether it is a peer: those may have many addresses, and must not take the places of sandboxes.
        self._sources: dict[bool, dict[tuple[str, str], _Source]] = {False: {}, True: {}}
        self._peers = Rate(PEERS_BURST, PEERS_EVERY)

    def note(
        self, event: str, source: str, about: Mapping[str, object], *, peer: bool = False, **fields: object
    ) -> None:
        """`about` tells the source, in its lines and in their count. `peer`: it is an unauthenticated peer; all of
        those have a rate together as well."""
        now, found = self._clock.monotonic(), self._find(event, source, about, peer)
        if found.rate.take(now) and (not peer or self._peers.take(now)):
            self._audit.note(event, **found.about, **fields)
            return
        if not found.left_out:
            found.told_at = now
        found.left_out += 1

    def _find(self, event: str, source: str, about: Mapping[str, object], peer: bool) -> _Source:
        known = self._sources[peer].get((event, source))
        if known is None:
            if len(self._sources[peer]) >= SOURCES:
                self._forget(peer)
            if len(self._sources[peer]) >= SOURCES:
                source, about = _OTHERS, {"source": _OTHERS}
            known = self._sources[peer].setdefault((event, source), _Source(event, about))
        return known

    def _forget(self, peer: bool) -> None:
        """Those of whom nothing has to be remembered."""
        now = self._clock.monotonic()
        self._sources[peer] = {
            key: each for key, each in self._sources[peer].items() if each.left_out or not each.rate.is_whole(now)
        }

    def review(self, *, all_of_them: bool = False) -> None:
        """Part of the upkeep: says how many lines were left out."""
        now = self._clock.monotonic()
        for each in (*self._sources[False].values(), *self._sources[True].values()):
            if each.left_out and (all_of_them or now - each.told_at >= SUMMARY):
                self._audit.note(f"{each.event}_more", **each.about, count=each.left_out)
                each.left_out = 0

    async def sync(self) -> None:
        await self._audit.sync()

    async def close(self) -> None:
        self.review(all_of_them=True)
        await self._audit.close()
