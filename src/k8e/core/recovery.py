"""Recovers what an earlier daemon left, before this one serves: goes on with sessions that live, finishes or rolls back
what was half done, and removes sandboxes that belong to no session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from k8e.core.errors import Fault
from k8e.core.log.daemon_log import note, warn
from k8e.core.model import Phase, Status
from k8e.core.parts import Parts
from k8e.core.pool.pool import Pool
from k8e.core.runs.background import Background
from k8e.core.runs.endings import DAEMON_DIED, Endings, end_command, put_away, record_outcome
from k8e.core.sandbox.environment import recall_env
from k8e.core.sandbox.programs import remove_program
from k8e.core.sessions import ends
from k8e.core.sessions.hosts import Hosts
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Opened, Registry, Sessions
from k8e.core.store.records import RunRecord, SessionRecord
from k8e.core.tasks import wait_done
from k8e.core.translation import translated
from k8e.engine import EngineError
from k8e.link.errors import LinkError
from k8e.link.model import CommandInfo

T = TypeVar("T")

_AT_ONCE: Final = 32  # most of the time is spent waiting for agents
_PATIENCE: Final = 20.0  # with one sandbox: no caller is served meanwhile


@dataclass(frozen=True, slots=True)
class _Left:
    """The commands that an earlier daemon left in a sandbox."""

    opened: Opened
    runs: Sequence[tuple[RunRecord, CommandInfo | None]]  # that no caller waits for any more
    others: Sequence[CommandInfo]  # on no record


@dataclass(frozen=True, slots=True, eq=False)
class Recovery:
    _parts: Parts
    _sessions: Sessions
    _registry: Registry
    _lifecycle: Lifecycle
    _endings: Endings
    _background: Background
    _hosts: Hosts
    _pool: Pool
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def recover(self) -> None:
        lives = []
        # Parents before their children, also where a clock was wrong when they were made.
        for record in sorted(await self._parts.store.sessions(), key=lambda record: bool(record.parent_sandbox)):
            session = record.session
            if session.phase is Phase.DESTROYED:
                name = session.owner, session.tenant, session.session_id
                self._registry.remember_end(name, ends.describe_end(record.reason))
                continue
            lives.append(await self._restore(record))
        with translated("listing the sandboxes that there are"):
            found = set(await self._parts.engine.list())
        warm = await self._pool.recover(found)
        orphans = found - {live.sandbox for live in lives} - warm
        # Parents first: what becomes of them becomes of their children.
        children = [live for live in lives if live.record.parent_sandbox]
        for generation in ([live for live in lives if not live.record.parent_sandbox], children):
            await self._do(self._settle(live, live.sandbox in found) for live in generation)
        if all(await self._do(self._clear(sandbox) for sandbox in orphans)):
            try:
                await self._parts.store.trust()
            except Fault as error:
                warn("marker_stays", cause=error.detail)  # the next daemon keeps what it could remove
        await self._parts.environments.forget_others({live.sandbox for live in self._registry})
        self._parts.metrics.sessions.value = len(self._registry)
        note("recovered", sessions=len(self._registry), orphans=len(orphans))

    async def _do(self, work: Iterable[Awaitable[T]]) -> Sequence[T]:
        return await asyncio.gather(*(self._within_slot(each) for each in work))

    async def _within_slot(self, work: Awaitable[T]) -> T:
        async with self._slots:
            return await work

    async def _restore(self, record: SessionRecord) -> Live:
        clock = self._parts.clock
        if record.boot != clock.boot:
            # Times of another boot say nothing. Restarting counts as a use, so that nothing expires by mistake.
            record = replace(record, boot=clock.boot, used_at=clock.monotonic())
            await self._parts.store.rebase(record.sandbox, record.boot, record.used_at)
        live = Live(record, clock, parent=self._registry.get(record.parent_sandbox), stored=True)
        self._registry.add(live)
        return live

    async def _clear(self, sandbox: str) -> bool:
        """Sandboxes that are on no record are destroyed. If the record is what was damaged, their files are kept."""
        warn("orphan", sandbox=sandbox)
        store, engine = self._parts.store, self._parts.engine
        try:
            if store.known:
                await engine.destroy(sandbox)
            elif kept := await engine.set_aside(sandbox):
                self._parts.audit.note("sandbox_set_aside", sandbox=sandbox, path=kept)
        except (EngineError, OSError) as error:
            warn("orphan_stays", sandbox=sandbox, cause=error)
            return False
        return True

    async def _settle(self, live: Live, exists: bool) -> None:
        if live.ending is not None:
            await wait_done(live.ending)  # with its parent
        elif live.phase is Phase.CREATING:
            await self._end(live, ends.ABANDONED)
        elif live.phase is Phase.DESTROYING:
            await self._end(live, live.record.reason or ends.DESTROYED)
        elif live.record.fleeting:
            await self._end(live, ends.FINISHED)  # the caller of its command is gone with the daemon that ran it
        elif live.record.parent_sandbox and (live.parent is None or not live.parent.usable):
            await self._end(live, ends.PARENT_ENDED)
        elif not exists:
            await self._end(live, ends.LOST)
        elif live.phase in (Phase.STOPPING, Phase.STARTING):
            await wait_done(self._lifecycle.halt(live, live.record.reason or ends.STOPPED))
        elif not live.stopped:
            await self._adopt(live)

    async def _end(self, live: Live, reason: str) -> None:
        # A failure is in the log, and tried again as part of the upkeep.
        await wait_done(self._lifecycle.end(live, reason))

    async def _adopt(self, live: Live) -> None:
        # Asked first: dialling an agent that is dead takes its time.
        if not (await self._sessions.examine(live)).alive:
            await wait_done(self._lifecycle.give_up(live, ends.LOST))
            return
        try:
            async with asyncio.timeout(_PATIENCE):
                left = await self._take_over(live)
        except (Fault, LinkError, TimeoutError) as error:
            # No caller could use it as it was meant to be.
            warn("not_adopted", session=live.session_id, sandbox=live.sandbox, cause=error)
            silent = isinstance(error, LinkError | TimeoutError)
            await wait_done(self._lifecycle.give_up(live, ends.UNRESPONSIVE if silent else ends.NOT_ADOPTED))
            return
        # It answers, and stays, however long its commands take to end: callers wait for that only for a while.
        ending = self._parts.tasks.spawn(self._match_runs(left))
        await wait_done(ending, timeout=_PATIENCE)

    async def _take_over(self, live: Live) -> _Left:
        opened = await self._sessions.enter(live)
        # Before anything else: what runs in there must not have more than the record says for longer than need be.
        await self._hosts.restore(live)
        if live.session.env_keys:
            live.recall(await recall_env(opened.sandbox))
        commands = {info.id: info for info in await opened.sandbox.commands()}
        runs = []
        # All of it is asked before callers are served: what they start is none of this.
        for record in await self._parts.store.runs(live.sandbox, unfinished=True):
            info = None if record.command is None else commands.pop(record.command, None)
            if info is not None and record.background:
                live.background.add(record.run_id, terminal=record.terminal)
            else:
                runs.append((record, info))
        return _Left(opened, runs, tuple(commands.values()))

    async def _match_runs(self, left: _Left) -> None:
        endings = [self._end_foreground(left.opened, record, info) for record, info in left.runs]
        others = [self._put_away(left.opened, info) for info in left.others]
        live = left.opened.live
        for error in await asyncio.gather(*endings, *others, self._background.collect(live), return_exceptions=True):
            if isinstance(error, Fault | LinkError):
                # The session goes on: upkeep collects again, and a later daemon ends what runs still.
                warn("run_not_matched", session=live.session_id, sandbox=live.sandbox, cause=error)
            elif error is not None:
                raise error

    async def _put_away(self, opened: Opened, info: CommandInfo) -> None:
        if info.running:
            await put_away(opened.sandbox, info.id)
        else:
            await opened.sandbox.release(info.id)

    async def _end_foreground(self, opened: Opened, record: RunRecord, info: CommandInfo | None) -> None:
        """Its caller is gone with the daemon that ran it, and its output with its caller."""
        if info is None:
            end = None
        elif info.running:
            end = await put_away(opened.sandbox, info.id)
        else:  # its outcome is there: where it cannot be read now, the next daemon reads it
            end = await end_command(opened.sandbox, info.id, running=False)
        ended = replace(record, status=Status.LOST) if end is None else record_outcome(record, end, stdout=0, stderr=0)
        if info is None or info.running:
            ended = replace(ended, reason=DAEMON_DIED)
        self._endings.keep(ended, opened.live)
        await remove_program(opened.sandbox, record.run_id)
