"""The conformance suite through the engine, as the default user in the workspace, on every runtime.

A normal run has all of it on gVisor, and natively a share (shares.py): what is Linux's is tried in test_conformance.py
above.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from k8e.conformance import CHECKS, Check, Subject, run_check
from k8e.engine import Limits, Runtime
from k8e.link import UnixDialer
from tests.changes import current_changes
from tests.engine.rig import Rig, Room
from tests.sandboxes import CuttableDialer, inotify_limit, wait_until_alone
from tests.shares import choose

LIMITS = Limits(cpus=2.0, memory=1 << 30, pids=512, disk=512 << 20, inodes=65_536)
GVISOR_LIMITS = replace(LIMITS, memory=2 << 30)  # two hundred interpreters at once take 1.3 GiB there
BULK = 32 << 20
ALWAYS = {"moves", "permissions", "parked"}  # what the root has a part in
SMALL = b"/dev/small"  # /dev is a filesystem of 64 KiB; gVisor makes its own, without a limit of its own


@dataclass(slots=True)
class Shared:
    """One sandbox for all checks; a check that fails may have broken it, so the next one gets a new one."""

    rig: Rig
    dialers: dict[Path, CuttableDialer]
    image: str = "host"
    top: bytes = b"/workspace"  # where checks have their directories
    limits: Limits | None = None
    patience: float = 1.0  # how much longer than usual a check may take
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    room: Room | None = None

    async def enter(self) -> Room:
        limits = self.limits or (LIMITS if self.rig.native else GVISOR_LIMITS)
        room = await self.stack.enter_async_context(self.rig.room(limits, self.image))
        done = await room.as_agent("install", "-d", "-m", "1777", SMALL)
        assert done.outcome.exit_code == 0, done
        return room

    async def subject(self, room: Room, name: str) -> Subject:
        directory = self.top + b"/" + name.encode()
        await room.output("install", "-d", "-m", "0777", directory)
        return Subject(
            sandbox=room.link,
            directory=directory,
            user=room.place.user,
            path=dict(room.place.env)[b"PATH"],
            bulk=BULK,
            link=self.dialers[room.paths.socket],
            small=SMALL if self.rig.runtime is not Runtime.GVISOR else None,
            read_only=b"/usr" if self.image == "host" else None,
            # gVisor's inotify has no limit, so nothing is ever lost there.
            inotify_limit=inotify_limit() if self.rig.native else None,
        )

    async def run(self, check: Check) -> None:
        room, self.room = self.room or await self.enter(), None
        subject = await self.subject(room, check.name)
        assert check.needs <= subject.provides | {"inotify_limit", "small", "read_only"}
        if not check.needs <= subject.provides:
            self.room = room
            pytest.skip(f"{self.rig.runtime.value} has no {', '.join(check.needs - subject.provides)}")
        try:
            await run_check(replace(check, deadline=check.deadline * self.patience), subject)
            await clean(room, subject)
            self.room = room
        finally:
            if self.room is None:
                await self.stack.aclose()


async def clean(room: Room, subject: Subject) -> None:
    """The check's directory goes, and the agent must be alone again: checks leave no process behind."""
    await room.as_agent("rm", "-rf", subject.directory)
    await wait_until_alone(room.link)


@contextlib.asynccontextmanager
async def share(rig: Rig, image: str = "host", top: bytes = b"/workspace") -> AsyncIterator[Shared]:
    dialers: dict[Path, CuttableDialer] = {}

    def make_dialer(path: Path) -> CuttableDialer:
        return dialers.setdefault(path, CuttableDialer(UnixDialer(path)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8e.engine.local.vm.machines.UnixDialer", make_dialer)
        shared = Shared(rig, dialers, image, top)
        async with shared.stack:
            yield shared


@pytest.fixture(scope="module")
async def shared(rig: Rig) -> AsyncIterator[Shared]:
    async with share(rig) as shared:
        yield shared


def always(check: Check) -> bool:
    return check.run.__module__.rpartition(".")[2] in ALWAYS or current_changes().touch_function(check.run)


CASES = [
    (runtime, check)
    for runtime in (Runtime.GVISOR, Runtime.NATIVE)
    for check in (CHECKS if runtime is Runtime.GVISOR else choose(CHECKS, times=2, always=always))
]


@pytest.mark.parametrize(
    ("rig", "check"),
    CASES,
    indirect=["rig"],
    scope="module",  # else pytest makes a sandbox for each check
    ids=[f"{runtime.value}-{check.name}" for runtime, check in CASES],
)
async def test_conformance(shared: Shared, check: Check) -> None:
    await shared.run(check)
