"""Floods of lines from sandboxes and strangers: counted, bounded, and never in the place of what people did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k8e.core.log.metrics import Metrics
from k8e.core.log.refusal_log import BURST, EVERY, NAME, PEERS_BURST, SOURCES, SUMMARY, RefusalLog
from k8e.engine import Refusal
from k8e.settings import AuditSettings, Settings
from tests.core.rig import ALICE, ManualClock, open_rig
from tests.sandboxes import needs_root

SMALL = AuditSettings(size=64 << 10, files=4)  # room for the lines that the rate lets through in 90 minutes


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """All files of one log, oldest first."""
    files = sorted(folder.glob(f"{name}*"), key=lambda file: -int(file.name.removeprefix(name).strip(".") or 0))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def count(lines: list[dict[str, Any]], event: str) -> int:
    return sum(line["event"] == event for line in lines)


@needs_root
async def test_a_sandbox_that_asks_for_ever_pushes_no_other_out(folder: Path) -> None:
    clock, asked = ManualClock(), 0
    async with open_rig(folder, clock, Settings(audit=SMALL)) as rig:
        session = await rig.create()
        sandbox = rig.sandbox_of(session)
        for _ in range(90):  # minutes, in each of which it asks for a thousand names
            for _ in range(1000):
                asked += 1
                rig.engine.refuse(sandbox, Refusal(f"name-{asked}.test", "", 443, "name_not_listed", clock.wall()))
            clock.advance(60)
            await rig.service._observer.observe_some(list(rig.service._registry))
            rig.service._parts.refusals.review()
        await rig.service.sessions.destroy(ALICE, session)
    done = [line["event"] for line in read(folder, "audit.log")]
    assert done == ["daemon_started", "session_created", "session_ended", "daemon_stopped"]
    lines = read(folder, NAME)
    assert count(lines, "refused") + sum(line["count"] for line in lines if line["event"] == "refused_more") == asked
    assert count(lines, "refused") <= BURST + 90 * 60 / EVERY
    (last,) = [line for line in lines if line["event"] == "refused_more"][-1:]
    assert (last["session"], last["sandbox"]) == (session, sandbox)


async def test_strangers_have_a_rate_each_and_one_together(tmp_path: Path) -> None:
    clock = ManualClock()
    log = RefusalLog(tmp_path / "audit.log", AuditSettings(), Metrics(), clock)
    for number in range(3 * PEERS_BURST):
        source = f"192.0.2.{number % 200}"
        log.note("access_refused", source, {"source": source}, peer=True, call="Login")
    log.note("refused", "sandbox", {"sandbox": "one"}, host="a.test")
    clock.advance(SUMMARY)
    log.review()
    await log.close()
    lines = read(tmp_path, NAME)
    assert count(lines, "access_refused") == PEERS_BURST
    assert sum(line["count"] for line in lines if line["event"] == "access_refused_more") == 2 * PEERS_BURST
    assert count(lines, "refused") == 1, "a sandbox's lines are not the strangers' to use up"


async def test_more_sources_than_can_be_told_apart_are_one(tmp_path: Path) -> None:
    log = RefusalLog(tmp_path / "audit.log", AuditSettings(), Metrics(), ManualClock())
    for number in range(SOURCES + 3 * BURST):
        log.note("refused", f"sandbox-{number}", {"sandbox": f"sandbox-{number}"})
    await log.close()
    lines = read(tmp_path, NAME)
    assert len({line.get("sandbox") for line in lines} - {None}) == SOURCES
    (more,) = (line for line in lines if line["event"] == "refused_more")
    assert (more["source"], more["count"]) == ("others", 2 * BURST)


async def test_a_source_that_calms_down_has_lines_again(tmp_path: Path) -> None:
    clock = ManualClock()
    log = RefusalLog(tmp_path / "audit.log", AuditSettings(), Metrics(), clock)
    for _ in range(2):
        for number in range(BURST):
            log.note("refused", "sandbox", {"sandbox": "one"}, number=number)
        clock.advance(BURST * EVERY)
    await log.close()
    assert count(read(tmp_path, NAME), "refused") == 2 * BURST


async def test_strangers_take_no_place_of_a_sandbox(tmp_path: Path) -> None:
    log = RefusalLog(tmp_path / "audit.log", AuditSettings(), Metrics(), ManualClock())
    for number in range(SOURCES + 1):
        log.note("access_refused", f"address-{number}", {"source": f"address-{number}"}, peer=True, call="Login")
    for number in range(2):
        log.note("refused", f"sandbox-{number}", {"sandbox": f"sandbox-{number}"}, host="a.test")
    await log.close()
    told = [line.get("sandbox") for line in read(tmp_path, NAME) if line["event"] == "refused"]
    assert told == ["sandbox-0", "sandbox-1"]
