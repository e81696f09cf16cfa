"""Sandboxes for tests: launched, linked, and with a hand on the connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from devel.sandboxes import POD_AGENT, Launched, Variation, find_runsc, launch_bare, launch_gvisor
from k8e.conformance import Subject
from k8e.link import AgentLink
from k8e.link.dial import Dialer, Sealed, UnixDialer
from k8e.link.model import ExecSpec, Identity, Sandbox
from k8e.link.noise import GatewayKey, PodDialer

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

    def __init__(self, dial: Dialer) -> None:
        self._dial = dial
        self._connection: socket.socket | None = None
        self._held = False

    async def __call__(self) -> socket.socket | Sealed:
        if self._held:
            raise ConnectionRefusedError("the test holds the line")
        dialled = await self._dial()
        self._connection = dialled if isinstance(dialled, socket.socket) else dialled.socket
        return dialled

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
        await wait_until_alone(self.link)


async def wait_until_alone(sandbox: Sandbox) -> None:
    """Until the agent is its sandbox's only process, by the agent's own file operations: no process looks."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 30
    while others := [
        entry.name for entry in await sandbox.list_dir(b"/proc") if entry.name.isdigit() and entry.name != b"1"
    ]:
        assert loop.time() < until, f"processes were left behind: {others}"


def inotify_limit() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


@contextlib.asynccontextmanager
async def open_sandbox(kind: str, variation: Variation | None = None) -> AsyncIterator[Linked]:
    key = GatewayKey.generate()
    if kind == "pod":
        variation = Variation(agent=POD_AGENT, gateway=key.public)
    with launch(kind, variation) as launched:
        plain = UnixDialer(launched.socket)
        uid = str(uuid.UUID(bytes=launched.instance))
        dialer = CuttableDialer(PodDialer("127.0.0.1", launched.port, uid=uid, key=key) if kind == "pod" else plain)
        async with await AgentLink.open(dialer, instance=launched.instance, deadline=30.0) as link:
            yield Linked(launched, link, dialer)
