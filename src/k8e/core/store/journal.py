"""The journal of runs: a change to the table of runs is a line in this file first, and in the database a moment later,
many at once.

Every command waits until its run is on record. A line costs it one system call; a commit of its own in the database's
thread cost it a fifth of the daemon's time for a short command. The line is with the kernel when the call returns, so a
crash of the daemon undoes as little as it does with SQLite (database.py). The database says up to which line it has the
changes, and the rest is made up for when it is opened. Once it has all of them the file is empty again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from k8e.core.log.daemon_log import warn
from k8e.core.store.records import RUNS
from k8e.damage import Damaged, Damages, check_own

FULL: Final = 1 << 20  # bytes, beyond which changes wait until the database has those before
_MOST: Final = 1 << 62  # a number beyond it is no line's

Values = Mapping[str, Any]


class Change(NamedTuple):
    number: int
    kind: str
    values: Values

    def write(self) -> bytes:
        return json.dumps(self).encode("ascii") + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Self:
        """ValueError, TypeError or KeyError when it is none."""
        number, kind, values = json.loads(line)
        values = dict(values)
        if not (type(number) is int and 0 < number < _MOST and _NEEDED[kind] <= values.keys()):
            raise ValueError("no change")
        if not all(isinstance(value, str | int | float | None) for value in values.values()):
            raise ValueError("no row")
        return cls(number, kind, values)


BEGIN: Final = "begin"
COMMAND: Final = "command"
FINISH: Final = "finish"
FORGET: Final = "forget"

# What a line of each kind has at least.
_NEEDED: Final = {
    BEGIN: {"run_id", "sandbox"},
    COMMAND: {"run_id", "command", "oom_before"},
    FINISH: {"run_id", "finished", "status"},
    FORGET: {"run_id"},
}
# What becomes known of a run when it ends, and the run.
ENDED: Final = frozenset(
    {
        *("run_id", "finished", "status", "exit_code", "stdout_bytes", "stderr_bytes", "truncated", "duration_ms"),
        *("kept_stdout", "kept_stderr", "denied", "reason"),
    }
)
# Of the ended runs of a session the latest stay on record.
_TRIM: Final = (
    "DELETE FROM runs WHERE sandbox = ? AND finished NOTNULL AND kept_stdout IS NULL AND rowid <= "
    "(SELECT rowid FROM runs WHERE sandbox = ? ORDER BY rowid DESC LIMIT 1 OFFSET ?)"
)


class Journal:
    """The loop adds changes; the database's thread applies them. A full file is the caller's to wait for."""

    def __init__(self, path: Path, descriptor: int, number: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._number = number  # of the last change
        self._applied = number
        self._size = 0
        self._waiting: deque[Change] = deque()

    @classmethod
    def open(cls, path: Path, connection: sqlite3.Connection, damages: Damages) -> Self:
        """Applies what an earlier daemon left."""
        try:
            check_own(path.lstat())
        except FileNotFoundError:
            pass
        except Damaged as error:
            damages.set_aside(path, error)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            journal = cls(path, descriptor, _read_applied(connection))
            journal._recover(connection, damages)
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def _recover(self, connection: sqlite3.Connection, damages: Damages) -> None:
        with open(self._descriptor, "rb", closefd=False) as file:
            lines = file.read().splitlines()
        for line in lines:
            try:
                change = Change.read(line)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                damages.tell(self._path, f"a line cannot be read: {error}")
                continue
            if change.number > self._number:
                self._number = change.number
                self._waiting.append(change)
        self.apply(connection, joined=False)  # each line for itself: one may be damaged
        os.ftruncate(self._descriptor, 0)

    @property
    def is_full(self) -> bool:
        return self._size >= FULL

    def add(self, kind: str, values: Values) -> None:
        """It is on record when this returns. OSError."""
        change = Change(self._number + 1, kind, values)
        line = change.write()
        written = os.write(self._descriptor, line)
        if written < len(line):
            os.ftruncate(self._descriptor, self._size)
            raise OSError("no room for a line of the journal")
        self._size += written
        self._number = change.number
        self._waiting.append(change)

    def tidy(self) -> None:
        """Called in the loop, after `apply`: no line may come in between."""
        if self._size and self._applied == self._number:
            with contextlib.suppress(OSError):  # its lines are known to be applied
                os.ftruncate(self._descriptor, 0)
                self._size = 0

    def close(self) -> None:
        descriptor, self._descriptor, self._size = self._descriptor, -1, 0
        os.close(descriptor)

    # In the database's thread

    def apply(self, connection: sqlite3.Connection, *, joined: bool = True) -> None:
        """In one transaction. `joined`: as few rows as can be. sqlite3.Error: they wait on."""
        changes = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not changes:
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            for change in _join(changes) if joined else changes:
                _apply_one(connection, change)
            begun = (change.values for change in changes if change.kind == BEGIN)
            for sandbox, keep in {values.get("sandbox"): values.get("keep") for values in begun}.items():
                connection.execute(_TRIM, (sandbox, sandbox, keep))
            connection.execute("INSERT OR REPLACE INTO journal (id, applied) VALUES (1, ?)", (changes[-1].number,))
            connection.execute("COMMIT")
        except BaseException:
            self._waiting.extendleft(reversed(changes))
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._applied = changes[-1].number


def _join(changes: Iterable[Change]) -> Iterable[Change]:
    """A run that began and ended within them is written once: half the work for short commands."""
    begun: dict[str, Change] = {}
    joined: dict[int, Change] = {}  # by number
    for change in changes:
        run_id = change.values["run_id"]
        if change.kind == FINISH and (first := begun.get(run_id)) is not None:
            joined[first.number] = first._replace(values={**first.values, **change.values})
            continue
        if change.kind == BEGIN:
            begun[run_id] = change
        joined[change.number] = change
    return joined.values()


def _apply_one(connection: sqlite3.Connection, change: Change) -> None:
    try:
        connection.execute(_make_statement(change.kind, tuple(change.values)), change.values)
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError) as error:
        # Its session is no more, or the line was damaged.
        warn("change_not_applied", kind=change.kind, run=change.values.get("run_id", ""), cause=error)


@functools.lru_cache(maxsize=16)
def _make_statement(kind: str, names: tuple[str, ...]) -> str:
    """Of the columns that the line has: an older daemon may have written it."""
    columns = [column for column in RUNS.fields.columns if column in names]
    if kind == BEGIN:
        places = ", ".join(f":{column}" for column in columns)
        return f"INSERT INTO runs ({', '.join(columns)}) VALUES ({places}) ON CONFLICT (run_id) DO NOTHING"
    if kind == FORGET:
        return "DELETE FROM runs WHERE run_id = :run_id"
    changed = ENDED if kind == FINISH else _NEEDED[COMMAND]
    values = ", ".join(f"{column} = :{column}" for column in columns if column in changed)
    return f"UPDATE runs SET {values} WHERE run_id = :run_id"


def _read_applied(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT applied FROM journal WHERE id = 1").fetchone()
    return row[0] if row is not None and 0 <= row[0] < _MOST else 0
