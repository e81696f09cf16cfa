"""The daemon's SQLite file: opened or set aside, and a thread of its own.

One connection in one thread: statements happen in the order they were asked for, and the loop never waits for a disk.
WAL with synchronous=NORMAL: once a write has returned, a crash of the daemon cannot undo it (the kernel has it). A
crash of the machine may lose the last writes, never the file's consistency; no sandbox survives that either, and what
the engine finds of one that the file does not know is removed. So what is said of a session whose files are to survive
that is written through to the disk (`durable`), with everything before it.

Environment values, code and output are never stored: no column takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from k8e.core.log.daemon_log import warn
from k8e.core.store.journal import Journal, Values
from k8e.core.store.records import SESSIONS, Table
from k8e.core.store.schema import StoreFailed, check_columns, corrupt, migrate
from k8e.core.tasks import wait_result
from k8e.damage import Damaged, Damages, check_own

T = TypeVar("T")

BUSY_SECONDS: Final = 5.0
FLUSH: Final = 0.2  # seconds from a line in the journal to the database; a question about runs brings it there at once

_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


def _open(path: Path, damages: Damages) -> tuple[sqlite3.Connection, Journal, bool]:
    """With whether there was one before. A damaged one is set aside, and a new one takes its place."""
    if not _check_files(path, damages):
        _mark(path)
    try:
        connection = _connect(path, damages)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
            raise
        _set_aside(path, error, damages)
        connection = _connect(path, damages)
    try:
        journal = Journal.open(_journal(path), connection, damages)
    except BaseException:
        connection.close()
        raise
    return connection, journal, not os.path.lexists(_marker(path))


def _marker(path: Path) -> Path:
    """It is there while sandboxes may exist that the database should have and does not: a daemon that dies before all
    of them are set aside must not leave the next one a database that it would believe."""
    return path.with_name(f"{path.name}.unknown")


def _mark(path: Path) -> None:
    """On the disk when it returns."""
    marker = _marker(path)
    if not os.path.lexists(marker):
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unmark(path: Path, damages: Damages) -> None:
    try:
        _marker(path).unlink(missing_ok=True)
    except IsADirectoryError as error:
        damages.set_aside(_marker(path), error)


def _check_files(path: Path, damages: Damages) -> bool:
    """Whether there is a database that may be opened."""
    for file in (path, *_beside(path)):
        try:
            found = file.lstat()
            check_own(found)
        except FileNotFoundError:
            if file == path:
                return False
            continue
        except Damaged as error:
            _set_aside(path, f"{file.name}: {error}", damages)
            return False
        if file == path and not found.st_size:
            _set_aside(path, "it is empty", damages)  # SQLite would take that for a new one
            return False
    return True


def _beside(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm")]


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-runs")


def _set_aside(path: Path, cause: object, damages: Damages) -> None:
    _mark(path)
    for file in (path, *_beside(path), _journal(path)):
        if os.path.lexists(file):
            damages.set_aside(file, cause)


def _connect(path: Path, damages: Damages) -> sqlite3.Connection:
    # Made here, so that no other user can read it from its first moment on.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # A byte that is no text costs its row (`_read`), and not every statement that meets it.
    connection.row_factory = sqlite3.Row
    connection.text_factory = lambda content: content.decode(errors="surrogateescape")
    try:
        _check_header(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        _check_content(connection, path, damages)
        migrate(connection)
        check_columns(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, UnicodeDecodeError):  # what SQLite says of the file has a part of it
            raise corrupt(error) from error
        raise
    return connection


def _check_header(path: Path) -> None:
    """Of what SQLite takes for a file that a later SQLite wrote: it would refuse to write it, or to read it."""
    with path.open("rb") as file:
        head = file.read(48)
    if any(version > 2 for version in head[18:20]) or head[44:] > b"\0\0\0\4":
        raise corrupt("its header is none that is written here")


def _check_content(connection: sqlite3.Connection, path: Path, damages: Damages) -> None:
    (sound,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if sound == "ok":
        return
    try:
        connection.execute("REINDEX")  # rows and an index that differ: the rows are what counts
    except sqlite3.IntegrityError as error:
        raise corrupt(error) from error
    (still,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if still != "ok":
        raise corrupt(still)
    damages.tell(path, f"an index of it was made again: {sound}")


class Database:
    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        journal: Journal,
        thread: ThreadPoolExecutor,
        damages: Damages,
        *,
        known: bool,
    ) -> None:
        self._path = path
        self._connection = connection
        self._journal = journal
        self._flushing: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._thread = thread
        self.damages = damages
        # False: there was none, or none that could be used, or a session's row could not be read, so that sandboxes
        # which it does not have may hold files that a user misses.
        self.known = known

    @classmethod
    async def open(cls, path: Path) -> Self:
        thread = ThreadPoolExecutor(1, "k8e-store")
        try:
            damages = Damages(path.parent)
            opening = asyncio.get_running_loop().run_in_executor(thread, _open, path, damages)
            connection, journal, known = await opening
        except (sqlite3.Error, OSError) as error:
            thread.shutdown()
            raise StoreFailed(error) from error
        except BaseException:
            thread.shutdown()
            raise
        return cls(path, connection, journal, thread, damages, known=known)

    async def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        await self._flush()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._journal.close()
        self._thread.shutdown()

    async def trust(self) -> None:
        """From now on a sandbox that it does not have is no session's: all others were set aside."""
        if not self.known:
            await self._call(self._trust)
            self.known = True

    # Replaced by a store that has no file (mirrored.py).

    def _trust(self) -> None:
        _unmark(self._path, self.damages)

    def _doubt(self) -> None:
        _mark(self._path)

    async def _query(self, statement: str, *values: object) -> list[sqlite3.Row]:
        return await self._call(lambda: self._connection.execute(statement, values).fetchall())

    async def _read(self, table: Table[T], condition: str, *values: object) -> list[T]:
        """The rows as records. One that cannot be read is as if it were not there; it is told once, and removed."""
        found = []
        for row in await self._query(f"SELECT * FROM {table.name} {condition}", *values):
            try:
                _check_text(row)
                found.append(table.fields.read(row))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                await self._drop(table, row, error)
        return found

    async def _find(self, table: Table[T], condition: str, *values: object) -> T | None:
        found = await self._read(table, condition, *values)
        return found[0] if found else None

    async def _drop(self, table: Table[Any], row: sqlite3.Row, cause: Exception) -> None:
        if table is SESSIONS:
            # Its sandbox is set aside when the next daemon starts, if not by this one; its name may be what is damaged.
            self.known = False
            await self._call(self._doubt)
        names = [str(row[key]).encode(errors="surrogateescape") for key in table.keys]
        shown = b"/".join(names).decode(errors="backslashreplace")
        self.damages.tell(Path(f"k8e.db:{table.name}/{shown}"), f"the row cannot be read: {cause}")
        condition = " AND ".join(f"CAST({key} AS BLOB) = ?" for key in table.keys)
        await self._execute(f"DELETE FROM {table.name} WHERE {condition}", *names)

    async def _execute(self, statement: str, *values: object) -> None:
        await self._transact(lambda connection: connection.execute(statement, values))

    async def _transact(self, work: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> None:
        """All of it or nothing. It happens even if the caller is cancelled meanwhile."""
        await self._call(lambda: self._do_transaction(work, durable))

    async def _make_room(self) -> None:
        """Waits until the database has what a full journal has."""
        if self._journal.is_full:
            await self._call(lambda: None)

    def _change(self, kind: str, values: Values) -> None:
        """Changes the table of runs, by way of the journal: on record when this returns."""
        try:
            self._journal.add(kind, values)
        except OSError as error:
            raise StoreFailed(error) from error
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH, self._begin_flush)

    def _begin_flush(self) -> None:
        self._flushing = None
        flushing = asyncio.get_running_loop().create_task(self._flush())
        self._flushes.add(flushing)
        flushing.add_done_callback(self._flushes.discard)

    async def _flush(self) -> None:
        """Brings the database up to what the journal has."""
        try:
            await self._call(lambda: None)
        except StoreFailed as failed:  # tried again with the next statement
            warn("journal_waits", cause=failed.detail)

    async def _call(self, work: Callable[[], T]) -> T:
        """Does the work behind everything that was asked for before it."""
        try:
            # Shielded, because what still waits for its turn would else be cancelled with its caller.
            return await wait_result(asyncio.get_running_loop().run_in_executor(self._thread, self._do, work))
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(error) from error
        finally:
            self._journal.tidy()

    def _do(self, work: Callable[[], T]) -> T:
        self._journal.apply(self._connection)
        return work()

    def _do_transaction(self, work: Callable[[sqlite3.Connection], object], durable: bool) -> None:
        if durable:
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            work(self._connection)
            self._connection.execute("COMMIT")
            if durable:
                # Out of SQLite's journal, and nothing of it stays there: a damaged one must not cost a persistent
                # session, nor bring back what the file had before. It is written either way.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if durable:
                self._connection.execute("PRAGMA synchronous = NORMAL")


def _check_text(row: sqlite3.Row) -> None:
    """ValueError when a byte of it is no text."""
    for value in row:
        if isinstance(value, str) and not value.isascii():
            value.encode()
