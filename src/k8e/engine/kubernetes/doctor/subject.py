"""A sandbox in which the doctor tries things."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from k8e.engine import Place
from k8e.link.errors import NotStarted
from k8e.link.model import ByteReader, ExecSpec, Sandbox
from k8e.link.noise import AGENT_PORT

_KEPT = 64 << 10  # bytes of a command's output
_SECONDS = 6  # for a connection that is dropped on its way

# Programs that connect to a port and end with 0 when they could, by the tool that they need: an image may have any of
# these, or none.
_CONNECT = (
    ("python3", "-c", f"import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), {_SECONDS})"),
    ("bash", "-c", "exec 3<>/dev/tcp/$0/$1"),
    ("nc", "-z", "-w", str(_SECONDS)),
    ("busybox", "nc", "-z", "-w", str(_SECONDS)),
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    sandbox: Sandbox
    place: Place
    address: str  # of its pod

    async def run(self, *argv: str) -> CommandResult:
        process = await self.sandbox.start(
            ExecSpec(
                tuple(map(os.fsencode, argv)),
                env=tuple(self.place.env),
                cwd=b"/",
                identity=self.place.user,
                stdin=False,
                timeout=_SECONDS + 2.0,
                grace=0.0,
            )
        )
        stdout, stderr = await asyncio.gather(_read_all(process.stdout), _read_all(process.stderr))
        outcome = await process.wait()
        return CommandResult(outcome.exit_code, stdout, stderr)

    async def find_client(self) -> tuple[str, ...] | None:
        """A program of its image that can connect: it reaches the sandbox's own agent, whatever the network's rules."""
        for client in _CONNECT:
            with contextlib.suppress(NotStarted):
                if (await self.run(*client, self.address, str(AGENT_PORT))).exit_code == 0:
                    return client
        return None


async def _read_all(reader: ByteReader) -> str:
    kept = bytearray()
    while data := await reader.read():
        kept += data[: max(0, _KEPT - len(kept))]
    return kept.decode(errors="replace")
