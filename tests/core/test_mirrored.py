"""The store that is mirrored: what it writes and when, and what becomes of a write that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from k8e.core.errors import Kind
from k8e.core.model import ApprovalStatus, Phase
from k8e.core.store import mirrored
from k8e.core.store.contents import ENDED_RUNS
from k8e.core.store.mirrored import MirroredStore
from k8e.core.store.schema import StoreFailed
from tests.core.mirror import MemoryMirror
from tests.core.rig import fault
from tests.core.store_contract import APPROVAL, ENDED, RUN, SESSION, WARM, make_session


@pytest.fixture
def mirror() -> MemoryMirror:
    return MemoryMirror()


@pytest.fixture
async def store(mirror: MemoryMirror, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MirroredStore]:
    monkeypatch.setattr(mirrored, "LATE", 0.01)
    store = await MirroredStore.load(mirror)
    await store.insert_session(SESSION)
    mirror.writes.clear()
    yield store
    await store.close()


async def wait_written(store: MirroredStore) -> None:
    while store._late or store._lines:
        await asyncio.sleep(0.005)


async def test_a_command_costs_no_write(store: MirroredStore, mirror: MemoryMirror) -> None:
    await store.insert_run(replace(RUN, background=False), 10)
    store.set_command("r1", 7, 0)
    store.finish_run(replace(ENDED, background=False))
    await store.set_used([("s1", 9.0, 9.0)])
    await store.rebase("s1", "other", 1.0)
    assert len(await store.runs("s1")) == 1
    await wait_written(store)
    assert mirror.writes == []


async def test_a_claim_is_one_write(store: MirroredStore, mirror: MemoryMirror) -> None:
    await store.insert_warm(WARM)
    mirror.writes.clear()
    await store.claim_warm(make_session("w1", "two"))
    assert mirror.writes == ["w1"]
    assert json.loads(mirror.contents["w1"]).keys() == {"version", "sessions"}


async def test_a_run_that_ended_is_written_soon(store: MirroredStore, mirror: MemoryMirror) -> None:
    await store.insert_run(RUN, 10)
    store.finish_run(ENDED)
    await store.runs("s1")
    await asyncio.sleep(0)
    await wait_written(store)
    (row,) = json.loads(mirror.contents["s1"])["runs"]
    assert row["status"] == "completed"


@pytest.mark.parametrize("deaf", [False, True])
async def test_what_cannot_be_written_is_undone(store: MirroredStore, mirror: MemoryMirror, deaf: bool) -> None:
    """Also when the mirror has taken it, and could not say so: then it is put right there."""
    await store.insert_approval(APPROVAL, 10)
    await store.insert_run(RUN, 10)
    await store.insert_warm(WARM)
    await store.runs("s1")
    await asyncio.sleep(0)
    await wait_written(store)
    before = dict(mirror.contents)
    memory = (await store.sessions(), await store.runs("s1"), await store.approvals(pending=False), await store.warm())
    mirror.away, mirror.deaf = not deaf, deaf
    for change in (
        store.insert_session(make_session("s2", "two")),
        store.set_phase("s1", Phase.ACTIVE),
        store.stop_session("s1", "stopped", 8.0),
        store.end_session("s1", "ended", 8.0, keep_runs=False),
        store.forget_session("s1"),
        store.claim_warm(make_session("w1", "three")),
        store.forget_warm("w1"),
        store.settle_approval(replace(APPROVAL, status=ApprovalStatus.APPROVED)),
        store.secure("s1"),
    ):
        with fault(Kind.UNAVAILABLE, "state_unavailable"):
            await change
        now = (await store.sessions(), await store.runs("s1"), await store.approvals(pending=False), await store.warm())
        assert now == memory, change
    mirror.away = mirror.deaf = False
    await wait_written(store)
    assert mirror.contents == before
    await store.insert_session(make_session("s2", "two"))  # its name is free


async def test_writes_of_one_name_that_overlap_are_one(store: MirroredStore, mirror: MemoryMirror) -> None:
    mirror.open.clear()
    phases = [Phase.ACTIVE, Phase.STOPPING, Phase.STOPPED, Phase.STARTING, Phase.ACTIVE]
    changes = [asyncio.create_task(store.set_phase("s1", phase)) for phase in phases]
    other = asyncio.create_task(store.insert_session(make_session("s2", "two")))
    while not (line := store._lines.get("s1")) or line.wanted < len(phases):
        await asyncio.sleep(0.001)
    assert not any(change.done() for change in changes)
    mirror.open.set()
    await asyncio.gather(*changes, other)
    assert (mirror.writes.count("s1"), mirror.writes.count("s2")) == (2, 1)
    assert json.loads(mirror.contents["s1"])["sessions"][0]["phase"] == "active"


async def test_of_ended_runs_the_latest_are_written(store: MirroredStore, mirror: MemoryMirror) -> None:
    await store.insert_run(replace(RUN, run_id="first"), 1000)
    for number in range(ENDED_RUNS + 5):
        await store.insert_run(replace(RUN, run_id=f"r{number}"), 1000)
        store.finish_run(replace(ENDED, run_id=f"r{number}"))
    await store.secure("s1")
    names = [row["run_id"] for row in json.loads(mirror.contents["s1"])["runs"]]
    assert names == ["first", *(f"r{number}" for number in range(5, ENDED_RUNS + 5))]


async def test_a_change_by_the_journal_is_not_undone_with_another(store: MirroredStore, mirror: MemoryMirror) -> None:
    mirror.away = True
    await store.insert_run(replace(RUN, background=False), 10)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.set_phase("s1", Phase.ACTIVE)
    assert len(await store.runs("s1")) == 1
    mirror.away = False


@pytest.mark.parametrize(
    "damage",
    [
        {"sessions": [{}]},
        {"sessions": 5},
        {"sessions": [{"sandbox": "s1", "strange": 1}]},
        {"runs": [{"run_id": "r9", "sandbox": "nowhere"}]},
        {"sessions": [None]},
    ],
)
async def test_a_content_that_cannot_be_read_costs_itself_and_stays(
    mirror: MemoryMirror, damage: dict[str, object]
) -> None:
    store = await MirroredStore.load(mirror)
    await store.insert_session(SESSION)
    await store.close()
    mirror.contents["bad"] = json.dumps({"version": 1, **damage})
    for _ in range(2):
        store = await MirroredStore.load(mirror)
        assert [record.sandbox for record in await store.sessions()] == ["s1"]
        assert [told.path for told in store.damages.take()] == ["record:bad"]
        assert not store.known
        await store.trust()
        await store.close()
    assert "bad" in mirror.contents


async def test_a_field_of_a_row_that_cannot_be_read_costs_its_session(mirror: MemoryMirror) -> None:
    store = await MirroredStore.load(mirror)
    await store.insert_session(SESSION)
    await store.close()
    content = json.loads(mirror.contents["s1"])
    content["sessions"][0]["phase"] = "unheard of"
    mirror.contents["s1"] = json.dumps(content)
    store = await MirroredStore.load(mirror)
    assert await store.sessions() == []
    assert not store.known
    await store.close()


async def test_an_older_content_is_read_with_defaults(mirror: MemoryMirror) -> None:
    store = await MirroredStore.load(mirror)
    await store.insert_session(SESSION)
    await store.close()
    content = json.loads(mirror.contents["s1"])
    del content["sessions"][0]["emulated"]
    mirror.contents["s1"] = json.dumps({**content, "version": 3})
    store = await MirroredStore.load(mirror)
    assert [record.sandbox for record in await store.sessions()] == ["s1"]
    await store.close()


async def test_a_content_of_a_newer_version_is_refused(mirror: MemoryMirror) -> None:
    mirror.contents["s1"] = json.dumps({"version": 999})
    with pytest.raises(StoreFailed, match="newer"):
        await MirroredStore.load(mirror)


async def test_a_mirror_that_is_away_at_the_start_is_a_fault(mirror: MemoryMirror) -> None:
    mirror.away = True
    with pytest.raises(StoreFailed):
        await MirroredStore.load(mirror)
