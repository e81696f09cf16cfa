"""OCI runtimes: the two tools that turn a bundle into a running sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from k8e.engine import EngineError, Runtime
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.runtime.host_filter import build_filter
from k8e.engine.local.system.tool import find_tool, run_tool, try_runtime

# Where `make runsc` puts the one it built. On no PATH: only the engine is meant to find it.
OWN_BINARIES = Path("/var/lib/k8e/bin")
_LOG_TAIL = 4096
# gVisor's, the better first: with its own, a sandbox's sockets do not reach the machine's kernel.
_STACKS = {"sandbox": "gVisor's own stack", "host": "the stack of the sandbox's namespace"}
_ROOTS = (Runtime.GVISOR, Runtime.NATIVE, Runtime.KATA)


def _states(layout: Layout) -> Iterator[tuple[str, Path]]:
    """Lists the state files that runtimes keep of sandboxes: runc a directory k8e-NAME, runsc
    k8e-NAME_sandbox:k8e-NAME.state and .lock and a socket runsc-k8e-NAME.sock (a stale one makes it put the next one
    elsewhere on the machine).

    Read and removed here rather than by `runc delete` and `runsc delete`: those cost a process each, and runsc's waits
    for the machine's init to reap its dead, which some inits do only now and then. By then nothing of it lives.
    """
    for runtime in _ROOTS:
        root = layout.runtime_root(runtime.value)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(root):
                stem = name.removeprefix("runsc-").removesuffix(".sock").split("_sandbox:")[0]
                if stem.startswith("k8e-"):
                    yield stem.removeprefix("k8e-"), root / name


def known_sandboxes(layout: Layout) -> set[str]:
    return {sandbox for sandbox, _ in _states(layout)}


def forget_sandbox(layout: Layout, wanted: str) -> None:
    for sandbox, path in list(_states(layout)):
        if sandbox == wanted:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class LocalRuntime(Protocol):
    """A program that sandboxes of this machine are started with: of OCI bundles (below), or of virtual machines."""

    @property
    def name(self) -> Runtime: ...

    @property
    def binary(self) -> str: ...

    @property
    def flags(self) -> tuple[str, ...]:
        """Tells this use of the program from others."""

    @property
    def note(self) -> str:
        """For people."""

    @property
    def native(self) -> bool:
        """Whether commands talk to the machine's kernel."""

    @property
    def own_ids(self) -> bool:
        """Whether its processes have ids of the machine that only this sandbox has."""

    @property
    def emulated(self) -> bool: ...

    def variants(self) -> Sequence[LocalRuntime]:
        """Lists the ways to use it, the best first."""

    async def version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OciRuntime:
    """The program of a runtime. `native`: commands talk to the machine's kernel."""

    name: Runtime
    binary: str
    native: bool
    flags: tuple[str, ...] = ()
    note: str = ""  # for people

    @property
    def own_ids(self) -> bool:
        return self.native

    @property
    def emulated(self) -> bool:
        return False

    def _command(self, layout: Layout, *words: str | Path) -> list[str | Path]:
        return [self.binary, "--root", layout.runtime_root(self.name.value), *self.flags, *words]

    async def start(
        self,
        layout: Layout,
        sandbox: str,
        paths: SandboxPaths,
        deadline: float,
        *,
        set_ids: bool,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Returns when the first process runs. It has no pipe of ours: it would hold it as long as it lives. `set_ids`:
        whether gVisor's processes may give files set-user-id and set-group-id bits. `stdin`: a descriptor for a native
        one's first process."""
        layout.runtime_root(self.name.value).mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.runtime_log.unlink(missing_ok=True)  # of the last time, if it was stopped
        words = ("--log", paths.runtime_log, "--log-format", "json")
        command = self._command(layout, *words, "run", "--detach", "--bundle", paths.bundle, f"k8e-{sandbox}")
        program = None if self.native else build_filter(platform.machine(), set_ids=set_ids)
        finished = await try_runtime(*command, deadline=deadline, program=program, stdin=stdin)
        if finished.status != 0:
            raise EngineError(self.name.value, _last_message(paths.runtime_log) or finished.complaint)

    def variants(self) -> list[OciRuntime]:
        """Lists the ways in which it can give a sandbox its network, the best first."""
        if self.native:
            return [self]
        return [
            replace(self, flags=(*self.flags, f"--network={mode}"), note=f"network: {stack} (--network={mode})")
            for mode, stack in _STACKS.items()
        ]

    async def version(self) -> str:
        text = await run_tool(self.binary, "--version", capture=True)
        return text.splitlines()[0].strip() if text else ""


def _last_message(log: Path) -> str:
    """Returns the runtime's last message, from its log: text for people, which a hostile sandbox may have written."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    if not lines:
        return ""
    try:
        return str(json.loads(lines[-1])["msg"])
    except (ValueError, LookupError, TypeError):
        return lines[-1]


async def find_runtimes(runtime: Runtime) -> Sequence[OciRuntime]:
    """Lists the installed programs that could be it, the best first. Only a probe tells which one works."""
    if runtime is Runtime.GVISOR:
        return await _find_gvisor()
    if runtime is Runtime.NATIVE:
        # crun is quicker but refuses mixed cgroup hierarchies.
        paths = [path for name in ("crun", "runc") if (path := find_tool(name))]
        return [OciRuntime(Runtime.NATIVE, path, native=True) for path in paths]
    return []


async def _find_gvisor() -> list[OciRuntime]:
    own = OWN_BINARIES / "runsc"
    paths = [os.fspath(own)] if os.access(own, os.X_OK) else []
    if installed := find_tool("runsc"):
        paths.append(installed)
    # host-uds: the agent's socket is the way in. overlay2: writes go to the sandbox's disk, where they are limited.
    flags = ("--host-uds=create", "--overlay2=none", "--oci-seccomp", "--platform=systrap", "--net-raw=false")
    found = [OciRuntime(Runtime.GVISOR, path, native=False, flags=flags) for path in paths]
    dates = await asyncio.gather(*(find_release_date(runtime) for runtime in found))
    return [runtime for _, runtime in sorted(zip(dates, found, strict=True), key=lambda pair: pair[0], reverse=True)]


async def find_release_date(runtime: OciRuntime) -> str:
    """A program that does not tell its version goes last; whether it works is for the probe to say."""
    try:
        return read_release_date(await runtime.version())
    except (EngineError, OSError):
        return ""


def read_release_date(version: str) -> str:
    """Debian's 0.0~20240729.0, the project's release-20240729.0 and a Go module's v0.0.0-20260701204157-69c2d17aea96
    all have the day in them: eight digits, so that texts compare as days. Empty when there is none."""
    match = re.search(r"20\d{6}", version)
    return match[0] if match else ""
