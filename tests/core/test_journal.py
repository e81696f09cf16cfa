"""The journal of runs: what it has is in the database of the next daemon, once, whatever happened to this one."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.model import Status
from k8e.core.store import database, journal
from k8e.core.store.store import Store
from tests.core.store_contract import RUN, SESSION

ENDED = replace(RUN, finished=9.5, status=Status.COMPLETED, exit_code=7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
async def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """Writes nothing by itself from the journal into the database."""
    monkeypatch.setattr(database, "FLUSH", 3600.0)
    store = await Store.open(path)
    await store.insert_session(SESSION)
    yield store
    await store.close()


async def open_after_crash(path: Path) -> Store:
    """As the kernel has the files now."""
    copy = path.parent / "copy"
    copy.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, copy / file.name)
    return await Store.open(copy / path.name)


def read_journal(path: Path) -> bytes:
    return path.with_name(f"{path.name}-runs").read_bytes()


async def test_changes_are_made_up_for_after_a_crash(store: Store, path: Path) -> None:
    await store.insert_run(RUN, 10)
    await store.insert_run(replace(RUN, run_id="r2", command=None), 10)
    store.set_command("r2", 5, 1)
    await store.insert_run(replace(RUN, run_id="r3"), 10)
    store.forget_run("r3")
    store.finish_run(ENDED)
    with sqlite3.connect(path) as found:
        assert found.execute("SELECT count(*) FROM runs").fetchone() == (0,)  # none was written yet
    after = await open_after_crash(path)
    assert await after.runs("s1") == [ENDED, replace(RUN, run_id="r2", command=5, oom_before=1)]
    await after.close()


async def test_changes_that_the_database_has_are_not_made_again(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal.Journal, "tidy", lambda _: None)  # it dies between the two
    await store.insert_run(RUN, 10)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    assert len(await store.runs("s1")) == 2
    await store._execute("DELETE FROM runs WHERE run_id = 'r2'")
    assert read_journal(path).count(b"\n") == 2
    after = await open_after_crash(path)
    assert await after.runs("s1") == [RUN]
    await after.insert_run(replace(RUN, run_id="r3"), 10)  # its number is a later one
    await after.close()
    after = await Store.open(path.parent / "copy" / path.name)
    assert [run.run_id for run in await after.runs("s1")] == ["r1", "r3"]
    await after.close()


async def test_a_run_that_ends_before_the_database_has_it_is_written_once(store: Store) -> None:
    statements: list[str] = []
    store._connection.set_trace_callback(statements.append)
    await store.insert_run(RUN, 10)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    store.set_command("r2", 5, 1)
    store.finish_run(ENDED)
    store.finish_run(replace(ENDED, run_id="r2"))
    await store.insert_run(replace(RUN, run_id="r3"), 10)
    store.finish_run(replace(ENDED, run_id="r3"))
    store.forget_run("r3")
    known = await store.runs("s1")
    assert known == [ENDED, replace(ENDED, run_id="r2", command=5, oom_before=1)]
    assert [each.split()[0] for each in statements if " runs " in each][:5] == [
        *("INSERT", "INSERT", "UPDATE", "INSERT", "DELETE")
    ]


async def test_it_is_empty_when_the_database_has_all(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FULL", 1000)
    for number in range(20):
        await store.insert_run(replace(RUN, run_id=f"r{number}"), 10)
        assert len(read_journal(path)) < 2000
    assert len(await store.runs("s1")) == 20
    assert read_journal(path) == b""


async def test_runs_go_on_while_another_process_holds_the_database(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await store._query("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    await store.insert_run(RUN, 10)
    await store._flush()
    assert "journal_waits" in caplog.text
    other.rollback()
    other.close()
    store.finish_run(ENDED)
    assert await store.runs("s1") == [ENDED]


async def test_a_run_of_a_session_that_is_no_more_is_left_out(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await store.insert_run(replace(RUN, sandbox="s9"), 10)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    assert [run.run_id for run in await store.runs("s1")] == ["r2"]
    assert "change_not_applied" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"\xff\0", b"[1]", b'[0, "forget", {}]', b'["2", "forget", {}]', b'[9, "drop", {}]', b"[" * 10_000),
        *(b'[9, "forget", 5]', b'[9, "forget", {"run_id": []}]', b'[9, "begin", {}]', b'[9, "forget", {}]'),
        *(
            b'[9, "forget", [["run_id", "r1"]], 5]',
            b'[9, "forget", [["a", "b"]]]',
            b'[9, ["forget"], {}]',
            b"[]",
            b"null",
        ),
        *(b'[9, "command", {"run_id": "r1", "command": "5", "oom_before": 100000000000000000000}]',),
    ],
)
async def test_a_damaged_line_costs_itself(store: Store, path: Path, line: bytes) -> None:
    await store.insert_run(RUN, 10)
    file = path.with_name(f"{path.name}-runs")
    first = file.read_bytes()
    store.finish_run(ENDED)
    file.write_bytes(file.read_bytes().replace(first, first + line + b"\n").replace(b"[2, ", b"[10, "))
    after = await open_after_crash(path)
    assert await after.runs("s1") == [ENDED]
    await after.close()


async def test_a_journal_that_is_no_file_is_set_aside(path: Path) -> None:
    strange = path.with_name(f"{path.name}-runs")
    strange.symlink_to("/etc/passwd")
    store = await Store.open(path)
    await store.insert_session(SESSION)
    await store.insert_run(RUN, 10)
    assert await store.runs("s1") == [RUN]
    assert not strange.is_symlink()
    assert [damage.path for damage in store.damages.take()] == [str(strange)]
    await store.close()
