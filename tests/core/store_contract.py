"""Checks that every store passes, wherever it keeps its records: each gets a function that opens the place anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import pytest

from k8e.core.access.lineage import parse_lineage
from k8e.core.errors import Kind
from k8e.core.model import ApprovalStatus, Caller, Phase, Session, Status
from k8e.core.store.records import ApprovalRecord, ImageRecord, RunRecord, SessionRecord, WarmRecord
from k8e.core.store.store import Store
from k8e.engine import Limits, Runtime
from k8e.policy import HostList
from tests.core.rig import fault

Open = Callable[[], Awaitable[Store]]
Check = Callable[[Open], Awaitable[None]]

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
ENDED = replace(RUN, finished=9.5, status=Status.COMPLETED, exit_code=7, stdout_bytes=2**40, kept_stdout=5)
APPROVAL = ApprovalRecord(
    approval_id="appr-1",
    sandbox="s1",
    session_id="one",
    tenant="default",
    owner=1000,
    action="rm -rf 'ü' \"x\"",
    asker="uid 1000",
    lineage=parse_lineage("[]"),
    asked=1.0,
    expires=2.0,
    boot="boot",
    deadline=3.0,
)
WARM = WarmRecord("w1", Runtime.NATIVE, "host", Limits(cpus=1, memory=1 << 20), "edition", ready=False)


def make_session(sandbox: str, session_id: str = "one", tenant: str = "default") -> SessionRecord:
    session = replace(SESSION.session, session_id=session_id, tenant=tenant)
    return replace(SESSION, sandbox=sandbox, session=session)


def timeless(record: SessionRecord) -> SessionRecord:
    """Without the time of last use on the monotonic clock, which some stores do not keep."""
    return replace(record, boot="", used_at=0.0)


async def check_next_life(open_store: Open) -> None:
    store = await open_store()
    await store.trust()
    await store.insert_session(SESSION)
    await store.insert_run(RUN, 10)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    store.finish_run(replace(ENDED, run_id="r2"))
    await store.close()
    store = await open_store()
    assert [timeless(record) for record in await store.sessions()] == [timeless(SESSION)]
    assert await store.runs("s1") == [RUN, replace(ENDED, run_id="r2")]
    assert await store.runs("s1", unfinished=True) == [RUN]
    assert store.known
    await store.close()


async def check_names(open_store: Open) -> None:
    """Of living sessions a name is given once."""
    store = await open_store()
    await store.insert_session(SESSION)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.insert_session(make_session("s2"))
    await store.insert_session(make_session("s3", tenant="other"))
    await store.end_session("s1", "destroyed", 5.0, keep_runs=False)
    await store.insert_session(make_session("s2"))
    await store.close()


async def check_gone_sessions(open_store: Open) -> None:
    """The memory of them is bounded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8e.core.store.store.KEPT_SESSIONS", 3)
        store = await open_store()
        await store.insert_session(make_session("alive", "alive"))
        for number in range(6):
            session = make_session(f"s{number}")
            await store.insert_session(replace(session, session=replace(session.session, created=2.0 + number)))
            await store.insert_run(replace(RUN, run_id=f"r{number}", sandbox=f"s{number}"), 10)
            await store.end_session(f"s{number}", "lost", 5.0, keep_runs=True)
        for _ in range(2):
            assert [record.sandbox for record in await store.sessions()] == ["alive", "s3", "s4", "s5"]
            assert await store.find_run("r2") is None
            lost = await store.find_run("r3")
            assert lost is not None
            assert (lost.status, lost.finished) == (Status.LOST, 5.0)
            assert [record.sandbox for record in await store.ended_sessions(Caller(1000))] == ["s3", "s4", "s5"]
            assert await store.ended_sessions(Caller(1001)) == []
            await store.close()
            store = await open_store()
        await store.close()


async def check_failed_write(open_store: Open) -> None:
    """It leaves nothing, and the next one works."""
    store = await open_store()
    await store.insert_session(SESSION)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await store.insert_session(SESSION)
    await store.insert_session(make_session("s2", "two"))
    assert [record.sandbox for record in await store.sessions()] == ["s1", "s2"]
    await store.close()


async def check_cancelled_caller(open_store: Open) -> None:
    """It does not take the write along."""
    store = await open_store()
    task = asyncio.create_task(store.insert_session(SESSION))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.sandbox for record in await store.sessions()] == ["s1"]
    await store.close()
    store = await open_store()
    assert [record.sandbox for record in await store.sessions()] == ["s1"]
    await store.close()


async def check_phases(open_store: Open) -> None:
    """Each step of a session's life is there in the next one's."""
    hosts = HostList.parse(["*.b.example", "a.example:443"])
    store = await open_store()
    await store.insert_session(SESSION)
    await store.set_phase("s1", Phase.ACTIVE)
    await store.set_hosts("s1", hosts)
    await store.insert_run(ENDED, 10)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    await store.stop_session("s1", "stopped", 7.0)
    for number in range(2):
        (found,) = await store.sessions()
        assert (found.session.phase, found.reason, found.session.hosts) == (Phase.STOPPED, "stopped", hosts), number
        ended, lost = await store.runs("s1")
        assert (ended.kept_stdout, ended.truncated) == (None, True)
        assert (lost.status, lost.finished) == (Status.LOST, 7.0)
        await store.close()
        store = await open_store()
    await store.start_session("s1", ["A"], ["S"], emulated=True)
    await store.close()
    store = await open_store()
    found = await store.find_session("s1") or SESSION
    assert (found.session.phase, found.session.env_keys, found.session.secret_keys) == (Phase.ACTIVE, ("A",), ("S",))
    await store.forget_session("s1")
    await store.close()
    store = await open_store()
    assert (await store.sessions(), await store.runs("s1")) == ([], [])
    await store.close()


async def check_uses(open_store: Open) -> None:
    store = await open_store()
    await store.insert_session(SESSION)
    await store.set_used([("s1", 20.5, 30.5), ("unknown", 1.0, 1.0)])
    (found,) = await store.sessions()
    assert (found.session.last_used, found.used_at) == (20.5, 30.5)
    await store.rebase("s1", "later", 1.5)
    (found,) = await store.sessions()
    assert (found.boot, found.used_at) == ("later", 1.5)
    await store.close()


async def check_background_runs(open_store: Open) -> None:
    """Those that a caller was told of are there after a crash; a run that was withdrawn is not."""
    store = await open_store()
    await store.insert_session(SESSION)
    await store.insert_run(replace(RUN, command=None), 10)
    store.set_command("r1", 5, 1)
    await store.insert_run(replace(RUN, run_id="r2"), 10)
    store.forget_run("r2")
    await store.secure("s1")
    crashed = store
    store = await open_store()
    assert await store.runs("s1") == [replace(RUN, command=5, oom_before=1)]
    assert await store.find_run("r2") is None
    await store.close()
    await crashed.close()


async def check_outputs(open_store: Open) -> None:
    store = await open_store()
    await store.insert_session(SESSION)
    for name in ("r1", "r2"):
        await store.insert_run(replace(RUN, run_id=name), 10)
        store.finish_run(replace(ENDED, run_id=name))
    await store.forget_output(["r1"])
    await store.close()
    store = await open_store()
    assert [(run.kept_stdout, run.truncated) for run in await store.runs("s1")] == [(None, True), (5, False)]
    await store.close()


async def check_runs_kept(open_store: Open) -> None:
    store = await open_store()
    await store.insert_session(SESSION)
    for number in range(6):
        run = replace(RUN, run_id=f"r{number}")
        await store.insert_run(run, 3)
        store.finish_run(replace(ENDED, run_id=f"r{number}", kept_stdout=None))
    await store.insert_run(replace(RUN, run_id="last"), 3)
    assert [run.run_id for run in await store.runs("s1")] == ["r4", "r5", "last"]
    await store.close()


async def check_warm(open_store: Open) -> None:
    """A warm sandbox becomes a session's in one step."""
    store = await open_store()
    await store.insert_warm(WARM)
    await store.insert_warm(replace(WARM, sandbox="w2"))
    await store.insert_warm(replace(WARM, sandbox="w3"))
    await store.set_ready("w1", True)
    await store.forget_warm("w3")
    await store.close()
    store = await open_store()
    assert await store.warm() == [replace(WARM, ready=True), replace(WARM, sandbox="w2")]
    await store.claim_warm(make_session("w1"))
    await store.close()
    store = await open_store()
    assert [record.sandbox for record in await store.warm()] == ["w2"]
    assert [record.sandbox for record in await store.sessions()] == ["w1"]
    await store.close()


async def check_images(open_store: Open) -> None:
    image = ImageRecord(1000, "default", "docker.io/library/alpine:3", "sha256:1", 1.0, 2.0)
    store = await open_store()
    await store.put_image(image)
    await store.put_image(replace(image, digest="sha256:2"))
    await store.put_image(replace(image, tenant="other"))
    await store.forget_images([replace(image, tenant="other")])
    await store.close()
    store = await open_store()
    assert await store.images() == [replace(image, digest="sha256:2")]
    assert await store.find_image(1000, "default", "sha256:2") == replace(image, digest="sha256:2")
    await store.use_image(image, 9.0)
    assert [each.last_used for each in await store.images()] == [9.0]
    await store.close()


async def check_approvals(open_store: Open) -> None:
    """One is settled once; of the settled ones the latest stay."""
    store = await open_store()
    await store.insert_session(SESSION)
    for number in range(1, 5):
        await store.insert_approval(replace(APPROVAL, approval_id=f"appr-{number}"), 2)
        if number < 4:
            settled = replace(APPROVAL, approval_id=f"appr-{number}", status=ApprovalStatus.APPROVED, answerer="root")
            assert await store.settle_approval(settled)
            assert not await store.settle_approval(replace(settled, status=ApprovalStatus.REJECTED))
    await store.close()
    store = await open_store()
    assert await store.approvals(pending=True) == [replace(APPROVAL, approval_id="appr-4")]
    assert [found.approval_id for found in await store.approvals(pending=False)] == ["appr-3", "appr-4"]
    third = await store.find_approval("appr-3")
    assert third is not None
    assert (third.status, third.answerer) == (ApprovalStatus.APPROVED, "root")
    await store.close()


CHECKS: Final[list[Check]] = [
    check_next_life,
    check_names,
    check_gone_sessions,
    check_failed_write,
    check_cancelled_caller,
    check_phases,
    check_uses,
    check_background_runs,
    check_outputs,
    check_runs_kept,
    check_warm,
    check_images,
    check_approvals,
]
