"""The output of background runs that have ended: files inside the sandbox that only the agent can read.

Output is kept until the session ends; beyond KEPT_OUTPUT bytes the oldest goes first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from k8e.core.log.daemon_log import warn
from k8e.core.model import OUTPUT_LIMIT, RunResult
from k8e.core.sandbox.environment import STATE
from k8e.core.sessions.sessions import Opened
from k8e.core.store.records import RunRecord
from k8e.core.store.store import Store
from k8e.link.errors import AgentError

KEPT_OUTPUT: Final = 32 << 20  # bytes, of one session


class KeptOutput:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, opened: Opened, run_id: str, stdout: bytes, stderr: bytes) -> bool:
        """Whether it is kept."""
        if not stdout and not stderr:
            return True
        await self._make_room(opened, len(stdout) + len(stderr))
        try:
            await opened.sandbox.write_file(_path(run_id), stdout + stderr, mode=0o600)
        except AgentError as error:
            # Most likely the sandbox's disk is full: the caller who polls now has the output, no later one will.
            warn("output_not_kept", run=run_id, cause=error.code.name)
            return False
        return True

    async def show(self, opened: Opened, record: RunRecord) -> RunResult:
        """The result of a run that has ended, with its output as far as that is kept."""
        session_id = opened.live.session_id
        if not record.kept_stdout and not record.kept_stderr:
            return record.show(session_id)
        try:
            content = await opened.sandbox.read_file(_path(record.run_id), limit=2 * OUTPUT_LIMIT)
        except AgentError as error:
            warn("output_gone", run=record.run_id, cause=error.code.name)
            return replace(record, truncated=True).show(session_id)
        border = record.kept_stdout or 0
        return record.show(session_id, content[:border], content[border:])

    async def _make_room(self, opened: Opened, size: int) -> None:
        records = await self._store.runs(opened.live.sandbox)
        kept = [(run.run_id, (run.kept_stdout or 0) + (run.kept_stderr or 0)) for run in records]
        excess = sum(length for _, length in kept) + size - KEPT_OUTPUT
        dropped = []
        for run_id, length in kept:
            if excess <= 0:
                break
            if length:
                dropped.append(run_id)
                excess -= length
        await self._store.forget_output(dropped)
        for run_id in dropped:
            await opened.sandbox.remove(_path(run_id))


def _path(run_id: str) -> bytes:
    return STATE + b"/" + run_id.encode()
