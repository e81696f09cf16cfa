"""The schema of the daemon's SQLite file, the steps that bring an older file to it, and the errors of the store."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Final

from k8e.core.errors import Fault, Kind

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
    ("ALTER TABLE runs ADD COLUMN reason TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE runs ADD COLUMN terminal INTEGER NOT NULL DEFAULT 0",),
    ("CREATE TABLE journal (id INTEGER PRIMARY KEY, applied INTEGER NOT NULL) STRICT",),
    ("ALTER TABLE sessions ADD COLUMN emulated INTEGER NOT NULL DEFAULT 0",),
    ("ALTER TABLE runs ADD COLUMN emulated INTEGER NOT NULL DEFAULT 0",),
)


class StoreFailed(Fault):
    def __init__(self, cause: object, hint: str = "") -> None:
        if not hint and type(cause) is sqlite3.DatabaseError:  # not one of its kinds: the file is not what it should be
            hint = "It is damaged, or no database: put a copy of it back, or move it away to begin with nothing."
        hint = hint or "Is the disk with the state directory full, or does another process hold the database?"
        super().__init__(
            Kind.UNAVAILABLE, "state_unavailable", "the daemon's database does not answer", detail=str(cause), hint=hint
        )


def corrupt(cause: object) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(str(cause))
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def migrate(connection: sqlite3.Connection) -> None:
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


def check_columns(connection: sqlite3.Connection) -> None:
    """A damaged file may have other columns: a table's definition is text in it like any other."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as example:
        migrate(example)
        for (table,) in example.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            wanted, found = (
                [column[1:4] for column in each.execute(f"PRAGMA table_info({table})")]
                for each in (example, connection)
            )
            if wanted != found:
                raise corrupt(f"the columns of {table} are others")
