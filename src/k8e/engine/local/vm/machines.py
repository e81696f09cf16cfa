"""How to reach the agents of sandboxes, and what the guests of virtual machines tell of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Final

from k8e.engine import EngineError, Runtime
from k8e.engine.local.layout import Layout
from k8e.engine.local.record import Record, Records
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.vm import firecracker
from k8e.engine.local.vm.bundle import CONTROL_PORT, PORTS
from k8e.engine.local.vm.control import Control
from k8e.engine.local.vm.firecracker import AGENT_PORT, VSOCK_SOCKET, VsockDialer
from k8e.engine.local.vm.runtime import EMULATION_DEADLINE
from k8e.link import AgentLink
from k8e.link.dial import Dialer, PlainDialer, PortDialer, UnixDialer
from k8e.link.errors import ProtocolViolation

_VIRTUAL: Final = (Runtime.KATA.value, Runtime.FIRECRACKER.value)
_GREETING: Final = b"K8E-VM1\n"
_DEADLINE: Final = 10.0  # of other sandboxes, until their agent answers

# An agent that is just being started makes its socket within some milliseconds. The link's own pauses between attempts
# grow: by themselves they would double that time.
_LOOK: Final = 0.001
_LOOKS: Final = 100


async def _wait_for_socket(socket: Path) -> None:
    for _ in range(_LOOKS):
        if os.path.lexists(socket):  # noqa: ASYNC240 - a look at a local filesystem, sooner than a thread could be told
            break
        await asyncio.sleep(_LOOK)


class _LivingDialer:
    """Gives up when the machine is gone: its sockets stay behind, and would be tried until the deadline."""

    def __init__(self, dialer: PlainDialer, sandbox: str, cgroups: Cgroups) -> None:
        self._dialer = dialer
        self._sandbox = sandbox
        self._cgroups = cgroups

    async def __call__(self) -> socket.socket:
        if not self._cgroups.alive(self._sandbox):
            raise ProtocolViolation("the virtual machine has ended")
        try:
            return await self._dialer()
        except FileNotFoundError as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the VMM has not made its sockets yet") from error


class Machines:
    def __init__(self, layout: Layout, records: Records, cgroups: Cgroups) -> None:
        self._layout = layout
        self._records = records
        self._cgroups = cgroups
        self._controls: dict[str, Control | None] = {}  # None: it is no virtual machine

    async def open_link(self, sandbox: str, starting: Record | None = None) -> AgentLink:
        """`starting`: the record of one that is just being started."""
        record = starting
        if record is None:
            record = await asyncio.to_thread(self._records.load, sandbox)
        elif record.runtime not in _VIRTUAL:
            await _wait_for_socket(self._layout.sandbox(sandbox).socket)
        dialer, deadline = self.dialer_of(sandbox, record)
        return await AgentLink.open(dialer, instance=bytes.fromhex(record.instance), deadline=deadline)

    def dialer_of(self, sandbox: str, record: Record) -> tuple[Dialer, float]:
        paths = self._layout.sandbox(sandbox)
        self._find_control(sandbox, record)  # the first command need not read the record for it
        if record.runtime not in _VIRTUAL:
            return UnixDialer(paths.socket), _DEADLINE
        if record.runtime == Runtime.FIRECRACKER.value:
            return self._living(sandbox, VsockDialer(paths.link / VSOCK_SOCKET, AGENT_PORT)), EMULATION_DEADLINE
        ports = [port for port in range(1, PORTS + 1) if port != CONTROL_PORT]
        return self._living(sandbox, PortDialer(paths.link, ports, _GREETING)), EMULATION_DEADLINE

    def _living(self, sandbox: str, dialer: PlainDialer) -> Dialer:
        return _LivingDialer(dialer, sandbox, self._cgroups)

    async def _control(self, sandbox: str) -> Control | None:
        if sandbox not in self._controls:
            try:
                record = await asyncio.to_thread(self._records.load, sandbox)
            except (FileNotFoundError, EngineError):
                return None
            self._find_control(sandbox, record)
        return self._controls[sandbox]

    def _find_control(self, sandbox: str, record: Record) -> None:
        if sandbox not in self._controls:
            self._controls[sandbox] = self._make_control(sandbox, record.runtime)

    def _make_control(self, sandbox: str, runtime: str) -> Control | None:
        link = self._layout.sandbox(sandbox).link
        if runtime == Runtime.FIRECRACKER.value:
            return Control(VsockDialer(link / VSOCK_SOCKET, firecracker.CONTROL_PORT))
        return Control(UnixDialer(link / f"{CONTROL_PORT}.sock")) if runtime in _VIRTUAL else None

    async def count_kills(self, sandbox: str) -> int:
        """Those that the guest's own kernel made, for want of memory."""
        control = await self._control(sandbox)
        return await control.count_kills() if control else 0

    async def set_clock(self, sandbox: str) -> None:
        if control := await self._control(sandbox):
            await control.set_clock()

    async def boot_trace(self, sandbox: str) -> str:
        """When the guest's first process reached which step, in microseconds since the start of its kernel."""
        control = await self._control(sandbox)
        return control.trace if control else ""

    async def halt(self, sandbox: str) -> None:
        """Before a machine that runs is stopped: what its kernel has not written yet reaches the disk. One that does
        not answer loses that, and its journal the rest does not."""
        if self._cgroups.alive(sandbox) and (control := await self._control(sandbox)):
            with contextlib.suppress(OSError):
                await control.halt()

    def forget(self, sandbox: str) -> None:
        self._controls.pop(sandbox, None)
