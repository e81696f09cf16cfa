"""Terminals: shells, or other commands, that a person sits at, leaves and comes back to.

A terminal is a background run without a time limit: it is in the log of runs, counts in quotas, survives the daemon,
and can be killed. A client that leaves does not end it. With no client at it, it does not keep its session from
expiring.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from k8e.core import checks
from k8e.core.errors import Fault, Kind
from k8e.core.log.audit import call
from k8e.core.model import Caller, RunSpec, TerminalSpec
from k8e.core.parts import Parts
from k8e.core.runs.attachment import SHOWN_AGAIN, Attachment, Attachments, Scene
from k8e.core.runs.background import Background
from k8e.core.runs.endings import describe_silence
from k8e.core.sessions.live import Live
from k8e.core.sessions.sessions import Sessions
from k8e.core.store.records import RunRecord
from k8e.core.translation import translated

_PATIENCE: Final = 30.0  # with a sandbox, to attach
# Interactive, as at a terminal, and no login: /etc/profile would replace the session's PATH.
_SHELL: Final = (b"sh", b"-c", b"command -v bash > /dev/null && exec bash; exec sh")
_COMMAND: Final = (b"sh", b"-c", b'command -v bash > /dev/null && exec bash -c "$1"; exec sh -c "$1"', b"sh")
_TAKEN: Final = "another client has taken the terminal over"


@dataclass(frozen=True, slots=True, eq=False)
class Terminals:
    """Implements `contract.TerminalService`."""

    _parts: Parts
    _sessions: Sessions
    _background: Background
    _attachments: Attachments

    @call("open_terminal")
    async def open(self, caller: Caller, spec: TerminalSpec) -> Attachment:
        checks.check_terminal(spec.terminal)
        live = self._sessions.find(caller, spec.session_id)
        found = await self._find(live, spec)
        record = found or await self._background.open(caller, _describe_command(spec))
        try:
            attachment = await self._attach(caller, live, record, resumed=found is not None)
        except BaseException:
            if found is None:  # the caller does not know it
                self._parts.tasks.spawn(self._background.kill(live, record))
            raise
        finally:
            self._attachments.expect_no_more(record.run_id)
        await attachment.redraw(spec.terminal)
        return attachment

    # Which one

    async def _find(self, live: Live, spec: TerminalSpec) -> RunRecord | None:
        """The terminal that the caller comes back to; None: a new one is wanted."""
        if spec.run_id:
            if spec.new or spec.command or spec.user:
                checks.refuse("run_id", "names a terminal that is there, and a new one is described")
            return await self._find_named(live, checks.check_run_id(spec.run_id))
        if spec.new or spec.command or spec.user:
            return None
        there = [one for one in await self._list(live) if self._attachments.find(one.run_id) is None]
        if len(there) > 1:
            raise Fault(
                Kind.CONFLICT,
                "several_terminals",
                f"session {live.session_id} has {len(there)} terminals that run on without a client",
                detail=", ".join(f"{one.run_id} of {_show_time(one.started)}" for one in there),
                hint=f"Choose: k8e sandbox shell {live.session_id} --attach {there[-1].run_id}; or --new.",
            )
        return there[0] if there else None

    async def _find_named(self, live: Live, run_id: str) -> RunRecord:
        for record in await self._list(live):
            if record.run_id == run_id:
                return record
        raise Fault(
            Kind.NOT_FOUND,
            "terminal_not_found",
            f"session {live.session_id} has no terminal {run_id} that runs",
            hint=f"k8e sandbox log {live.session_id} lists its runs; a terminal that has ended is one of them.",
        )

    async def _list(self, live: Live) -> list[RunRecord]:
        """Those that run."""
        await self._background.collect(live)
        records = await self._parts.store.runs(live.sandbox, unfinished=True)
        return [record for record in records if record.terminal and record.command is not None]

    # A client comes

    async def _attach(self, caller: Caller, live: Live, record: RunRecord, *, resumed: bool) -> Attachment:
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._parts.tasks.finish(self._take_place(caller, live, record, resumed=resumed))
        except TimeoutError:
            self._sessions.doubt(live)
            raise describe_silence("reaching the terminal") from None

    async def _take_place(self, caller: Caller, live: Live, record: RunRecord, *, resumed: bool) -> Attachment:
        """The latest client has the terminal; the one before it is told."""
        async with live.background.collecting:  # no poll reads the output meanwhile
            hint = f"Take it back: k8e sandbox shell {live.session_id} --attach {record.run_id}"
            taken = Fault(Kind.CONFLICT, "terminal_taken", _TAKEN, hint=hint, run_id=record.run_id)
            await self._attachments.part(record.run_id, taken)
            opened = await self._sessions.enter(live)
            with translated("attaching to the terminal"):
                info = await self._background.look(opened, record)
                if info is None or record.command is None:
                    raise Fault(
                        Kind.NOT_FOUND,
                        "terminal_not_found",
                        "the terminal has ended",
                        hint=f"k8e sandbox poll {record.run_id}",
                    )
                process = await opened.sandbox.attach(record.command, hold=True, keep=SHOWN_AGAIN)
            others = tuple(each.run_id for each in self._attachments.list(live))
            scene = Scene(resumed, info.stdout_bytes if resumed else 0, others)
            attachment = Attachment(self._parts.tasks, live, record, process, scene, self._background.poll)
            self._attachments.add(attachment)
        if resumed:
            await self._parts.audit.record("terminal_attached", run=record.run_id, **live.identity, caller=caller.label)
        return attachment


def _describe_command(spec: TerminalSpec) -> RunSpec:
    command = spec.command.encode("utf-8", "surrogateescape")
    argv = (*_COMMAND, command) if spec.command else _SHELL
    return RunSpec(spec.session_id, argv=argv, terminal=spec.terminal, user=spec.user)


def _show_time(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"
