from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import Caller, Phase, Session, Status
from k8e.core.store import database, schema
from k8e.core.store.records import RunRecord, SessionRecord
from k8e.core.store.schema import StoreFailed
from k8e.core.store.store import KEPT_SESSIONS, Store
from k8e.engine import Limits, Runtime
from tests.core.rig import fault

SESSION = SessionRecord(
    sandbox="s1",
    session=Session(
        session_id="one",
        tenant="default",
        owner=1000,
        phase=Phase.CREATING,
        runtime=Runtime.GVISOR,
        image="host",
        limits=Limits(cpus=2, memory=1 << 30),
        env_keys=("A", "B"),
        created=1.5,
        last_used=2.5,
        ttl=60,
    ),
    boot="boot",
    used_at=3.5,
)
RUN = RunRecord(run_id="r1", sandbox="s1", background=True, started=4.5, oom_before=3, command=2**64 - 1)


def make_session(sandbox: str, session_id: str = "one", tenant: str = "default") -> SessionRecord:
    session = replace(SESSION.session, session_id=session_id, tenant=tenant)
    return replace(SESSION, sandbox=sandbox, session=session)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


async def test_what_was_written_is_there_in_the_next_life(path: Path) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)
    await store.insert_run(RUN, 10)
    ended = replace(RUN, finished=9.5, status=Status.COMPLETED, exit_code=7, stdout_bytes=2**40, kept_stdout=5)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    await store.finish_run(replace(ended, run_id="r2"))
    await store.close()
    store = await Store.open(path)
    assert await store.sessions() == [SESSION]
    assert await store.runs("s1") == [RUN, replace(ended, run_id="r2")]
    assert await store.runs("s1", unfinished=True) == [RUN]
    await store.close()


async def test_no_other_user_can_read_it(path: Path) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    await store.close()


async def test_of_living_sessions_a_name_is_given_once(path: Path) -> None:
    store = await Store.open(path)
    await store.insert_session(SESSION)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.insert_session(make_session("s2"))
    await store.insert_session(make_session("s3", tenant="other"))
    await store.end_session("s1", "destroyed", 5.0, keep_runs=False)
    await store.insert_session(make_session("s2"))
    await store.close()


async def test_the_memory_of_gone_sessions_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEPT_SESSIONS > 3
    monkeypatch.setattr("k8e.core.store.store.KEPT_SESSIONS", 3)
    store = await Store.open(path)
    await store.insert_session(make_session("alive", "alive"))
    for number in range(6):
        await store.insert_session(make_session(f"s{number}"))
        await store.insert_run(replace(RUN, run_id=f"r{number}", sandbox=f"s{number}"), 10)
        await store.end_session(f"s{number}", "lost", 5.0, keep_runs=True)
    assert [record.sandbox for record in await store.sessions()] == ["alive", "s3", "s4", "s5"]
    assert await store.find_run("r2") is None
    lost = await store.find_run("r3")
    assert lost is not None
    assert (lost.status, lost.finished) == (Status.LOST, 5.0)
    assert [record.sandbox for record in await store.ended_sessions(Caller(1000))] == ["s3", "s4", "s5"]
    assert await store.ended_sessions(Caller(1001)) == []
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


async def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(path: Path) -> None:
    store = await Store.open(path)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.insert_run(RUN, 10)  # of no session
    await store.insert_session(SESSION)
    await store.insert_run(RUN, 10)
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


async def test_a_caller_that_is_cancelled_does_not_take_the_write_along(path: Path) -> None:
    store = await Store.open(path)
    task = asyncio.create_task(store.insert_session(SESSION))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.sandbox for record in await store.sessions()] == ["s1"]
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
