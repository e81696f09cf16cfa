"""Interpreters that were started before there is a program for them.

Most of what a short program takes is the start of its interpreter, be it Python, Node or a shell. So one of each kind
waits in a sandbox, started and stopped just before it would look at its program; the agent hands it a run that fits in
every respect (docs/parking.md). What is decided here is which runs may ask for that, and when the next one is parked.
Nothing depends on it: the agent starts whatever finds nobody waiting the plain way, once.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from k8e.core.checks import COMMANDS
from k8e.core.model import Language
from k8e.core.parts import Parts
from k8e.core.sessions.live import Live
from k8e.core.sessions.provisioning import Variables, merge_env
from k8e.engine import Place, Shape
from k8e.link.errors import AgentError, LinkError
from k8e.link.model import ExecSpec, Process, Sandbox

Kind = tuple[bytes, ...]  # how the command begins; its program is the rest

BASH: Final[Kind] = COMMANDS[Language.BASH]
PYTHON: Final[Kind] = COMMANDS[Language.PYTHON]
NODE: Final[Kind] = COMMANDS[Language.NODE]

# What waits counts against the sandbox's memory like any other process, so a small one keeps it for its programs.
NEEDED_MEMORY: Final[Mapping[Kind, int]] = {BASH: 32 << 20, PYTHON: 128 << 20, NODE: 384 << 20}
# Linux refuses a longer argument, and so must we: MAX_ARG_STRLEN, with its end.
LONGEST: Final = (128 << 10) - 1
# What a program can find out about its process only through /proc, or with the tools that read it, is not the same in
# every respect: when it started, what is mapped into it, and in gVisor the length of its arguments.
_CURIOUS: Final = re.compile(
    rb"/proc\b|psutil|setproctitle|process\.title|LD_PRELOAD|\b(?:ps|pgrep|pidof|pkill|killall|top|htop|lsof|pstree|gdb|strace|ltrace)\b"
)
# Long enough that programs in quick succession are not slowed down by the start of interpreters that none of them
# would find ready, and that what they changed is older than the clock's tick when the next interpreter reads it.
PAUSE: Final = 0.03
# An idle session gives the memory back.
KEEP: Final = 300.0
_PATIENCE: Final = 3  # failures in a row before a kind is left alone


def suits(spec: ExecSpec) -> bool:
    """Whether a run could be handed over, as far as it can be told from what it is."""
    if spec.argv[:-1] not in NEEDED_MEMORY:
        return False
    if spec.terminal is not None or spec.rlimits:
        return False
    code = spec.argv[-1]
    if spec.argv[:-1] == NODE and code.startswith((b"-", b"\\-")):
        return False  # which Node takes for another option, and for how to escape one
    return len(code) <= LONGEST and not _CURIOUS.search(code)


def plan(kind: Kind, place: Place, env: Variables) -> ExecSpec:
    """The command that waits. Of unlike length to any program: the place where one will be is found by this text."""
    placeholder = secrets.token_hex(16).encode()
    return ExecSpec(
        (*kind, placeholder),
        merge_env(place.env, env),
        place.workspace,
        identity=place.user,
        keep_capabilities=place.capable,
    )


async def park(sandbox: Sandbox, place: Place, memory: int, env: Variables = (), *, keep: float | None = None) -> None:
    """One of each kind that the sandbox has and has room for; returns when they wait. `memory` is the sandbox's limit;
    without `keep` they wait until they are used."""
    failed = [kind for kind in NEEDED_MEMORY if not await _park(sandbox, place, memory, env, kind, keep)]
    if failed and place.capable:
        # At its first start root's Python writes what it compiles beside its sources: too young then to rely on.
        await asyncio.sleep(PAUSE)
        for kind in failed:
            await _park(sandbox, place, memory, env, kind, keep)


def waits_for_mounts(shape: Shape, place: Place) -> bool:
    """An image's own interpreter that is root there could take hold of what its sandbox's directories come through: it
    is parked when they are in place."""
    return bool(shape.slots) and not place.user.uid


async def _park(sandbox: Sandbox, place: Place, memory: int, env: Variables, kind: Kind, keep: float | None) -> bool:
    # A run whose environment speaks to the dynamic linker has business of its own there.
    if not place.loader or memory < NEEDED_MEMORY[kind] or any(name.startswith(b"LD_") for name, _ in env):
        return False
    try:
        await sandbox.park(plan(kind, place, env), place.loader, keep=keep)
    except AgentError:
        return False  # it is not installed, or not one that the loader knows, or its files are just being changed
    return True


@dataclass(slots=True)
class _Watch:
    """What is known of the interpreters of one session."""

    sandbox: Sandbox
    place: Place
    wanted: set[Kind] = field(default_factory=set)
    failures: dict[Kind, int] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    parking: asyncio.Task[None] | None = None


class Interpreters:
    """Sees to it that the sessions of a service have interpreters that wait."""

    def __init__(self, parts: Parts) -> None:
        self._tasks = parts.tasks
        self._metrics = parts.metrics
        self._watches: dict[str, _Watch] = {}
        self._closed = False

    def choose(self, spec: ExecSpec) -> ExecSpec:
        return replace(spec, parked=True) if suits(spec) else spec

    def begin(self, live: Live, sandbox: Sandbox, place: Place, *, warm: bool) -> None:
        """A session is there. A warm sandbox has its interpreters already, unless the environment is another."""
        if not warm or live.env:
            self._want(live, sandbox, place, BASH)
            self._want(live, sandbox, place, PYTHON)

    def started(self, spec: ExecSpec, process: Process) -> None:
        if spec.parked:
            self._metrics.parked.add("handed_over" if process.handed_over else "plain")

    def ended(self, live: Live, sandbox: Sandbox, place: Place, spec: ExecSpec) -> None:
        """The next one is parked behind a run of its kind, whether or not it was one that waited."""
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
        # Whoever runs now, or the parking that is under way, comes back here when it ends.
        if live.usable and not live.uses and watch.parking is None and watch.wanted:
            watch.parking = self._tasks.spawn(self._park_one(live, watch, min(watch.wanted)))

    async def _park_one(self, live: Live, watch: _Watch, kind: Kind) -> None:
        try:
            memory = live.session.limits.memory
            done = await _park(watch.sandbox, watch.place, memory, live.env, kind, KEEP)
        except LinkError:
            return  # whoever runs the next command hears of it
        finally:
            watch.parking = None
        watch.wanted.discard(kind)
        watch.failures[kind] = 0 if done else watch.failures.get(kind, 0) + 1
        if watch.wanted:
            self._delay(live, watch)

    def close(self) -> None:
        """No more of them: the runs that end with the service are followed by none."""
        self._closed = True
        for sandbox in list(self._watches):
            self._leave(sandbox)

    def _leave(self, sandbox: str) -> None:
        watch = self._watches.pop(sandbox, None)
        if watch is not None and watch.timer is not None:
            watch.timer.cancel()
