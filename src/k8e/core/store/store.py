"""Keeps what survives the daemon: sessions, runs, approvals, names of images and warm sandboxes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from k8e.core.access.access import may_see
from k8e.core.model import ApprovalStatus, Caller, Phase, Status
from k8e.core.store.database import Database
from k8e.core.store.journal import BEGIN, COMMAND, ENDED, FINISH, FORGET
from k8e.core.store.records import (
    APPROVALS,
    IMAGES,
    RUNS,
    SESSIONS,
    WARM,
    ApprovalRecord,
    ImageRecord,
    RunRecord,
    SessionRecord,
    WarmRecord,
)
from k8e.policy import HostList

KEPT_SESSIONS: Final = 1000  # records of sessions that are gone, of one tenant
KEPT_IN_ALL: Final = 5000

_SET_PHASE: Final = "UPDATE sessions SET phase = ?, reason = ? WHERE sandbox = ?"
_NO_OUTPUT: Final = "kept_stdout = NULL, kept_stderr = NULL, truncated = stdout_bytes + stderr_bytes > 0"


def _close_runs(connection: sqlite3.Connection, sandbox: str, now: float) -> None:
    """Those of a sandbox that is no more: their output was in its memory."""
    connection.execute(
        "UPDATE runs SET status = ?, finished = ? WHERE sandbox = ? AND finished IS NULL",
        (Status.LOST.value, now, sandbox),
    )
    connection.execute(f"UPDATE runs SET {_NO_OUTPUT} WHERE sandbox = ? AND kept_stdout NOTNULL", (sandbox,))


class Store(Database):
    # Sessions

    async def sessions(self) -> list[SessionRecord]:
        """All of them, oldest first."""
        return await self._read(SESSIONS, "ORDER BY created, rowid")

    async def ended_sessions(self, caller: Caller) -> list[SessionRecord]:
        """Those that are gone and were the caller's, oldest first."""
        return [
            record
            for record in await self.sessions()
            if record.session.phase is Phase.DESTROYED and may_see(caller, record.session.owner, record.session.tenant)
        ]

    async def find_session(self, sandbox: str) -> SessionRecord | None:
        return await self._find(SESSIONS, "WHERE sandbox = ?", sandbox)

    async def insert_session(self, record: SessionRecord) -> None:
        await self._transact(lambda connection: SESSIONS.insert(connection, record))

    async def claim_warm(self, record: SessionRecord) -> None:
        """Makes a warm sandbox the session's, in one step."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM warm WHERE sandbox = ?", (record.sandbox,))
            SESSIONS.insert(connection, record)

        await self._transact(work)

    async def set_phase(self, sandbox: str, phase: Phase, reason: str = "", *, durable: bool = False) -> None:
        statement, values = _SET_PHASE, (phase.value, reason, sandbox)
        await self._transact(lambda connection: connection.execute(statement, values), durable=durable)

    async def stop_session(self, sandbox: str, reason: str, now: float) -> None:
        """Stopped: what is not known to have ended is lost, and all output is gone with the sandbox's memory."""

        def work(connection: sqlite3.Connection) -> None:
            _close_runs(connection, sandbox, now)
            connection.execute(_SET_PHASE, (Phase.STOPPED.value, reason, sandbox))

        await self._transact(work, durable=True)

    async def start_session(
        self, sandbox: str, env_keys: Sequence[str], secret_keys: Sequence[str], *, emulated: bool = False
    ) -> None:
        """It runs again."""
        changes = "phase = ?, reason = '', env_keys = ?, withheld = ?, emulated = ?"
        statement = f"UPDATE sessions SET {changes} WHERE sandbox = ?"
        keys = (json.dumps(tuple(env_keys)), json.dumps(tuple(secret_keys)))
        values = (Phase.ACTIVE.value, *keys, emulated, sandbox)
        await self._transact(lambda connection: connection.execute(statement, values), durable=True)

    async def set_hosts(self, sandbox: str, hosts: HostList) -> None:
        await self._execute("UPDATE sessions SET hosts = ? WHERE sandbox = ?", json.dumps(hosts.texts), sandbox)

    async def end_session(self, sandbox: str, reason: str, now: float, *, keep_runs: bool) -> None:
        """Its runs are forgotten with it, or remembered as lost. Of gone sessions the latest stay on record."""

        def work(connection: sqlite3.Connection) -> None:
            if keep_runs:
                _close_runs(connection, sandbox, now)
            else:
                connection.execute("DELETE FROM runs WHERE sandbox = ?", (sandbox,))
            gone = Phase.DESTROYED.value
            connection.execute(_SET_PHASE, (gone, reason, sandbox))
            connection.execute(
                "DELETE FROM sessions WHERE phase = ?1 AND (owner, tenant) = "
                "(SELECT owner, tenant FROM sessions WHERE sandbox = ?2) AND rowid <= "
                "(SELECT rowid FROM sessions WHERE phase = ?1 AND (owner, tenant) = "
                "(SELECT owner, tenant FROM sessions WHERE sandbox = ?2) ORDER BY rowid DESC LIMIT 1 OFFSET ?3)",
                (gone, sandbox, KEPT_SESSIONS),
            )
            connection.execute(
                "DELETE FROM sessions WHERE phase = ?1 AND rowid <= "
                "(SELECT rowid FROM sessions WHERE phase = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2)",
                (gone, KEPT_IN_ALL),
            )

        await self._transact(work)

    async def forget_session(self, sandbox: str) -> None:
        await self._execute("DELETE FROM sessions WHERE sandbox = ?", sandbox)

    async def set_used(self, uses: Iterable[tuple[str, float, float]]) -> None:
        """Each: sandbox, wall clock, monotonic clock."""
        values = [(wall, monotonic, sandbox) for sandbox, wall, monotonic in uses]
        statement = "UPDATE sessions SET last_used = ?, used_at = ? WHERE sandbox = ?"
        await self._transact(lambda connection: connection.executemany(statement, values))

    async def rebase(self, sandbox: str, boot: str, used_at: float) -> None:
        """The machine was started anew, and with it the clock that uses are counted on."""
        await self._execute("UPDATE sessions SET boot = ?, used_at = ? WHERE sandbox = ?", boot, used_at, sandbox)

    # Runs

    async def insert_run(self, run: RunRecord, keep: int) -> None:
        """Of the ended runs of its session the latest `keep` stay on record."""
        await self._make_room()
        self._change(BEGIN, {**RUNS.fields.write(run), "keep": keep})

    def set_command(self, run_id: str, command: int, oom_before: int) -> None:
        self._change(COMMAND, {"run_id": run_id, "command": str(command), "oom_before": oom_before})

    async def secure(self, sandbox: str) -> None:
        """Returns when a daemon that goes on after this one would find the background runs of the sandbox as they are
        on record now. Here it does at once: the journal has them."""

    def finish_run(self, run: RunRecord) -> None:
        self._change(FINISH, RUNS.fields.write_some(run, ENDED))

    def forget_run(self, run_id: str) -> None:
        self._change(FORGET, {"run_id": run_id})

    async def find_run(self, run_id: str) -> RunRecord | None:
        return await self._find(RUNS, "WHERE run_id = ?", run_id)

    async def runs(self, sandbox: str, *, unfinished: bool = False) -> list[RunRecord]:
        """Oldest first."""
        condition = " AND finished IS NULL" if unfinished else ""
        return await self._read(RUNS, f"WHERE sandbox = ?{condition} ORDER BY rowid", sandbox)

    async def forget_output(self, run_ids: Sequence[str]) -> None:
        values = [(run_id,) for run_id in run_ids]
        statement = f"UPDATE runs SET {_NO_OUTPUT} WHERE run_id = ?"
        await self._transact(lambda connection: connection.executemany(statement, values))

    # Warm sandboxes

    async def warm(self) -> list[WarmRecord]:
        """Oldest first."""
        return await self._read(WARM, "ORDER BY rowid")

    async def insert_warm(self, record: WarmRecord) -> None:
        await self._transact(lambda connection: WARM.insert(connection, record))

    async def set_ready(self, sandbox: str, ready: bool) -> None:
        await self._execute("UPDATE warm SET ready = ? WHERE sandbox = ?", ready, sandbox)

    async def forget_warm(self, sandbox: str) -> None:
        await self._execute("DELETE FROM warm WHERE sandbox = ?", sandbox)

    # Images

    async def images(self) -> list[ImageRecord]:
        """All of them, oldest first."""
        return await self._read(IMAGES, "ORDER BY added, name")

    async def find_image(self, owner: int, tenant: str, name: str) -> ImageRecord | None:
        """By its name, or its digest."""
        condition = "WHERE owner = ? AND tenant = ? AND (name = ? OR digest = ?)"
        return await self._find(IMAGES, condition, owner, tenant, name, name)

    async def put_image(self, record: ImageRecord) -> None:
        """Instead of what the name meant before."""
        await self._transact(lambda connection: IMAGES.insert(connection, record, instead=True))

    async def use_image(self, record: ImageRecord, now: float) -> None:
        used = replace(record, last_used=now)
        await self._transact(lambda connection: IMAGES.update(connection, used, ["last_used"]))

    async def forget_images(self, records: Sequence[ImageRecord]) -> None:
        values = [(record.owner, record.tenant, record.name) for record in records]
        statement = "DELETE FROM images WHERE owner = ? AND tenant = ? AND name = ?"
        await self._transact(lambda connection: connection.executemany(statement, values))

    # Approvals

    async def insert_approval(self, record: ApprovalRecord, keep: int) -> None:
        """Of the settled ones of its session the latest `keep` stay on record."""

        def work(connection: sqlite3.Connection) -> None:
            APPROVALS.insert(connection, record)
            connection.execute(
                "DELETE FROM approvals WHERE sandbox = ? AND status != ? AND rowid <= "
                "(SELECT rowid FROM approvals WHERE sandbox = ? ORDER BY rowid DESC LIMIT 1 OFFSET ?)",
                (record.sandbox, ApprovalStatus.PENDING.value, record.sandbox, keep),
            )

        await self._transact(work)

    async def settle_approval(self, record: ApprovalRecord) -> bool:
        """Returns whether it was pending until now."""
        settled: list[int] = []

        def work(connection: sqlite3.Connection) -> None:
            columns = ("status", "answerer", "answered", "reason")
            settled.append(APPROVALS.update(connection, record, columns, f"status = '{ApprovalStatus.PENDING.value}'"))

        await self._transact(work)
        return settled == [1]

    async def find_approval(self, approval_id: str) -> ApprovalRecord | None:
        return await self._find(APPROVALS, "WHERE approval_id = ?", approval_id)

    async def approvals(self, *, pending: bool) -> list[ApprovalRecord]:
        """Oldest first."""
        condition = f"WHERE status = '{ApprovalStatus.PENDING.value}' " if pending else ""
        return await self._read(APPROVALS, f"{condition}ORDER BY rowid")
