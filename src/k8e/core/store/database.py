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
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from k8e.core.errors import Fault, Kind
from k8e.core.tasks import wait_result
from k8e.damage import Damaged, Damages, check_own

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


# The first columns of each table: they name a row.
_KEYS: Final = {
    "sessions": ("sandbox",),
    "runs": ("run_id",),
    "warm": ("sandbox",),
    "approvals": ("approval_id",),
    "images": ("owner", "tenant", "name"),
}


class StoreFailed(Fault):
    def __init__(self, cause: object, hint: str = "") -> None:
        if not hint and type(cause) is sqlite3.DatabaseError:  # not one of its kinds: the file is not what it should be
            hint = "It is damaged, or no database: put a copy of it back, or move it away to begin with nothing."
        hint = hint or "Is the disk with the state directory full, or does another process hold the database?"
        super().__init__(
            Kind.UNAVAILABLE, "state_unavailable", "the daemon's database does not answer", detail=str(cause), hint=hint
        )


_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


def _open(path: Path, damages: Damages) -> tuple[sqlite3.Connection, bool]:
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
    return connection, not os.path.lexists(_marker(path))


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


def _set_aside(path: Path, cause: object, damages: Damages) -> None:
    _mark(path)
    for file in (path, *_beside(path)):
        if os.path.lexists(file):
            damages.set_aside(file, cause)


def _connect(path: Path, damages: Damages) -> sqlite3.Connection:
    # Made here, so that nobody else can read it from its first moment on.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # A byte that is no text costs its row (`_read`), and not every statement that meets it.
    connection.text_factory = lambda content: content.decode(errors="surrogateescape")
    try:
        _check_header(path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        _check_content(connection, path, damages)
        _migrate(connection)
        _check_columns(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, UnicodeDecodeError):  # what SQLite says of the file has a part of it
            raise _corrupt(error) from error
        raise
    return connection


def _check_header(path: Path) -> None:
    """Of what SQLite takes for a file that a later SQLite wrote: it would refuse to write it, or to read it."""
    with path.open("rb") as file:
        head = file.read(48)
    if any(version > 2 for version in head[18:20]) or head[44:] > b"\0\0\0\4":
        raise _corrupt("its header is none that is written here")


def _check_content(connection: sqlite3.Connection, path: Path, damages: Damages) -> None:
    (sound,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if sound == "ok":
        return
    try:
        connection.execute("REINDEX")  # rows and an index that differ: the rows are what counts
    except sqlite3.IntegrityError as error:
        raise _corrupt(error) from error
    (still,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if still != "ok":
        raise _corrupt(still)
    damages.tell(path, f"an index of it was made again: {sound}")


def _check_columns(connection: sqlite3.Connection) -> None:
    """What a table is made of is text in the file like any other."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as example:
        _migrate(example)
        for table in _KEYS:
            wanted, found = (
                [column[1:4] for column in each.execute(f"PRAGMA table_info({table})")]
                for each in (example, connection)
            )
            if wanted != found:
                raise _corrupt(f"the columns of {table} are others")


def _corrupt(cause: object) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(str(cause))
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


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
    def __init__(
        self, path: Path, connection: sqlite3.Connection, thread: ThreadPoolExecutor, damages: Damages, *, known: bool
    ) -> None:
        self._path = path
        self._connection = connection
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
            connection, known = await opening
        except (sqlite3.Error, OSError) as error:
            thread.shutdown()
            raise StoreFailed(error) from error
        except BaseException:
            thread.shutdown()
            raise
        return cls(path, connection, thread, damages, known=known)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def trust(self) -> None:
        """From now on a sandbox that it does not have is no session's: all others were set aside."""
        if not self.known:
            await self._call(lambda: _unmark(self._path, self.damages))
            self.known = True

    async def _query(self, statement: str, *values: object) -> list[Any]:
        return await self._call(lambda: self._connection.execute(statement, values).fetchall())

    async def _read(self, read: Callable[[Any], T], table: str, statement: str, *values: object) -> list[T]:
        """Rows as what they are. One that cannot be read is as if it were not there; it is told once, and removed."""
        found = []
        for row in await self._query(statement, *values):
            try:
                _check_text(row)
                found.append(read(row))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                await self._drop(table, row, error)
        return found

    async def _drop(self, table: str, row: Sequence[object], cause: Exception) -> None:
        if table == "sessions":
            # Its sandbox is set aside when the next daemon starts, if not by this one; its name may be what is damaged.
            self.known = False
            await self._call(lambda: _mark(self._path))
        keys = _KEYS[table]
        names = [str(value).encode(errors="surrogateescape") for value in row[: len(keys)]]
        shown = b"/".join(names).decode(errors="backslashreplace")
        self.damages.tell(Path(f"k8e.db:{table}/{shown}"), f"the row cannot be read: {cause}")
        condition = " AND ".join(f"CAST({key} AS BLOB) = ?" for key in keys)
        await self._execute(f"DELETE FROM {table} WHERE {condition}", *names)

    async def _execute(self, statement: str, *values: object) -> None:
        await self._transact(lambda connection: connection.execute(statement, values))

    async def _transact(self, work: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> None:
        """All of it or nothing. It happens even if the caller is cancelled meanwhile."""
        await self._call(lambda: self._do_transaction(work, durable))

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            # Shielded, because what still waits for its turn would else be cancelled with its caller.
            return await wait_result(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(error) from error

    def _do_transaction(self, work: Callable[[sqlite3.Connection], object], durable: bool) -> None:
        if durable:
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            work(self._connection)
            self._connection.execute("COMMIT")
            if durable:
                # Out of the journal: a damaged one must not cost files that are to last. It is written either way.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if durable:
                self._connection.execute("PRAGMA synchronous = NORMAL")


def _check_text(row: Sequence[object]) -> None:
    """ValueError when a byte of it is no text."""
    for value in row:
        if isinstance(value, str) and not value.isascii():
            value.encode()
