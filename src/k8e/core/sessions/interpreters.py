"""Interpreters: the command of each language, and those that are parked, started before there is a program for them.

Most of the time of a short program goes into the start of its interpreter: Python, Node or a shell. So one of each kind
waits in a sandbox, stopped just before it would look at its program, and the agent hands it a run that fits in every
respect (docs/parking.md). It stays as a template, of which each run gets a copy. This
module decides which runs may ask for that, and when another interpreter is parked. No run depends on it: where none is
parked, the agent starts the command the plain way, once.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from k8e.core.model import Language
from k8e.core.parts import Parts
from k8e.core.sandbox.environment import Variables
from k8e.core.sandbox.programs import MAX_WORD
from k8e.core.sessions.live import Live
from k8e.engine import Place, SandboxSpec, Shape
from k8e.link.errors import AgentError, LinkError
from k8e.link.model import ExecSpec, Process, Sandbox

Kind = tuple[bytes, ...]  # how the command begins; its program is the rest

# `--`: bash takes what follows -c for another option when it begins with a dash. The others take it as it is.
COMMANDS: Final[Mapping[Language, Kind]] = {
    Language.BASH: (b"bash", b"-c", b"--"),
    Language.PYTHON: (b"python3", b"-c"),
    Language.NODE: (b"node", b"-e"),
    Language.TS: (b"tsx", b"-e"),
}

BASH: Final[Kind] = COMMANDS[Language.BASH]
PYTHON: Final[Kind] = COMMANDS[Language.PYTHON]
NODE: Final[Kind] = COMMANDS[Language.NODE]

# A parked interpreter counts against the sandbox's memory like any other process; a small sandbox has none.
NEEDED_MEMORY: Final[Mapping[Kind, int]] = {BASH: 32 << 20, PYTHON: 128 << 20, NODE: 384 << 20}
WARM: Final = (BASH, PYTHON)  # what a session has before its first run of that kind; Node takes more memory than both
# Programs that look at their own process through /proc, or with tools that read it, would see a difference: when it
# started, what is mapped into it, and in gVisor the length of its arguments.
_CURIOUS: Final = re.compile(
    rb"/proc\b|psutil|setproctitle|process\.title|LD_PRELOAD|\b(?:ps|pgrep|pidof|pkill|killall|top|htop|lsof|pstree|gdb|strace|ltrace)\b"
)
# Programs in quick succession are not slowed down by the start of interpreters that none of them would find ready; and
# the files that they changed are older than the clock's tick when the next interpreter reads them.
PAUSE: Final = 0.03
KEEP: Final = 300.0  # an idle session gives the memory back
KEEP_MORE: Final = 30.0  # and sooner that of templates for runs at once
MOST: Final = 4  # templates of a kind, as the agent keeps
_PATIENCE: Final = 3  # failures in a row before a kind is left alone
# Pauses for which the first interpreters of a new session wait while others are being created: of twenty sessions at
# once, each would start two interpreters while the rest still wait for their sandboxes.
_COURTESY: Final = 30


def suits(spec: ExecSpec) -> bool:
    """Whether a parked interpreter could take the run, as far as the spec tells."""
    if spec.argv[:-1] not in NEEDED_MEMORY:
        return False
    if spec.terminal is not None or spec.rlimits:
        return False
    code = spec.argv[-1]
    if spec.argv[:-1] == NODE and code.startswith((b"-", b"\\-")):
        return False  # Node takes it for another option, or for an escaped one
    return len(code) <= MAX_WORD and not _CURIOUS.search(code)


def plan(kind: Kind, place: Place, env: Variables) -> ExecSpec:
    """The command that is parked. The agent finds the program's place by the placeholder, which no program equals."""
    placeholder = secrets.token_hex(16).encode()
    return ExecSpec(
        (*kind, placeholder),
        tuple(dict((*place.env, *env)).items()),
        place.workspace,
        identity=place.user,
        keep_capabilities=place.capable,
    )


async def park(sandbox: Sandbox, place: Place, spec: SandboxSpec) -> None:
    """Parks one of each kind that a warm sandbox has and has room for; returns when they wait, until they are used."""
    if waits_for_mounts(spec.shape, place):
        return
    failed = [kind for kind in WARM if not await park_one(sandbox, place, spec.limits.memory, (), kind, None)]
    if failed and place.capable:
        # At its first start root's Python writes what it compiles beside its sources: too young then to rely on.
        await asyncio.sleep(PAUSE)
        for kind in failed:
            await park_one(sandbox, place, spec.limits.memory, (), kind, None)


def waits_for_mounts(shape: Shape, place: Place) -> bool:
    """An interpreter of an image whose user is root could take hold of the slots, through which directories are
    mounted: it is parked when they are mounted."""
    return bool(shape.slots) and not place.user.uid


async def park_one(sandbox: Sandbox, place: Place, memory: int, env: Variables, kind: Kind, keep: float | None) -> bool:
    """Returns whether it waits now."""
    # An environment with variables for the dynamic linker asks for something that parking would change.
    if not place.loader or memory < NEEDED_MEMORY[kind] or any(name.startswith(b"LD_") for name, _ in env):
        return False
    try:
        await sandbox.park(plan(kind, place, env), place.loader, keep=keep)
    except AgentError:
        return False  # it is not installed, or not one that the loader knows, or its files are just being changed
    return True


@dataclass(slots=True)
class _Watch:
    """The interpreters of one session: which are wanted, and which could not be parked."""

    sandbox: Sandbox
    place: Place
    wanted: set[Kind] = field(default_factory=set)
    waiting: dict[Kind, float] = field(default_factory=dict)  # until when one does, if no run takes it
    copies: Counter[Kind] = field(default_factory=Counter)  # that run now: as many templates are in use
    ended: dict[Kind, float] = field(default_factory=dict)  # when the last run of it has
    second: float = 0.0  # until when there is one more Node, if no run takes it
    failures: dict[Kind, int] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    courtesy: int = 0  # pauses that are left
    parking: asyncio.Task[None] | None = None

    def has_waiting(self, kind: Kind) -> bool:
        return self.waiting.get(kind, 0.0) > asyncio.get_running_loop().time()


class Interpreters:
    """Keeps interpreters parked in the sessions of a service."""

    def __init__(self, parts: Parts, busy: Callable[[], bool]) -> None:
        """`busy`: whether a caller waits for a session."""
        self._busy = busy
        self._tasks = parts.tasks
        self._metrics = parts.metrics
        self._watches: dict[str, _Watch] = {}
        self._closed = False

    def begin(self, live: Live, sandbox: Sandbox, place: Place, *, warm: bool) -> None:
        """A session begins. A warm sandbox has its interpreters already, unless the session has an environment."""
        if not warm or live.env:
            for kind in WARM:
                self._want(live, sandbox, place, kind)
            if watch := self._watches.get(live.sandbox):
                watch.courtesy = _COURTESY

    def started(self, live: Live, sandbox: Sandbox, place: Place, spec: ExecSpec, process: Process) -> None:
        """A run that suits and found no template is followed by one at once: the next run may come as quickly."""
        if not spec.parked or live.gone.done():
            return
        kind = spec.argv[:-1]
        self._metrics.parked.add("handed_over" if process.handed_over else "plain")
        watch = self._watch(live, sandbox, place)
        watch.waiting.pop(kind, None)
        now = asyncio.get_running_loop().time()
        if process.copied:
            watch.copies[kind] += 1
            if kind == NODE and now - watch.ended.get(kind, 0.0) < PAUSE:
                # Its next copy is not ready as soon as that of the others: runs without a pause take turns between two.
                wanted, watch.second = watch.second < now, now + KEEP_MORE
                if wanted:
                    self._want(live, sandbox, place, kind, at_once=True)
        elif not process.handed_over and (kind in WARM or kind in watch.ended):
            self._want(live, sandbox, place, kind, at_once=True)

    def ended(self, live: Live, sandbox: Sandbox, place: Place, spec: ExecSpec, process: Process) -> None:
        """The next interpreter is parked behind a run of its kind, unless one waits: such as a template's next copy."""
        kind = spec.argv[:-1]
        watch = self._watches.get(live.sandbox)
        if watch is not None and spec.parked:
            watch.ended[kind] = asyncio.get_running_loop().time()
        if watch is not None and process.copied:
            watch.copies[kind] -= 1
            watch.waiting[kind] = asyncio.get_running_loop().time() + KEEP
        if kind in NEEDED_MEMORY:
            self._want(live, sandbox, place, kind)
        elif watch is not None and watch.wanted:
            self._delay(live, watch)

    def _watch(self, live: Live, sandbox: Sandbox, place: Place) -> _Watch:
        watch = self._watches.get(live.sandbox)
        if watch is None:
            watch = self._watches[live.sandbox] = _Watch(sandbox, place)
            live.gone.add_done_callback(lambda _: self._leave(live.sandbox))
        watch.sandbox, watch.place = sandbox, place
        return watch

    def _want(self, live: Live, sandbox: Sandbox, place: Place, kind: Kind, *, at_once: bool = False) -> None:
        if live.gone.done() or self._closed:
            return
        watch = self._watch(live, sandbox, place)
        failures = watch.failures.get(kind, 0)
        most = min(MOST, live.session.limits.memory // NEEDED_MEMORY[kind])
        if failures < _PATIENCE and watch.copies[kind] < most and not watch.has_waiting(kind):
            watch.wanted.add(kind)
        if at_once and not failures and watch.parking is None and kind in watch.wanted:
            watch.parking = self._tasks.spawn(self._park_one(live, watch, kind, again=True))
        elif watch.wanted:
            self._delay(live, watch)

    def _delay(self, live: Live, watch: _Watch) -> None:
        if self._closed:
            return
        if watch.timer is not None:
            watch.timer.cancel()
        watch.timer = asyncio.get_running_loop().call_later(PAUSE, self._refill, live, watch)

    def _refill(self, live: Live, watch: _Watch) -> None:
        watch.timer = None
        if watch.courtesy and self._busy():
            watch.courtesy -= 1
            self._delay(live, watch)
            return
        watch.courtesy = 0
        # A run that goes on now, or the parking under way, leads back here when it ends.
        if live.usable and not live.use.count and watch.parking is None and watch.wanted:
            watch.parking = self._tasks.spawn(self._park_one(live, watch, min(watch.wanted)))

    async def _park_one(self, live: Live, watch: _Watch, kind: Kind, *, again: bool = False) -> None:
        watch.wanted.discard(kind)
        keep = KEEP_MORE if watch.copies[kind] else KEEP
        try:
            memory = live.session.limits.memory
            done = await park_one(watch.sandbox, watch.place, memory, live.env, kind, keep)
        except LinkError:
            return  # the caller of the next command hears of it
        finally:
            watch.parking = None
        watch.failures[kind] = 0 if done else watch.failures.get(kind, 0) + 1
        if done:
            watch.waiting[kind] = asyncio.get_running_loop().time() + keep
        elif again:
            watch.wanted.add(kind)  # in the next pause, when the files that a run has changed are older
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
