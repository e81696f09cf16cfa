"""Sandboxes for tests: launched, linked, and with a hand on the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devel.sandboxes import Launched, Variation, find_runsc, launch_bare, launch_gvisor
from k8e.conformance import Subject
from k8e.link import AgentLink
from k8e.link.dial import UnixDialer
from k8e.link.model import ExecSpec, Identity

USER = Identity(uid=20_001, gid=20_001)
PATH = (b"PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
KINDS = ("bare", "gvisor")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces without a user namespace need root")


@contextlib.contextmanager
def launch(kind: str, variation: Variation | None = None) -> Iterator[Launched]:
    if os.geteuid() != 0:
        pytest.skip("namespaces without a user namespace need root")
    if kind == "gvisor" and find_runsc() is None:
        pytest.skip("runsc is not installed")
    with launch_gvisor() if kind == "gvisor" else launch_bare(variation) as launched:
        yield launched


class CuttableDialer:
    """Dials the agent's socket, and can cut what it dialled. It is the conformance suite's `LinkControl`."""

    def __init__(self, path: Path) -> None:
        self._dial = UnixDialer(path)
        self._connection: socket.socket | None = None
        self._held = False

    async def __call__(self) -> socket.socket:
        if self._held:
            raise ConnectionRefusedError("the test holds the line")
        self._connection = await self._dial()
        return self._connection

    async def drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # closed by its owner already
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection = None

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        self._held = True
        try:
            await self.drop()
            yield
        finally:
            self._held = False


@dataclass(frozen=True, slots=True)
class Linked:
    """A sandbox, the link to its agent, and the dialer under that."""

    launched: Launched
    link: AgentLink
    dialer: CuttableDialer

    async def run_as_root(self, *argv: str | bytes) -> bytes:
        """With all of the agent's capabilities, for what tests arrange around a check."""
        words = tuple(word.encode() if isinstance(word, str) else word for word in argv)
        done = await self.link.run(ExecSpec(words, env=(PATH,), keep_capabilities=True, stdin=False))
        assert done.outcome.exit_code == 0, done
        return done.stdout

    async def subject(self, name: str) -> Subject:
        """The sandbox with an empty directory for one check."""
        directory = b"/workspace/" + name.encode()
        owner = ["-o", str(USER.uid), "-g", str(USER.gid)]
        await self.run_as_root("install", "-d", "-m", "0777", *owner, directory)
        return Subject(
            sandbox=self.link,
            directory=directory,
            user=USER,
            link=self.dialer,
            small=b"/small",
            read_only=b"/usr",
            # gVisor's inotify has no limit, so nothing is ever lost there.
            inotify_limit=inotify_limit() if self.launched.kind == "bare" else None,
        )

    async def clean(self, subject: Subject) -> None:
        """The check's directory goes, and the agent must be alone again: checks leave no process behind."""
        await self.run_as_root("rm", "-rf", subject.directory)
        await asyncio.wait_for(self.wait_until_alone(), timeout=10)

    async def wait_until_alone(self) -> None:
        while others := await self.processes():
            assert others, "unreachable"

    async def processes(self) -> list[int]:
        """What else runs in the sandbox, by the file operations of the agent itself: no process looks."""
        entries = await self.link.list_dir(b"/proc")
        return [int(entry.name) for entry in entries if entry.name.isdigit() and entry.name != b"1"]


def inotify_limit() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@contextlib.asynccontextmanager
async def open_sandbox(kind: str, variation: Variation | None = None) -> AsyncIterator[Linked]:
    with launch(kind, variation) as launched:
        dialer = CuttableDialer(launched.socket)
        async with await AgentLink.open(dialer, instance=launched.instance, deadline=30.0) as link:
            yield Linked(launched, link, dialer)
