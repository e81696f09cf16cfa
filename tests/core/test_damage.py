"""The service on files that are damaged. With a real daemon: tests/scenarios/test_damage.py."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import SessionSpec
from k8e.core.store.environments import FileEnvironments
from k8e.core.store.records import ImageRecord
from k8e.core.store.store import Store
from k8e.engine import EngineError
from tests.core.bare_engine import BareEngine
from tests.core.rig import ALICE, fault, open_rig
from tests.core.store_contract import make_session
from tests.core.test_recovery import edit
from tests.ways import SEED, WAYS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of another owner need root")


def damaged(folder: Path) -> list[str]:
    """When the service is closed: its lines are written a moment later than what they tell."""
    told = []
    for line in (folder / "audit.log").read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # what a test put there
            told.append(json.loads(line))
    return [event["path"] for event in told if event.get("event") == "state_damaged"]


def copy_as_it_is(folder: Path) -> dict[Path, bytes]:
    """As a crash would leave it: SQLite puts its journal away when it is closed in order."""
    return {path: path.read_bytes() for path in folder.glob("state.db*")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", ["state.db", "state.db-wal", "state.db-runs", "audit.log"])
async def test_a_file_of_the_service_costs_what_it_describes(folder: Path, way: str, file: str) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True))
        sandbox = rig.sandbox_of(session)
        await rig.run(session, "echo precious > file")
        left = copy_as_it_is(folder)
    for path, content in left.items():
        path.write_bytes(content)
    WAYS[way](folder / file)
    async with open_rig(folder) as rig:
        found = session in [each.session_id for each in await rig.service.sessions.list(ALICE)]
        if found:
            assert (await rig.run(session, "cat file")).stdout == b"precious\n"
            assert rig.sandbox_of(session) == sandbox
        new = await rig.create()
        assert (await rig.run(new, "echo works")).stdout == b"works\n"
        await rig.service.look_after()  # the log finds out of itself when it is first written
    if file == "audit.log":
        assert found
        # What is in a log is not read.
        assert (str(folder / file) in damaged(folder)) != (way in ("empty", "cut", "garbage", "other_json"))
    elif file == "state.db-runs":
        assert found  # the journal of runs costs runs
        assert str(folder / file) in damaged(folder) or way in ("empty", "cut")
    elif found:
        # What lasts is in the file itself (`durable`), so that a journal that says nothing costs it nothing.
        assert file == "state.db-wal"
        assert damaged(folder) == []
    else:
        # Nothing says any more whose it was; its files are not thrown away.
        assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"
        assert str(folder / file) in damaged(folder)


async def test_a_row_that_cannot_be_read_costs_its_session(folder: Path) -> None:
    async with open_rig(folder) as rig:
        broken, well = await rig.create(), await rig.create()
        sandbox = rig.sandbox_of(broken)
        await rig.run(broken, "echo precious > file")
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as database:
        database.execute("UPDATE sessions SET limits = '{', phase = 'dancing' WHERE session_id = ?", (broken,))
        database.commit()
    async with open_rig(folder) as rig:
        assert (await rig.run(well, "echo well")).stdout == b"well\n"
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.run(broken, "true")
    assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"
    async with open_rig(folder):
        pass
    assert damaged(folder) == [f"k8e.db:sessions/{sandbox}"], "once"


class Broken(Exception):
    """As if the daemon were killed there."""


@pytest.mark.parametrize("call", ["list", "set_aside"])
async def test_a_restart_in_the_midst_of_it_costs_no_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True))
        sandbox = rig.sandbox_of(session)
        await rig.run(session, "echo precious > file")
    WAYS["garbage"](folder / "state.db")

    async def die(*_: object) -> None:
        raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(BareEngine, call, die)
        async with open_rig(folder):
            pass
    async with open_rig(folder):
        pass
    assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"
    assert str(folder / "state.db") in damaged(folder)
    async with open_rig(folder) as rig:
        await rig.create()
    assert not (folder / "state.db.unknown").exists()


@pytest.mark.parametrize("error", [OSError(28, "no room"), EngineError("disk", "no room")])
@pytest.mark.parametrize("damage", ["file", "row"])
async def test_files_that_cannot_be_kept_now_are_kept_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str, error: Exception
) -> None:
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True))
        sandbox = rig.sandbox_of(session)
        await rig.run(session, "echo precious > file")
    if damage == "file":
        WAYS["cut"](folder / "state.db")
    else:
        edit(folder, "UPDATE sessions SET limits = '{'")

    async def fail(*_: object) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(BareEngine, "set_aside", fail)
        async with open_rig(folder) as rig:
            new = await rig.create()
    async with open_rig(folder) as rig:
        assert (await rig.run(new, "echo works")).stdout == b"works\n"
    assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"


@pytest.mark.parametrize("column", ["sandbox", "session_id", "tenant", "limits", "hosts", "labels", "reason"])
async def test_a_byte_that_is_no_text_costs_its_row(folder: Path, column: str) -> None:
    async with open_rig(folder) as rig:
        broken, well = await rig.create(spec=SessionSpec(persistent=True)), await rig.create()
        sandbox = rig.sandbox_of(broken)
        await rig.run(broken, "echo precious > file")
    bad = f"UPDATE sessions SET {column} = CAST(x'78ff78' AS TEXT) WHERE session_id = ?"
    edit(folder, bad, broken)
    async with open_rig(folder) as rig:
        assert (await rig.run(well, "echo well")).stdout == b"well\n"
        with fault(Kind.NOT_FOUND, "session_not_found"):
            await rig.run(broken, "true")
    assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"
    (told,) = damaged(folder)
    assert told == ("k8e.db:sessions/x\\xffx" if column == "sandbox" else f"k8e.db:sessions/{sandbox}")
    async with open_rig(folder) as rig:
        assert (await rig.run(well, "echo well")).stdout == b"well\n"


async def test_a_byte_that_is_no_text_costs_the_name_of_an_image(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "state.db")
    for name in ("bad", "good"):
        await store.put_image(ImageRecord(1000, "team", name, f"sha256:{name}", 1.0, 1.0))
    await store.close()
    edit(tmp_path, "UPDATE images SET name = CAST(x'ff' AS TEXT) WHERE name = 'bad'")
    store = await Store.open(tmp_path / "state.db")
    assert [image.name for image in await store.images()] == ["good"]
    assert [told.path for told in store.damages.take()] == ["k8e.db:images/1000/team/\\xff"]
    assert [image.name for image in await store.images()] == ["good"]
    assert not store.damages.take()
    await store.close()


async def test_a_bit_anywhere_in_the_database_costs_no_start(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = await Store.open(path)
    for number in range(20):
        await store.insert_session(make_session(f"sandbox-{number}", f"session-{number}"))
        await store.put_image(ImageRecord(1000, "team", f"image-{number}", "sha256:x", 1.0, 1.0))
    await store.trust()
    await store.close()
    sound, chosen = path.read_bytes(), random.Random(SEED)
    written = [place for place, byte in enumerate(sound) if byte]  # a page is nearly empty
    for _ in range(150):
        place, bit = chosen.choice(written), chosen.randrange(8)
        if place in range(60, 64):
            continue  # which version wrote it: from a newer one nothing is taken
        content = bytearray(sound)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        store = await Store.open(path)
        try:
            sessions, _, _ = await store.sessions(), await store.images(), await store.warm()
            await store.insert_session(make_session("new", "new"))
            names = {session.sandbox for session in sessions}
            assert len(names) == 20 or not store.known, (SEED, place, bit)
        finally:
            await store.close()
            for name in ("state.db", "state.db-wal", "state.db-shm", "state.db.unknown"):
                (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.parametrize("way", WAYS)
async def test_variables_that_are_damaged_are_not_half_there(folder: Path, way: str) -> None:
    environments = FileEnvironments(folder / "environments")
    await environments.keep("s", ((b"A", b"1"), (b"B", b"2")))
    assert await environments.recall("s") == ((b"A", b"1"), (b"B", b"2"))
    WAYS[way](folder / "environments" / "s")
    await environments.forget_others({"s"})
    assert await environments.recall("s") == ()
    (told,) = environments.damages.take()
    assert told.path == str(folder / "environments" / "s")
    await environments.keep("s", ((b"A", b"3"),))
    assert await environments.recall("s") == ((b"A", b"3"),)


async def test_variables_that_an_older_daemon_kept_are_there(folder: Path) -> None:
    older, environments = b"A=1\0B=x=y\n\0EMPTY=\0", FileEnvironments(folder / "environments")
    path = folder / "environments" / "s"
    path.parent.mkdir()
    path.write_bytes(older)
    await environments.forget_others({"s"})
    assert path.read_bytes().endswith(b"\n" + older), "from now on damage would be seen"
    assert await environments.recall("s") == ((b"A", b"1"), (b"B", b"x=y\n"), (b"EMPTY", b""))
    assert not environments.damages.take()


async def test_sessions_go_on_with_a_file_in_place_of_the_folder_of_variables(folder: Path) -> None:
    (folder / "environments").write_text("x")
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True, env={"A": "1"}))
        await rig.service.sessions.stop(ALICE, session)
        await rig.service.sessions.start(ALICE, session)
        assert (await rig.run(session, "echo $A")).stdout == b"1\n"
    assert damaged(folder) == [str(folder / "environments")]
