"""The store of a gateway that has no files: the statements of `Store` on a database in memory, whose content is
mirrored to a place that outlives this gateway.

A transaction is committed in memory, then written to the mirror, and only then its caller goes on. If the mirror cannot
be written it is undone, and what the mirror may have taken all the same is written again until it answers. Runs of the
foreground are in memory alone, because a command must not cost a write; those of the background are written soon, and
at once where a caller relies on it (`secure`).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

from k8e.core.log.daemon_log import warn
from k8e.core.store.changes import Changes, take_changes, undo_changes, watch_changes
from k8e.core.store.contents import Content, check_version, read_content, write_content
from k8e.core.store.journal import Change, Journal, Values
from k8e.core.store.schema import StoreFailed, migrate
from k8e.core.store.store import Store
from k8e.core.tasks import wait_result
from k8e.damage import Damages
from k8e.engine import EngineError

T = TypeVar("T")

LATE: Final = 1.0  # seconds until what no caller waits for is written
_LATEST: Final = 10.0  # between attempts, while the mirror does not answer
_NOWHERE: Final = Path("/nowhere")
_HINT: Final = "The place of the records does not answer. Nothing was changed; try again in a moment."


class Mirror(Protocol):
    """Keeps a content for each name. Its methods raise EngineError."""

    async def load(self) -> Sequence[tuple[str, Content]]:
        """All of them."""

    async def write(self, name: str, content: Content | None) -> None:
        """It is kept when this returns, instead of what was; None: nothing is kept."""

    async def close(self) -> None: ...


class LooseJournal(Journal):
    """Keeps changes in memory until they are applied."""

    def __init__(self) -> None:
        super().__init__(_NOWHERE, -1, 0)

    def add(self, kind: str, values: Values) -> None:
        self._number += 1
        self._waiting.append(Change(self._number, kind, values))

    def tidy(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Line:
    """Writes of one name, one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    written: int = 0
    waiting: int = 0


class MirroredStore(Store):
    _mirror: Mirror

    @classmethod
    async def load(cls, mirror: Mirror) -> Self:
        """Reads all that the mirror has. A content that cannot be read stays there, and costs its session."""
        try:
            contents = await mirror.load()
        except EngineError as error:
            raise StoreFailed(error, error.hint or _HINT) from error
        for _, content in contents:
            check_version(content)
        thread = ThreadPoolExecutor(1, "k8e-store")
        damages = Damages(_NOWHERE)
        try:
            opening = asyncio.get_running_loop().run_in_executor(thread, _fill, contents, damages)
            connection, known = await opening
        except BaseException:
            thread.shutdown()
            raise
        store = cls(_NOWHERE, connection, LooseJournal(), thread, damages, known=known)
        store._mirror = mirror
        return store

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
        super().__init__(path, connection, journal, thread, damages, known=known)
        self._lines: dict[str, _Line] = {}
        self._late: set[str] = set()
        self._catching_up: asyncio.Task[None] | None = None
        self._transactions: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        await asyncio.gather(*self._transactions, return_exceptions=True)
        await self._flush()
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
        try:
            await self._write_all(frozenset(self._late))
        except EngineError as error:  # runs that ended in the last second: the next gateway asks their agents
            warn("records_not_written", names=len(self._late), cause=error)
        await super().close()
        await self._mirror.close()

    async def secure(self, sandbox: str) -> None:
        await self._call(lambda: None)
        try:
            await self._write(sandbox)
        except EngineError as error:
            self._write_late([sandbox])
            raise StoreFailed(error, error.hint or _HINT) from error

    # A record that cannot be read stays in the mirror, where the next gateway finds it.

    def _trust(self) -> None: ...

    def _doubt(self) -> None: ...

    # Transactions

    async def _transact(self, work: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> None:
        """`durable`: every transaction is."""
        transaction = self._loop.create_task(self._write_through(work))
        self._transactions.add(transaction)
        transaction.add_done_callback(self._transactions.discard)
        await wait_result(transaction)

    async def _write_through(self, work: Callable[[sqlite3.Connection], object]) -> None:
        changes = await self._call(lambda: self._commit(work))
        try:
            await self._write_all(changes.names)
        except (EngineError, StoreFailed) as error:
            await self._call(lambda: undo_changes(self._connection, changes.undo))
            self._write_late(changes.names)
            raise StoreFailed(error, _HINT) from error

    def _commit(self, work: Callable[[sqlite3.Connection], object]) -> Changes:
        noted: list[Changes] = []

        def do(connection: sqlite3.Connection) -> None:
            work(connection)
            noted.append(take_changes(connection))

        self._do_transaction(do, durable=False)
        return noted[0]

    def _do(self, work: Callable[[], T]) -> T:
        self._journal.apply(self._connection)
        if names := take_changes(self._connection).names:
            self._loop.call_soon_threadsafe(self._write_late, names)
        return work()

    # Writing

    async def _write_all(self, names: Collection[str]) -> None:
        """Raises the first error, after all are done."""
        if names:
            done = await asyncio.gather(*(self._write(name) for name in names), return_exceptions=True)
            if errors := [each for each in done if isinstance(each, BaseException)]:
                raise errors[0]

    async def _write(self, name: str) -> None:
        """When it returns, the mirror has of this name what was in memory at the call, or something newer."""
        line = self._lines.setdefault(name, _Line())
        line.wanted += 1
        mine = line.wanted
        line.waiting += 1
        try:
            async with line.lock:
                if line.written >= mine:
                    return
                covered = line.wanted
                self._late.discard(name)
                try:
                    content = await self._call(lambda: read_content(self._connection, name))
                    await self._mirror.write(name, content)
                except BaseException:
                    self._late.add(name)
                    raise
                line.written = covered
        finally:
            line.waiting -= 1
            if not line.waiting:
                del self._lines[name]

    def _write_late(self, names: Collection[str]) -> None:
        self._late.update(names)
        if self._late and (self._catching_up is None or self._catching_up.done()):
            self._catching_up = self._loop.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        pause = LATE
        while self._late:
            await asyncio.sleep(pause)
            names = frozenset(self._late)
            try:
                await self._write_all(names)
                pause = LATE
            except (EngineError, StoreFailed) as error:
                warn("records_wait", names=len(names), cause=error)
                pause = min(2 * pause, _LATEST)


def _fill(contents: Sequence[tuple[str, Content]], damages: Damages) -> tuple[sqlite3.Connection, bool]:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    migrate(connection)
    known = True
    for name, content in sorted(contents, key=_tell_age):
        try:
            write_content(connection, content)
        except (ValueError, LookupError, TypeError, AttributeError, sqlite3.Error) as error:
            known = False
            damages.tell(Path(f"record:{name}"), f"it cannot be read: {error}")
    watch_changes(connection)
    return connection, known


def _tell_age(named: tuple[str, Content]) -> float:
    """Sessions in the order in which they were made: of those that are gone the oldest are forgotten first."""
    try:
        return float(named[1]["sessions"][0]["created"])
    except (ValueError, LookupError, TypeError):
        return 0.0
