"""Notes what a transaction changes, by triggers: of which names the rows are, and how it can be undone after its
commit. Foreground runs, and the time of a last use, are no news."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# A name stands for all rows of one sandbox, or for one name of an image.
IMAGE_NAME: Final = "'image ' || {row}owner || ' ' || {row}tenant || ' ' || {row}name"
_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sessions", "runs", "approvals", "warm"), "{row}sandbox"),
    "images": IMAGE_NAME,
}
_NO_NEWS: Final[Mapping[str, Collection[str]]] = {
    "sessions": ("last_used", "used_at", "boot"),
    "images": ("last_used",),
}
_CONDITIONS: Final = {"runs": "{row}background"}


@dataclass(frozen=True, slots=True)
class Changes:
    names: frozenset[str]
    undo: Sequence[str]  # statements, the last change first


def watch_changes(connection: sqlite3.Connection) -> None:
    """Begins to note changes of this connection."""
    connection.execute("CREATE TEMP TABLE changed (name TEXT PRIMARY KEY)")
    connection.execute("CREATE TEMP TABLE undo (number INTEGER PRIMARY KEY, statement TEXT NOT NULL)")
    for table in _NAMES:
        columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
        news = [column for column in columns if column not in _NO_NEWS.get(table, ())]
        named = ", ".join(columns)
        old = " || ', ' || ".join(f"quote(OLD.{column})" for column in columns)
        values = " || ', ' || ".join(f"'{column} = ' || quote(OLD.{column})" for column in columns)
        undo = {
            "INSERT": f"'DELETE FROM {table} WHERE rowid = ' || NEW.rowid",
            "DELETE": f"'INSERT INTO {table} (rowid, {named}) VALUES (' || OLD.rowid || ', ' || {old} || ')'",
            "UPDATE": f"'UPDATE {table} SET ' || {values} || ' WHERE rowid = ' || OLD.rowid",
        }
        for event, statement in undo.items():
            row = "OLD." if event == "DELETE" else "NEW."
            of = f" OF {', '.join(news)}" if event == "UPDATE" else ""
            _add_trigger(connection, f"{table}_undo_{event}", f"{event} ON main.{table}", "undo (statement)", statement)
            _add_trigger(
                *(connection, f"{table}_news_{event}", f"{event}{of} ON main.{table}", "changed"),
                _NAMES[table].format(row=row),
                _CONDITIONS.get(table, "TRUE").format(row=row),
            )


def _add_trigger(
    connection: sqlite3.Connection, name: str, event: str, target: str, value: str, condition: str = "TRUE"
) -> None:
    # Not OR IGNORE: in a trigger the clause of the statement that fired it holds instead.
    known = "" if target != "changed" else f" WHERE NOT EXISTS (SELECT 1 FROM changed WHERE name = {value})"
    insert = f"INSERT INTO {target} SELECT {value}{known}"
    connection.execute(f"CREATE TEMP TRIGGER {name} AFTER {event} WHEN {condition} BEGIN {insert}; END")


def take_changes(connection: sqlite3.Connection) -> Changes:
    """Since the last time."""
    names = frozenset(name for (name,) in connection.execute("SELECT name FROM changed"))
    undo = [statement for (statement,) in connection.execute("SELECT statement FROM undo ORDER BY number DESC")]
    connection.execute("DELETE FROM changed")
    connection.execute("DELETE FROM undo")
    return Changes(names, undo)


def undo_changes(connection: sqlite3.Connection, undo: Iterable[str]) -> None:
    """In one transaction, which is not noted itself."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("PRAGMA defer_foreign_keys = ON")
        for statement in undo:
            connection.execute(statement)
        take_changes(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
