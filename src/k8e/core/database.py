"""The daemon's SQLite file: its schema, and a thread of its own.

One connection in one thread: statements happen in the order they were asked for, and the loop never waits for a disk.
WAL with synchronous=NORMAL: once a write has returned, a crash of the daemon cannot undo it (the kernel has it). A
crash of the machine may lose the last writes, never the file's consistency; no sandbox survives that either, and what
the engine finds of one that the file does not know is removed. So what is said of a session whose files are to survive
that is written through to the disk (`durable`), with everything before it.

Environment values, code and output are never stored: no column takes them.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from k8e.core.errors import Fault, Kind

T = TypeVar("T")

BUSY_SECONDS: Final = 5.0

# Each brings the file from the version that is its index to the next one. Released ones never change.
MIGRATIONS: Final[Sequence[Sequence[str]]] = (
    (
        """CREATE TABLE sessions (
            sandbox TEXT PRIMARY KEY,
            session_id TEXT NOT NULL,
            tenant TEXT NOT NULL,
            owner INTEGER NOT NULL,
            phase TEXT NOT NULL,
            runtime TEXT NOT NULL,
            image TEXT NOT NULL,
            limits TEXT NOT NULL,
            env_keys TEXT NOT NULL,
            created REAL NOT NULL,
            last_used REAL NOT NULL,
            ttl REAL NOT NULL,
            boot TEXT NOT NULL,
            used_at REAL NOT NULL,
            reason TEXT NOT NULL
        ) STRICT""",
        "CREATE UNIQUE INDEX session_names ON sessions (owner, tenant, session_id) WHERE phase != 'destroyed'",
        """CREATE TABLE runs (
            run_id TEXT PRIMARY KEY,
            sandbox TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
            command TEXT,
            background INTEGER NOT NULL,
            started REAL NOT NULL,
            finished REAL,
            status TEXT NOT NULL,
            exit_code INTEGER,
            stdout_bytes INTEGER NOT NULL,
            stderr_bytes INTEGER NOT NULL,
            truncated INTEGER NOT NULL,
            duration_ms INTEGER NOT NULL,
            kept_stdout INTEGER,
            kept_stderr INTEGER,
            oom_before INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX runs_of_a_sandbox ON runs (sandbox)",
    ),
    # Sessions of that time had no network.
    (
        "ALTER TABLE sessions ADD COLUMN hosts TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE runs ADD COLUMN denied TEXT NOT NULL DEFAULT ''",
    ),
    (
        """CREATE TABLE warm (
            sandbox TEXT PRIMARY KEY,
            runtime TEXT NOT NULL,
            image TEXT NOT NULL,
            limits TEXT NOT NULL,
            edition TEXT NOT NULL,
            ready INTEGER NOT NULL
        ) STRICT""",
    ),
    (
        """CREATE TABLE approvals (
            approval_id TEXT PRIMARY KEY,
            sandbox TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
            session_id TEXT NOT NULL,
            tenant TEXT NOT NULL,
            owner INTEGER NOT NULL,
            action TEXT NOT NULL,
            asker TEXT NOT NULL,
            lineage TEXT NOT NULL,
            asked REAL NOT NULL,
            expires REAL NOT NULL,
            boot TEXT NOT NULL,
            deadline REAL NOT NULL,
            status TEXT NOT NULL,
            answerer TEXT NOT NULL,
            answered REAL,
            reason TEXT NOT NULL
        ) STRICT""",
        "CREATE INDEX approvals_of_a_sandbox ON approvals (sandbox)",
    ),
    (
        "ALTER TABLE sessions ADD COLUMN parent TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN persistent INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sessions ADD COLUMN shape TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN labels TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE warm ADD COLUMN shape TEXT NOT NULL DEFAULT ''",
    ),
    ("ALTER TABLE sessions ADD COLUMN fleeting INTEGER NOT NULL DEFAULT 0",),
    (
        "ALTER TABLE sessions ADD COLUMN parent_id TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sessions ADD COLUMN workdir TEXT NOT NULL DEFAULT ''",
    ),
    (
        "ALTER TABLE sessions ADD COLUMN digest TEXT NOT NULL DEFAULT 'host'",
        """CREATE TABLE images (
            owner INTEGER NOT NULL,
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            digest TEXT NOT NULL,
            added REAL NOT NULL,
            last_used REAL NOT NULL,
            PRIMARY KEY (owner, tenant, name)
        ) STRICT""",
    ),
    ("ALTER TABLE sessions ADD COLUMN withheld TEXT NOT NULL DEFAULT '[]'",),
)


class StoreFailed(Fault):
    def __init__(self, cause: object, hint: str = "") -> None:
        if not hint and type(cause) is sqlite3.DatabaseError:  # not one of its kinds: the file is not what it should be
            hint = "It is damaged, or no database: put a copy of it back, or move it away to begin with nothing."
        hint = hint or "Is the disk with the state directory full, or does another process hold the database?"
        super().__init__(
            Kind.UNAVAILABLE, "state_unavailable", "the daemon's database does not answer", detail=str(cause), hint=hint
        )


def _open(path: Path) -> sqlite3.Connection:
    # Made here, so that nobody else can read it from its first moment on.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        cause = f"it was written by a newer version (schema {version}, this one knows {len(MIGRATIONS)})"
        raise StoreFailed(cause, "Use that version of k8e, or give this one another directory (K8E_STATE_DIR).")
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


class Database:
    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    @classmethod
    async def open(cls, path: Path) -> Self:
        thread = ThreadPoolExecutor(1, "k8e-store")
        try:
            connection = await asyncio.get_running_loop().run_in_executor(thread, _open, path)
        except (sqlite3.Error, OSError) as error:
            thread.shutdown()
            raise StoreFailed(error) from error
        except BaseException:
            thread.shutdown()
            raise
        return cls(connection, thread)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _query(self, statement: str, *values: object) -> list[Any]:
        return await self._call(lambda: self._connection.execute(statement, values).fetchall())

    async def _execute(self, statement: str, *values: object) -> None:
        await self._transact(lambda connection: connection.execute(statement, values))

    async def _transact(self, work: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> None:
        """All of it or nothing. It happens even if the caller is cancelled meanwhile."""
        await self._call(lambda: self._do_transaction(work, durable))

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            # Shielded, because what still waits for its turn would else be cancelled with its caller.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except sqlite3.Error as error:
            raise StoreFailed(error) from error

    def _do_transaction(self, work: Callable[[sqlite3.Connection], object], durable: bool) -> None:
        if durable:
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            work(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if durable:
                self._connection.execute("PRAGMA synchronous = NORMAL")
