"""The runtimes that are virtual machines, whose VMMs a native OCI runtime confines (bundle.py), and `kata`: QEMU."""

from __future__ import annotations

import asyncio
import os
import platform
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from k8e.engine import EngineError, Runtime
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.runtime.runtime import OciRuntime, find_runtimes
from k8e.engine.local.system.calls import opened
from k8e.engine.local.system.tool import find_tool, run_tool
from k8e.engine.local.vm.guest import GUEST_FOLDER, Guest, load_guest

QEMU: Final = "qemu-system-x86_64"
KVM: Final = Path("/dev/kvm")
KVM_DEADLINE: Final = 10.0  # from the start to the agent; where it does not work it hangs
EMULATION_DEADLINE: Final = 120.0  # of each boot
_LOG_TAIL: Final = 2000
_EMULATION_HINT: Final = "emulation is some ten times slower: allow it with emulation = true under [runtimes.kata]"


@dataclass(frozen=True, slots=True)
class VmRuntime:
    name: Runtime
    binary: str  # the VMM
    container: OciRuntime  # what confines it
    guest: Guest
    accelerator: str
    ways: tuple[str, ...]  # all accelerators that are to be tried

    @property
    def flags(self) -> tuple[str, ...]:
        return self.container.binary, self.guest.digest, self.accelerator

    @property
    def note(self) -> str:
        how = "emulated, without the processor's help: some ten times slower" if self.emulated else "KVM"
        return f"{how}; guest: {self.guest.version}"

    @property
    def native(self) -> bool:
        return False

    @property
    def own_ids(self) -> bool:
        return True

    @property
    def emulated(self) -> bool:
        return self.accelerator == "tcg"

    @property
    def patience(self) -> float:
        """Within which one that is tried has run a command. Emulated, it may have to be booted twice (silence.py)."""
        return 2 * EMULATION_DEADLINE if self.emulated else KVM_DEADLINE

    def variants(self) -> Sequence[VmRuntime]:
        return [replace(self, accelerator=each) for each in self.ways]

    async def version(self) -> str:
        text = await run_tool(self.binary, "--version", capture=True)
        return text.splitlines()[0].strip() if text else ""

    async def start(self, layout: Layout, sandbox: str, paths: SandboxPaths, stdin: int) -> None:
        """Returns when the VMM runs."""
        confined = replace(self.container, name=self.name)
        try:
            await confined.start(layout, sandbox, paths, 60.0, set_ids=True, stdin=stdin)
        except EngineError as error:
            raise EngineError(self.name.value, error.cause) from error


@dataclass(frozen=True, slots=True)
class VmOptions:
    guest: Path = GUEST_FOLDER
    emulation: bool = False  # allowed where the processor does not help
    kvm: Path = KVM


USUAL_VMS: Final = VmOptions()


async def find_container(control: str, confined: str) -> OciRuntime:
    containers = await find_runtimes(Runtime.NATIVE)
    if not containers:
        raise EngineError(control, f"runc, which confines {confined}, is not installed", "apt-get install runc")
    # runc: crun refuses mixed hierarchies of control groups.
    return next((each for each in containers if os.path.basename(each.binary) == "runc"), containers[0])


async def find_kata(options: VmOptions) -> Sequence[VmRuntime]:
    """EngineError says what is missing."""
    if platform.machine() != "x86_64":
        raise EngineError("runtime kata", f"there is no guest for {platform.machine()} yet")
    qemu = find_tool(QEMU)
    if qemu is None:
        raise EngineError("runtime kata", f"{QEMU} is not installed", "apt-get install qemu-system-x86")
    container = await find_container("runtime kata", "QEMU")
    guest = await asyncio.to_thread(load_guest, options.guest)
    ways = [*(["kvm"] if options.kvm.exists() else []), *(["tcg"] if options.emulation else [])]
    if not ways:
        raise EngineError("runtime kata", f"there is no {options.kvm}", _EMULATION_HINT)
    return [VmRuntime(Runtime.KATA, qemu, container, guest, ways[0], tuple(ways))]


def explain_end(paths: SandboxPaths) -> str:
    """Returns what the VMM and the guest said last: text for people, which a hostile guest may have written."""
    said = []
    for name in ("log", "console"):
        try:
            # A VMM that was taken over may have put a link or a pipe there.
            with opened(paths.link / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode):
                    tail = os.pread(file, _LOG_TAIL, max(0, status.st_size - _LOG_TAIL))
                    said.append(tail.decode(errors="replace").strip())
        except OSError:
            continue
    return "; ".join(filter(None, said))[-_LOG_TAIL:]
