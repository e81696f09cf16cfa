"""The service on files that are damaged. With a real daemon: tests/scenarios/test_damage.py."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path

import pytest

from k8e.core.environments import Environments
from k8e.core.errors import Kind
from k8e.core.model import SessionSpec
from tests.core.rig import ALICE, fault, open_rig
from tests.ways import WAYS

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
@pytest.mark.parametrize("file", ["state.db", "state.db-wal", "audit.log"])
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
        found = session in [each.session_id for each in await rig.service.sessions(ALICE)]
        if found:
            assert (await rig.run(session, "cat file")).stdout == b"precious\n"
        new = await rig.create()
        assert (await rig.run(new, "echo works")).stdout == b"works\n"
    if file == "audit.log":
        assert found
    elif not found:
        # Nobody knows any more whose it was; its files are not thrown away.
        assert (folder / "kept" / sandbox / "workspace" / "file").read_text() == "precious\n"
        assert str(folder / "state.db") in damaged(folder)


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


@pytest.mark.parametrize("way", WAYS)
async def test_variables_that_are_damaged_are_not_half_there(folder: Path, way: str) -> None:
    environments = Environments(folder / "environments")
    await environments.keep("s", ((b"A", b"1"), (b"B", b"2")))
    assert await environments.recall("s") == ((b"A", b"1"), (b"B", b"2"))
    WAYS[way](folder / "environments" / "s")
    await environments.forget_others({"s"})
    assert await environments.recall("s") == ()
    (told,) = environments.damages.take()
    assert told.path == str(folder / "environments" / "s")
    await environments.keep("s", ((b"A", b"3"),))
    assert await environments.recall("s") == ((b"A", b"3"),)


async def test_sessions_go_on_with_a_file_in_place_of_the_folder_of_variables(folder: Path) -> None:
    (folder / "environments").write_text("x")
    async with open_rig(folder) as rig:
        session = await rig.create(spec=SessionSpec(persistent=True, env={"A": "1"}))
        await rig.service.stop_session(ALICE, session)
        await rig.service.start_session(ALICE, session)
        assert (await rig.run(session, "echo $A")).stdout == b"1\n"
    assert damaged(folder) == [str(folder / "environments")]
