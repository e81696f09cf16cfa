"""Things put on the machine for a moment that no sandbox must be able to see, and a sandbox to look for them in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e.engine import Limits, Observation, Place, Runtime
from k8e.engine.local.doctor.far_end import FarEnd
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.link.model import AGENT, ByteReader, Cause, ExecSpec, Identity, Sandbox
from k8e.policy import HostList

_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
_PREFIX = "k8e-decoy-"
_PATH = (b"PATH", b"/usr/sbin:/usr/bin:/sbin:/bin")
_KEPT = 1 << 20  # of a command's output


@dataclass(frozen=True, slots=True)
class Decoys:
    token: str  # the name of a file in several places, and an argument of a process
    port: int  # of a listener on the machine's loopback


@contextlib.asynccontextmanager
async def plant_decoys(*folders: Path) -> AsyncIterator[Decoys]:
    await asyncio.to_thread(_remove_forgotten)
    token = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    with (
        _plant_files(token, [*folders, *_FOLDERS]),
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener,
    ):
        # Waits for a line that never comes, and ends with its input: also when we are killed.
        process = await asyncio.create_subprocess_exec("sh", "-c", "read line", token, stdin=asyncio.subprocess.PIPE)
        try:
            yield Decoys(token, listener.getsockname()[1])
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


@contextlib.contextmanager
def _plant_files(token: str, folders: Sequence[Path]) -> Iterator[None]:
    planted = []
    try:
        for folder in folders:
            with contextlib.suppress(OSError):
                (folder / token).write_text("a file of the machine\n")
                planted.append(folder / token)
        yield
    finally:
        for path in planted:
            path.unlink(missing_ok=True)


def _remove_forgotten() -> None:
    """Those of somebody who was killed before removing them."""
    for path in (path for folder in _FOLDERS for path in folder.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{owner}"):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Finished:
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
    far: FarEnd | None = None  # None: there is nobody to reach

    @property
    def native(self) -> bool:
        return self.runtime is Runtime.NATIVE

    async def run(
        self, *argv: str, user: Identity | None = None, strongest: bool = False, seconds: float | None = None
    ) -> Finished:
        """As the default user; `strongest`: with the agent's own powers, more than which nobody inside can get."""
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
        return Finished(outcome.exit_code, outcome.cause, stdout, stderr)

    async def status_of_command(self, user: Identity) -> dict[str, str]:
        """/proc/self/status, as a command finds it."""
        return parse_status((await self.run("cat", "/proc/self/status", user=user)).stdout)

    def statuses_on_machine(self) -> list[dict[str, str]]:
        """The same of everything that runs for this sandbox, as the machine sees it."""
        found = []
        for pid in Cgroups(self.group).processes(self.name):
            with contextlib.suppress(OSError):
                found.append(parse_status(Path(f"/proc/{pid}/status").read_text()))
        return found

    async def processes(self) -> set[int]:
        """Everything that a sandbox's /proc shows, seen by the agent: no process has to look."""
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
