"""One-command sessions: a session that is made for one command and ends with it.

One request brings both, so that no session waits for a caller who is gone already. That it is for one command is on
record before the sandbox exists: a daemon that finds such a session after a crash removes it. The caller has the result
when the command has ended; the sandbox is taken down after that, and counts until then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from k8e.core.access.access import Payer, choose_tenant, find_payer
from k8e.core.model import Caller, Chunk, RunResult, RunSpec, SessionSpec
from k8e.core.runs.command import check_run
from k8e.core.runs.foreground import Foreground, NotBegun
from k8e.core.runs.foreground_run import ForegroundRun
from k8e.core.sessions.creation import Creation
from k8e.core.sessions.ends import DESTROYED, FINISHED
from k8e.core.sessions.lifecycle import Lifecycle
from k8e.core.sessions.live import Live
from k8e.core.sessions.registry import Registry
from k8e.core.tasks import wait_first

# Sandboxes of one payer that are being taken down, before the next is made: a payer who starts more than that waits,
# instead of reaching a quota with sessions that have ended already.
_LEAVING: Final = 8


class Once:
    def __init__(self, lifecycle: Lifecycle, registry: Registry, creation: Creation, foreground: Foreground) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._creation = creation
        self._foreground = foreground

    async def start(self, caller: Caller, session: SessionSpec, run: RunSpec, *, keep: bool) -> OnceRun:
        live = await self._make(caller, session, run, keep=keep)
        try:
            return OnceRun(self._lifecycle, live, await self._foreground.start(caller, run, live), keep=keep)
        except BaseException:
            self._lifecycle.end(live, DESTROYED if keep else FINISHED)
            raise

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
                end_with(self._lifecycle, live, run) if run else self._lifecycle.end(live, FINISHED)


class OnceRun:
    """Implements `contract.LiveRun`. The session ends when the result was given, or when the caller leaves."""

    def __init__(self, lifecycle: Lifecycle, live: Live, run: ForegroundRun | NotBegun, *, keep: bool) -> None:
        self._lifecycle = lifecycle
        self._live = live
        self._run = run
        self._keep = keep

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def session_id(self) -> str:
        return self._live.session_id

    async def output(self) -> AsyncGenerator[Chunk, None]:
        async for chunk in self._run.output():
            yield chunk

    async def write_stdin(self, data: bytes) -> None:
        await self._run.write_stdin(data)

    async def close_stdin(self) -> None:
        await self._run.close_stdin()

    async def signal(self, number: int) -> None:
        await self._run.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        await self._run.resize(rows, columns)

    async def result(self) -> RunResult:
        try:
            return await self._run.result()
        finally:
            self._part()

    async def kill(self) -> None:
        await self._run.kill()
        self._part()

    def _part(self) -> None:
        """The command has the time to end by itself that every command has: it may have files of the machine open."""
        if not self._keep:
            end_with(self._lifecycle, self._live, self._run)


def end_with(lifecycle: Lifecycle, live: Live, run: ForegroundRun | NotBegun) -> None:
    if run.settled.done():
        lifecycle.end(live, FINISHED)
    else:
        run.settled.add_done_callback(lambda _: lifecycle.end(live, FINISHED))
