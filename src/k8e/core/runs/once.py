"""One-command sessions: a session that is made for one command and ends with it.

One request brings both, so that no session waits for a caller who is gone already. That it is for one command is on
record before the sandbox exists: a daemon that finds such a session after a crash removes it. The caller has the result
when the command has ended; the sandbox is taken down after that, and counts until then.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Final

from k8e.core.access.access import Payer, choose_tenant, find_payer
from k8e.core.contract import LiveRun
from k8e.core.model import Caller, RunResult, RunSpec, SessionSpec
from k8e.core.runs.foreground import Foreground, NotBegun
from k8e.core.runs.foreground_run import ForegroundRun
from k8e.core.runs.launcher import check_run
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.ends import DESTROYED, FINISHED
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Registry
from k8e.core.tasks import wait_first

# Sandboxes of one payer that are being taken down, before the next is made: a payer who starts more than that waits,
# instead of reaching a quota with sessions that have ended already.
_LEAVING: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Once:
    _lifecycle: Lifecycle
    _registry: Registry
    _creation: Creation
    _foreground: Foreground

    async def start(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> LiveRun:
        live = await self._make(caller, session, run, keep=keep)
        try:
            started = await self._foreground.start(caller, run, live)
        except BaseException:
            self._lifecycle.end(live, DESTROYED if keep else FINISHED)
            raise
        if not keep:
            started.when_left(lambda: self._end_with(live, started))
        return started

    async def run(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> RunResult:
        live = await self._make(caller, session, run, keep=keep)
        try:
            return await self._foreground.run(caller, run, live)
        finally:
            if not keep:
                self._lifecycle.end(live, FINISHED)

    async def _make(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> Live:
        check_run(run)  # before a sandbox is made for nothing
        await self._make_room(find_payer(caller.uid, choose_tenant(caller, session.tenant)))
        named = session if session.session_id else replace(session, session_id=f"run-{secrets.token_hex(4)}")
        return await self._creation.make(caller, named, fleeting=not keep)

    async def _make_room(self, payer: Payer) -> None:
        while len(leaving := [ending for ending in self._endings(payer) if not ending.done()]) >= _LEAVING:
            await wait_first(*leaving)

    def _endings(self, payer: Payer) -> list[asyncio.Task[None]]:
        return [
            live.ending
            for live in self._registry
            if live.record.fleeting and live.ending is not None and live.payer == payer
        ]

    def close(self) -> None:
        """Called after all commands were told to end: no such session outlives the daemon."""
        running = {run.live.sandbox: run for run in self._foreground.running.values()}
        for live in self._registry:
            if live.record.fleeting:
                run = running.get(live.sandbox)
                self._end_with(live, run) if run else self._lifecycle.end(live, FINISHED)

    def _end_with(self, live: Live, run: ForegroundRun | NotBegun) -> None:
        """The command has the time to end by itself that every command has: it may have files of the machine open."""
        if run.settled.done():
            self._lifecycle.end(live, FINISHED)
        else:
            run.settled.add_done_callback(lambda _: self._lifecycle.end(live, FINISHED))
