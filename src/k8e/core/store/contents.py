"""The rows of one name as JSON, for a mirror, and back: a session with its background runs and approvals, a warm
sandbox, or a name of an image."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from k8e.core.model import ApprovalStatus
from k8e.core.store.changes import IMAGE_NAME
from k8e.core.store.records import APPROVALS, IMAGES, RUNS, SESSIONS, WARM, Table
from k8e.core.store.schema import MIGRATIONS, StoreFailed

Content = Mapping[str, Any]

ENDED_RUNS: Final = 64  # of one session: the latest
SETTLED_APPROVALS: Final = 32
_VERSION: Final = "version"
# Times of a clock that the reader does not have. Empty, they count as those of another boot.
_NOT_KEPT: Final[Mapping[str, Mapping[str, Any]]] = {"sessions": {"boot": "", "used_at": 0.0}}

_BY_SANDBOX: Final = "SELECT * FROM {table} WHERE sandbox = :name"
_PENDING: Final = f"status = '{ApprovalStatus.PENDING.value}'"
_SOME: Final = (
    "SELECT * FROM {table} WHERE sandbox = :name AND {which} AND ({open} OR rowid IN (SELECT rowid FROM {table} WHERE "
    "sandbox = :name AND {which} AND NOT ({open}) ORDER BY rowid DESC LIMIT {limit})) ORDER BY rowid"
)
# In this order, because runs and approvals refer to a session.
_PARTS: Final[Sequence[tuple[Table[Any], str]]] = (
    (SESSIONS, _BY_SANDBOX.format(table="sessions")),
    (RUNS, _SOME.format(table="runs", which="background", open="finished IS NULL", limit=ENDED_RUNS)),
    (APPROVALS, _SOME.format(table="approvals", which="TRUE", open=_PENDING, limit=SETTLED_APPROVALS)),
    (WARM, _BY_SANDBOX.format(table="warm")),
    (IMAGES, f"SELECT * FROM images WHERE {IMAGE_NAME.format(row='')} = :name"),
)


def read_content(connection: sqlite3.Connection, name: str) -> Content | None:
    """Returns what there is of a name now, or nothing."""
    found: dict[str, Any] = {}
    for table, statement in _PARTS:
        if rows := connection.execute(statement, {"name": name}).fetchall():
            left_out = _NOT_KEPT.get(table.name, {})
            found[table.name] = [{key: row[key] for key in row.keys() if key not in left_out} for row in rows]  # noqa: SIM118
    return {_VERSION: len(MIGRATIONS), **found} if found else None


def check_version(content: Content) -> None:
    """StoreFailed when a newer version of the gateway wrote it, which may have meant more than this one can read."""
    version = content.get(_VERSION)
    if isinstance(version, int) and version > len(MIGRATIONS):
        cause = f"a record was written by a newer version (schema {version}, this one knows {len(MIGRATIONS)})"
        raise StoreFailed(cause, "Use that version of k8e.")


def write_content(connection: sqlite3.Connection, content: Content) -> None:
    """Inserts the rows. Columns that an older version did not have get their defaults. ValueError, LookupError,
    TypeError, AttributeError or sqlite3.Error, and nothing inserted, when it cannot be read."""
    connection.execute("SAVEPOINT content")
    try:
        for table, _ in _PARTS:
            for row in content.get(table.name, ()):
                _insert(connection, table, {**row, **_NOT_KEPT.get(table.name, {})})
    except BaseException:
        connection.execute("ROLLBACK TO content")
        raise
    finally:
        connection.execute("RELEASE content")


def _insert(connection: sqlite3.Connection, table: Table[Any], row: Mapping[str, Any]) -> None:
    known = {column[1] for column in connection.execute(f"PRAGMA table_info({table.name})")}
    if strange := row.keys() - known:
        raise ValueError(f"there is no {', '.join(sorted(strange))}")
    columns = ", ".join(row)
    places = ", ".join(f":{column}" for column in row)
    number = connection.execute(f"INSERT INTO {table.name} ({columns}) VALUES ({places})", dict(row)).lastrowid
    table.fields.read(connection.execute(f"SELECT * FROM {table.name} WHERE rowid = ?", (number,)).fetchone())
