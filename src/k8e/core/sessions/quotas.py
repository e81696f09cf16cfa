"""The quotas of one payer: how much at the same time, and how many creates a minute (`[quotas]` in docs/settings.md).

A payer who has reached a limit is refused at once and told when to come back, rather than kept waiting.

Where the settings say nothing about processors, memory and disks there is no limit to them, with one exception: once a
door listens beyond loopback (`expose`), a tenant of the gateway has a share of the machine, or of the cluster. No key
alone can use up a machine for which its administrator has chosen no numbers.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.core.access.access import Payer
from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE
from k8e.core.parts import Parts
from k8e.core.pool.memory import SystemMemory
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Registry
from k8e.engine import Room
from k8e.profiles.text import describe_amount

_SOON: Final = 1.0  # when to try again; when a command or a session ends is not known
_LATER: Final = 10.0
_MINUTE: Final = 60.0


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The quotas of a tenant of the gateway where the settings say nothing."""

    cpus: float = 0
    memory: int = 0
    disk: int = 0
    of: str = "machine"


_HALF: Final = "half of the {}'s"
_SHARES: Final = {"cpus": "twice as many as the {} has", "memory": _HALF, "disk": _HALF}


def measure_share(state: Path | None, room: Room | None = None) -> TenantShare:
    """Of this machine: twice its processors, half of its memory, half of the disk that `state` is on. Time on
    processors is shared where sessions want more than there is; memory and disks are not. `room`: the same of a
    cluster."""
    if room is not None:
        return TenantShare(2 * room.cpus, _halve(room.memory), _halve(room.disk), of="cluster")
    disk = 0
    if state is not None:
        found = os.statvfs(state)
        disk = found.f_blocks * found.f_frsize
    return TenantShare(2 * len(os.sched_getaffinity(0)), _halve(SystemMemory().total()), _halve(disk))


def _halve(size: int) -> int:
    """In whole MiB."""
    return size // 2 >> 20 << 20


class Quotas:
    def __init__(self, parts: Parts, registry: Registry) -> None:
        self._settings = parts.settings.quotas
        self._clock = parts.clock
        self._registry = registry
        self._share: TenantShare | None = None
        self._runs: collections.Counter[Payer] = collections.Counter()
        # When the payer will have the full number of creations again: all that has to be remembered of a rate.
        self._full_at: dict[Payer, float] = {}

    def expose(self, share: TenantShare) -> None:
        """From now on tenants of the gateway have that share where the settings say nothing."""
        self._share = share

    def _most(self, payer: Payer, name: str) -> tuple[float, str]:
        """The limit, 0 for none, and where it comes from."""
        value: float | None = getattr(self._settings, name)
        if value is not None:
            return value, ""
        if payer.owner != REMOTE or self._share is None:
            return 0, ""
        share = _SHARES[name].format(self._share.of)
        return getattr(self._share, name), f"a tenant of the gateway has {share} unless the settings say more"

    def check_session(self, new: Live) -> None:
        """Whether there may be one more. Counts it, where it is the rate that counts."""
        payer, limits = new.payer, new.session.limits
        theirs = [live for live in self._registry if live.payer == payer]
        most = self._settings.sessions
        if most and len(theirs) >= most:
            raise _exhausted("too_many_sessions", f"you have {most} sessions already", _LATER, "sessions")
        disk = sum(live.session.limits.disk for live in theirs) + limits.disk
        room, origin = self._most(payer, "disk")
        if room and disk > room:
            error = _describe_sum("disk", disk, room)
            raise _exhausted("too_much_disk", error, _LATER, "disk", origin)
        self.check_start(new)
        self._count_creation(payer)

    def check_start(self, new: Live) -> None:
        """Whether one more may run. Those that are stopped take no processor and no memory."""
        payer, limits = new.payer, new.session.limits
        others = [live for live in self._registry if live is not new and live.payer == payer]
        theirs = [live.session.limits for live in others if not live.stopped]
        cpus = sum(one.cpus for one in theirs) + limits.cpus
        most, origin = self._most(payer, "cpus")
        if most and cpus > most + 1e-9:
            error = f"your sessions would have {cpus:g} processors together, the limit is {most:g}"
            raise _exhausted("too_many_cpus", error, _LATER, "cpus", origin)
        memory = sum(one.memory for one in theirs) + limits.memory
        most, origin = self._most(payer, "memory")
        if most and memory > most:
            error = _describe_sum("memory", memory, most)
            raise _exhausted("too_much_memory", error, _LATER, "memory", origin)

    def check_child(self, parent: Live) -> None:
        """Whether there may be one more. It is a session like any other besides."""
        most = self._settings.children
        if most and len(parent.children) >= most:
            error = f"session {parent.session_id} has {most} children already"
            raise _exhausted("too_many_children", error, _LATER, "children")

    def _count_creation(self, payer: Payer) -> None:
        most = self._settings.creates_per_minute
        if not most:
            return
        now, each = self._clock.monotonic(), _MINUTE / most
        full_at = max(self._full_at.get(payer, now), now) + each
        if full_at - now > _MINUTE + 1e-9:
            error = f"you have created {most} sessions within a minute"
            raise _exhausted("too_many_creates", error, full_at - now - _MINUTE, "creates_per_minute")
        self._full_at[payer] = full_at
        if len(self._full_at) > 1000:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}

    def recall_creations(self) -> None:
        """Counts the sessions that were created within the last minute, by the daemon or gateway before this one. Those
        that are gone by now are not known."""
        if not (most := self._settings.creates_per_minute):
            return
        monotonic, wall = self._clock.monotonic(), self._clock.wall()
        for live in sorted(self._registry, key=lambda live: live.session.created):
            age = wall - live.session.created
            if 0 <= age < _MINUTE:
                full_at = max(self._full_at.get(live.payer, 0.0), monotonic - age) + _MINUTE / most
                self._full_at[live.payer] = full_at

    def take_run(self, payer: Payer) -> Callable[[], None]:
        """Counts one more run until the returned function is called. Background runs are counted by their sessions."""
        if most := self._settings.concurrent_runs:
            background = sum(len(live.background) for live in self._registry if live.payer == payer)
            if self._runs[payer] + background >= most:
                error = f"you have {most} runs at the same time already"
                raise _exhausted("too_many_runs", error, _SOON, "concurrent_runs")
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


def _describe_sum(name: str, wanted: float, most: float) -> str:
    sum_, limit = describe_amount(name, wanted), describe_amount(name, most)
    return f"your sessions would have {sum_} of {name} together, the limit is {limit}"


def _exhausted(code: str, error: str, retry_after: float, quota: str, origin: str = "") -> Fault:
    """`quota` is the key of `[quotas]`; `origin` says where the limit comes from, if not from there."""
    hint = "End something of yours, or try again later. "
    hint += f"The machine's administrator sets the limit: {quota} of [quotas] in k8e.toml (0: none)."
    return Fault(Kind.EXHAUSTED, code, error, detail=origin, hint=hint, retry_after=retry_after)
