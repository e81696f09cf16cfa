"""The audit log: complete, without secrets, and in no caller's way unless it is required."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from k8e.core.clock import SystemClock
from k8e.core.errors import Kind
from k8e.core.log.audit import Audit, AuditFile
from k8e.core.log.metrics import Metrics
from k8e.core.model import HostsChange, RunSpec, SessionSpec
from k8e.settings import AuditSettings, Settings
from tests.core.rig import ALICE, BOB, fault, open_rig
from tests.sandboxes import needs_root

FULL = Path("/dev/full")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_audit(path: Path, **settings: Any) -> Audit:
    return Audit(path, AuditSettings(**settings), Metrics(), SystemClock())


async def flush(audit: Audit) -> None:
    audit._begin()
    while audit._writing is not None:
        await asyncio.wait({audit._writing})


# The file


def test_a_file_is_ours_alone_and_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for line in (b"one\n", b"two\n"):
        file = AuditFile(path, 1 << 20, 2)
        file.write(line, sync=True)
        file.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b'{"half')
    AuditFile(path, 1 << 20, 2).write(b"whole\n", sync=False)
    assert path.read_bytes() == b'{"half\nwhole\n'


@pytest.mark.parametrize("files", [1, 3])
def test_old_files_move_on_and_the_oldest_goes(tmp_path: Path, files: int) -> None:
    path = tmp_path / "audit.log"
    file = AuditFile(path, 20, files)
    for number in range(8):
        file.write(b"%09d\n" % number, sync=False)
    file.close()
    found = {each.name: [int(line) for line in each.read_text().split()] for each in tmp_path.iterdir()}
    expected = {"audit.log": [6, 7], "audit.log.1": [4, 5], "audit.log.2": [2, 3]}
    assert found == dict(list(expected.items())[:files])


def test_no_link_leads_it_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "audit.log").symlink_to(tmp_path / "elsewhere")
    file = AuditFile(tmp_path / "audit.log", 1 << 20, 2)
    file.write(b"x\n", sync=False)
    file.close()
    assert (tmp_path / "elsewhere").read_bytes() == b""
    assert (tmp_path / "audit.log").read_bytes() == b"x\n"
    (told,) = file.damages.take()
    assert told.path == str(tmp_path / "audit.log")


# The writer


async def test_lines_come_in_order_however_many(tmp_path: Path) -> None:
    audit = make_audit(tmp_path / "audit.log")
    for number in range(3000):
        audit.note("counted", number=number)
        if number % 100 == 0:
            await asyncio.sleep(0)
    await audit.close()
    assert [line["number"] for line in read(tmp_path / "audit.log")] == list(range(3000))


async def test_lines_wait_while_a_thread_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, going_on = make_audit(tmp_path / "audit.log"), threading.Event()
    audit.note("first")
    await flush(audit)
    monkeypatch.setattr(AuditFile, "sync", lambda _: going_on.wait(60))
    syncing = asyncio.create_task(audit.sync())
    await asyncio.sleep(0)
    audit.note("second")
    audit._begin()
    await asyncio.sleep(0)
    assert [line["event"] for line in read(tmp_path / "audit.log")] == ["first"]
    going_on.set()
    await syncing
    await audit.close()
    assert [line["event"] for line in read(tmp_path / "audit.log")] == ["first", "second"]


async def test_what_is_required_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    audit = make_audit(tmp_path / "audit.log", required=True)
    await audit.record("done", number=1)
    assert [line["number"] for line in read(tmp_path / "audit.log")] == [1]
    await audit.close()


async def test_a_full_disk_costs_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.log"
    audit = make_audit(path)
    await audit.record("before")
    await flush(audit)
    with monkeypatch.context() as context:
        context.setattr(os, "write", write_to_full_device)
        for _ in range(3):
            await audit.record("lost")
        await flush(audit)
    audit.note("after")
    await audit.close()
    assert [(line["event"], line.get("count")) for line in read(path)] == [
        ("before", None),
        ("lines_lost", 3),
        ("after", None),
    ]
    assert audit._metrics.audit_lost.get() == 3


def write_to_full_device(descriptor: int, data: bytes) -> int:
    with FULL.open("wb", buffering=0) as full:
        return full.write(data) or 0


async def test_required_and_full_is_a_refusal() -> None:
    audit = make_audit(FULL, required=True)
    with fault(Kind.UNAVAILABLE, "audit_unavailable"):
        await audit.record("wanted")
    await audit.close()


# The service


@needs_root
class TestService:
    async def test_everything_is_there_and_no_secret(self, folder: Path) -> None:
        secret = "s3cr3t"
        async with open_rig(folder) as rig:
            session = await rig.create(spec=SessionSpec(env={"TOKEN": secret}, allowed_hosts=["a.test"]))
            run = RunSpec(session, f"echo {secret}", env={"KEY": secret}, stdin=secret.encode())
            run_id = (await rig.service.runs.run(ALICE, run)).run_id
            await rig.service.sessions.set_hosts(ALICE, session, HostsChange(hosts=["b.test"]))
            with fault(Kind.NOT_FOUND, "session_not_found"):
                await rig.service.sessions.get(BOB, session)
            await rig.service.sessions.destroy(ALICE, session)
        lines = rig.read_audit()
        assert secret not in (folder / "audit.log").read_text()
        assert [line["event"] for line in lines] == [
            "daemon_started",
            "session_created",
            "run_started",
            "run_ended",
            "hosts_changing",
            "hosts_changed",
            "access_refused",
            "session_ended",
            "daemon_stopped",
        ]
        created, started, ended, changing, _, refused, gone = lines[1:8]
        assert (created["caller"], created["tenant"], created["env_keys"]) == ("uid:1000", "default", ["TOKEN"])
        assert (created["runtime"], created["allowed_hosts"]) == ("native", ["a.test"])
        assert (started["run"], started["session"], started["language"]) == (run_id, session, "bash")
        assert (started["code_bytes"], len(started["code_sha256"]), started["env_keys"]) == (11, 64, ["KEY"])
        assert (ended["run"], ended["session"]) == (run_id, session)
        assert (ended["status"], ended["exit_code"]) == ("completed", 0)
        assert (changing["before"], changing["after"]) == (["a.test"], ["b.test"])
        assert (refused["caller"], refused["call"], refused["subject"]) == ("uid:1001", "get", session)
        assert (gone["caller"], gone["reason"]) == ("uid:1000", "destroyed")

    async def test_code_is_there_when_it_is_asked_for(self, folder: Path) -> None:
        async with open_rig(folder, settings=Settings(audit=AuditSettings(code=True))) as rig:
            await rig.run(await rig.create(), "echo hi")
        (started,) = (line for line in rig.read_audit() if line["event"] == "run_started")
        assert started["code"] == "echo hi"

    async def test_when_it_is_required_nothing_is_done_without_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_rig(folder, settings=Settings(audit=AuditSettings(required=True))) as rig:
            session = await rig.create()
            with monkeypatch.context() as context:
                context.setattr(AuditFile, "write", fail_to_write)
                with fault(Kind.UNAVAILABLE, "audit_unavailable"):
                    await rig.run(session, "touch done")
                with fault(Kind.UNAVAILABLE, "audit_unavailable"):
                    await rig.create()
                with fault(Kind.UNAVAILABLE, "audit_unavailable"):
                    await rig.service.sessions.set_hosts(ALICE, session, HostsChange(add=["c.test"]))
                await rig.service.sessions.set_hosts(ALICE, session, HostsChange(hosts=[]))
                assert len(await rig.engine.list()) == 1, "what was not created is gone"
            assert (await rig.run(session, "ls")).stdout == b""
            assert len(await rig.service.runs.list(ALICE, session)) == 1
            assert rig.engine.egress(rig.sandbox_of(session)) == ()
        assert any(line["event"] == "lines_lost" for line in rig.read_audit())

    async def test_when_it_is_not_everything_goes_on(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with open_rig(folder) as rig:
            await flush(rig.service.audit)
            monkeypatch.setattr(AuditFile, "write", fail_to_write)
            session = await rig.create()
            assert (await rig.run(session, "echo hi")).stdout == b"hi\n"
            await rig.service.sessions.destroy(ALICE, session)
            await flush(rig.service.audit)
            assert rig.service.metrics.audit_lost.get() == 4
            assert "k8e_audit_lost_total 4\n" in rig.service.metrics.render()


def fail_to_write(file: AuditFile, content: bytes, *, sync: bool) -> None:
    raise OSError(28, "No space left on device")
