"""The contract of engines, with the local one on every runtime. Its stand-in passes the same (core/test_engine.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from k8e.engine import SandboxSpec
from k8e.engine.conformance import CHECKS, Check, Subject, run_check
from k8e.engine.local import LocalEngine
from tests.engine.driver import Driver
from tests.engine.rig import Rig
from tests.engine.traces import LEASES, list_table

OWNER = 12_345


def find_wires(rig: Rig, name: str) -> set[str]:
    links = [(path.name, os.readlink(path)) for path in LEASES.glob("*/wire-*")]
    return {path.removeprefix("wire-") for path, text in links if text == f"{rig.engine.layout.tag} {name}"}


def is_allowed(rig: Rig, name: str, address: str) -> bool:
    (wire,) = find_wires(rig, name)
    sets = [each.get("set") or each.get("map") for each in list_table(rig.engine.layout) or ()]
    texts = [json.dumps(one.get("elem", "")) for one in sets if one and one["name"].endswith(f"_{wire}")]
    assert texts, "no set of this wire"
    return any(address in text for text in texts)


@contextlib.asynccontextmanager
async def open_subject(
    rig: Rig, driver: Driver | None, spec: SandboxSpec, again: Callable[[], LocalEngine]
) -> AsyncIterator[Subject]:
    async def in_force(name: str, address: str) -> bool:
        return await asyncio.to_thread(is_allowed, rig, name, address)

    async def have_refused(name: str) -> None:
        room = await rig.enter(name)
        code = "import socket; socket.create_connection(('203.0.113.9', 80), 5)"
        assert (await room.python(code)).outcome.exit_code == 1

    async def kill(name: str) -> None:
        for pid in rig.host_processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def starve(name: str) -> None:
        room = await rig.enter(name)
        await rig.unless_dead(name, room.python("blocks = []\nwhile True: blocks.append(b'x' * (1 << 22))"))

    async def crash(action: str, name: str, seconds: float) -> float:
        assert driver is not None
        answer = await driver.ask(do=action, name=name, after=seconds)
        assert answer["ended"] in ("finished", "killed"), answer
        return float(answer.get("seconds", seconds))

    directory = Path(tempfile.mkdtemp(prefix="k8e-contract-", dir="/tmp"))
    try:
        os.chown(directory, OWNER, OWNER)
        subject = Subject(
            engine=rig.engine,
            spec=spec,
            again=again,
            in_force=in_force,
            have_refused=have_refused,
            kill=kill,
            directory=directory,
            starve=starve,
            crash=crash if driver is not None else None,
        )
        yield subject
        rig.names.update(subject.names)
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
async def subject(rig: Rig, driver: Driver) -> AsyncIterator[Subject]:
    layout = rig.engine.layout
    async with open_subject(rig, driver, rig.spec(), lambda: LocalEngine(layout.state, layout.run)) as subject:
        yield subject


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_contract(subject: Subject, check: Check) -> None:
    assert check.needs <= subject.provides
    await run_check(check, subject)
