from __future__ import annotations

import contextlib
import json
import sqlite3
import stat
from dataclasses import asdict
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import Phase
from k8e.core.store import database, schema
from k8e.core.store.mirrored import MirroredStore
from k8e.core.store.schema import StoreFailed
from k8e.core.store.store import Store
from tests.core.mirror import MemoryMirror
from tests.core.rig import fault
from tests.core.store_contract import CHECKS, SESSION, Check, Open, make_session


@pytest.fixture(params=["file", "mirrored"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    mirror = MemoryMirror()

    async def open_file() -> Store:
        return await Store.open(tmp_path / "state.db")

    async def open_mirrored() -> Store:
        return await MirroredStore.load(mirror)

    return open_file if request.param == "file" else open_mirrored


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check: Check, open_store: Open) -> None:
    await check(open_store)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


async def test_no_other_user_can_read_it(path: Path) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    await store.close()


async def test_a_database_that_another_process_holds_is_a_fault_and_not_a_hang(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    store = await Store.open(path)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.insert_session(SESSION)
    other.rollback()
    other.close()
    await store.insert_session(SESSION)
    await store.close()


async def test_a_full_disk_is_a_fault(path: Path) -> None:
    store = await Store.open(path)
    await store._query("PRAGMA max_page_count = 1")  # SQLite's own way to be full
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        for number in range(200):
            await store.insert_session(make_session(f"s{number}", f"s{number}"))
    await store._query("PRAGMA max_page_count = 1000000")
    await store.insert_session(make_session("after", "after"))
    await store.close()


async def test_a_journal_that_stays_does_not_undo_what_was_written(path: Path) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)

    def refuse(action: int, subject: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if subject == "wal_checkpoint" else sqlite3.SQLITE_OK

    store._connection.set_authorizer(refuse)
    await store.set_phase("s1", Phase.STOPPED, durable=True)
    assert [record.session.phase for record in await store.sessions()] == [Phase.STOPPED]
    await store.close()


async def test_an_older_file_is_brought_up_to_date_step_by_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)
    await store.close()
    more = (*schema.MIGRATIONS, ("CREATE TABLE audit (line TEXT)", "INSERT INTO audit VALUES ('begun')"))
    monkeypatch.setattr(schema, "MIGRATIONS", more)
    for _ in range(2):
        store = await Store.open(path)
        assert [tuple(row) for row in await store._query("SELECT * FROM audit")] == [("begun",)]
        assert await store.sessions() == [SESSION]
        await store.close()


async def test_a_session_of_the_first_version_is_read(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in schema.MIGRATIONS[0]:
            connection.execute(statement)
        limits, keys = json.dumps(asdict(SESSION.session.limits)), '["A", "B"]'
        row = ("s1", "one", "default", 1000, "creating", "gvisor", "host", limits, keys, 1.5, 2.5, 60, "boot", 3.5, "")
        connection.execute(f"INSERT INTO sessions VALUES ({','.join('?' * len(row))})", row)
        connection.execute("PRAGMA user_version = 1")
    store = await Store.open(path)
    assert await store.sessions() == [SESSION]
    await store.close()


async def test_a_step_that_fails_is_taken_back_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ("CREATE TABLE audit (line TEXT)", "nonsense")))
        with pytest.raises(StoreFailed):
            await Store.open(path)
    store = await Store.open(path)
    assert await store._query("SELECT name FROM sqlite_master WHERE name = 'audit'") == []
    await store.close()


async def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreFailed, match="newer") as failed:
        await Store.open(path)
    assert "K8E_STATE_DIR" in failed.value.hint


@pytest.fixture
def other_file(path: Path) -> Path:
    path.write_bytes(b"something else entirely" * 100)
    return path


async def test_a_file_that_is_no_database_is_set_aside(other_file: Path) -> None:
    store = await Store.open(other_file)
    try:
        (damage,) = store.damages.take()
        assert (damage.path, store.known) == (str(other_file), False)
        assert await store.sessions() == []
    finally:
        await store.close()


async def test_a_place_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed):
        await Store.open(tmp_path / "nowhere" / "state.db")
