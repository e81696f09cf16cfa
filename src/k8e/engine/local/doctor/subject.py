"""A sandbox whose controls the doctor tries."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from k8e.engine import Limits, Observation, Place, Runtime
from k8e.engine.local.doctor.decoys import Decoys
from k8e.engine.local.doctor.remote_host import RemoteHost
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.link.model import AGENT, ByteReader, Cause, ExecSpec, Identity, Sandbox
from k8e.policy import HostList

_PATH = (b"PATH", b"/usr/sbin:/usr/bin:/sbin:/bin")
_KEPT = 1 << 20  # bytes of a command's output


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int | None
    cause: Cause
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A sandbox whose controls are tried."""

    name: str
    runtime: Runtime
    limits: Limits
    sandbox: Sandbox
    place: Place
    decoys: Decoys
    group: str  # which its control groups are below
    observe: Callable[[], Awaitable[Observation]]
    set_egress: Callable[[HostList], Awaitable[None]]
    remote: RemoteHost | None = None  # None: there is no host to reach

    @property
    def native(self) -> bool:
        return self.runtime is Runtime.NATIVE

    async def run(
        self, *argv: str, user: Identity | None = None, strongest: bool = False, seconds: float | None = None
    ) -> CommandResult:
        """Runs a command as the default user; `strongest`: with the agent's own powers, the most that a process inside
        can have."""
        process = await self.sandbox.start(
            ExecSpec(
                tuple(map(os.fsencode, argv)),
                env=(_PATH,),
                cwd=self.place.workspace,
                identity=AGENT if strongest else user or self.place.user,
                keep_capabilities=strongest,
                stdin=False,
                timeout=seconds,
                grace=0.0,
            )
        )
        stdout, stderr = await asyncio.gather(_read_all(process.stdout), _read_all(process.stderr))
        outcome = await process.wait()
        return CommandResult(outcome.exit_code, outcome.cause, stdout, stderr)

    async def status_of_command(self, user: Identity) -> dict[str, str]:
        """Reads /proc/self/status in a command."""
        return parse_status((await self.run("cat", "/proc/self/status", user=user)).stdout)

    def statuses_on_machine(self) -> list[dict[str, str]]:
        """Reads the same of every process of this sandbox, on the machine."""
        found = []
        for pid in Cgroups(self.group).processes(self.name):
            with contextlib.suppress(OSError):
                found.append(parse_status(Path(f"/proc/{pid}/status").read_text()))
        return found

    async def processes(self) -> set[int]:
        """Lists the processes in the sandbox's /proc, by the agent: no process is started for it."""
        entries = await self.sandbox.list_dir(b"/proc")
        return {int(entry.name) for entry in entries if entry.name.isdigit()}


async def _read_all(reader: ByteReader) -> str:
    kept = bytearray()
    while data := await reader.read():
        kept += data[: max(0, _KEPT - len(kept))]
    return kept.decode(errors="replace")


def parse_status(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
