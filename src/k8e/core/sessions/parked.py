"""Keeps interpreters parked in the sandboxes of sessions: decides when the next one is parked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

from k8e.core.parts import Parts
from k8e.core.sandbox.interpreters import BASH, NEEDED_MEMORY, PAUSE, PYTHON, Kind, park_one, suits
from k8e.core.sessions.live import Live
from k8e.engine import Place
from k8e.link.errors import LinkError
from k8e.link.model import ExecSpec, Process, Sandbox

# An idle session gives the memory back.
KEEP: Final = 300.0
_PATIENCE: Final = 3  # failures in a row before a kind is left alone


@dataclass(slots=True)
class _Watch:
    """The interpreters of one session: which are wanted, and which could not be parked."""

    sandbox: Sandbox
    place: Place
    wanted: set[Kind] = field(default_factory=set)
    failures: dict[Kind, int] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    parking: asyncio.Task[None] | None = None


class Interpreters:
    """Keeps interpreters parked in the sessions of a service."""

    def __init__(self, parts: Parts) -> None:
        self._tasks = parts.tasks
        self._metrics = parts.metrics
        self._watches: dict[str, _Watch] = {}
        self._closed = False

    def choose(self, spec: ExecSpec) -> ExecSpec:
        return replace(spec, parked=True) if suits(spec) else spec

    def begin(self, live: Live, sandbox: Sandbox, place: Place, *, warm: bool) -> None:
        """A session begins. A warm sandbox has its interpreters already, unless the session has an environment."""
        if not warm or live.env:
            self._want(live, sandbox, place, BASH)
            self._want(live, sandbox, place, PYTHON)

    def started(self, spec: ExecSpec, process: Process) -> None:
        if spec.parked:
            self._metrics.parked.add("handed_over" if process.handed_over else "plain")

    def ended(self, live: Live, sandbox: Sandbox, place: Place, spec: ExecSpec) -> None:
        """The next interpreter is parked behind a run of its kind, whether or not a parked one took that run."""
        if spec.argv[:-1] in NEEDED_MEMORY:
            self._want(live, sandbox, place, spec.argv[:-1])
        elif (watch := self._watches.get(live.sandbox)) is not None and watch.wanted:
            self._delay(live, watch)

    def _want(self, live: Live, sandbox: Sandbox, place: Place, kind: Kind) -> None:
        if live.gone.done() or self._closed:
            return
        watch = self._watches.get(live.sandbox)
        if watch is None:
            watch = self._watches[live.sandbox] = _Watch(sandbox, place)
            live.gone.add_done_callback(lambda _: self._leave(live.sandbox))
        watch.sandbox, watch.place = sandbox, place
        if watch.failures.get(kind, 0) < _PATIENCE:
            watch.wanted.add(kind)
            self._delay(live, watch)

    def _delay(self, live: Live, watch: _Watch) -> None:
        if self._closed:
            return
        if watch.timer is not None:
            watch.timer.cancel()
        watch.timer = asyncio.get_running_loop().call_later(PAUSE, self._refill, live, watch)

    def _refill(self, live: Live, watch: _Watch) -> None:
        watch.timer = None
        # A run that goes on now, or the parking under way, leads back here when it ends.
        if live.usable and not live.use.count and watch.parking is None and watch.wanted:
            watch.parking = self._tasks.spawn(self._park_one(live, watch, min(watch.wanted)))

    async def _park_one(self, live: Live, watch: _Watch, kind: Kind) -> None:
        try:
            memory = live.session.limits.memory
            done = await park_one(watch.sandbox, watch.place, memory, live.env, kind, KEEP)
        except LinkError:
            return  # the caller of the next command hears of it
        finally:
            watch.parking = None
        watch.wanted.discard(kind)
        watch.failures[kind] = 0 if done else watch.failures.get(kind, 0) + 1
        if watch.wanted:
            self._delay(live, watch)

    def close(self) -> None:
        """Parks no more: runs that end with the service are followed by none."""
        self._closed = True
        for sandbox in list(self._watches):
            self._leave(sandbox)

    def _leave(self, sandbox: str) -> None:
        watch = self._watches.pop(sandbox, None)
        if watch is not None and watch.timer is not None:
            watch.timer.cancel()
