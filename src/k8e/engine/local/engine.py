"""The local engine: sandboxes on this machine, each a bundle under an OCI runtime on a disk of its own.

Making one leaves traces in a fixed order: directory, disk, mount, bundle, container (with its cgroups). Everything is
named after the sandbox, and `destroy` looks for each kind of trace instead of remembering which were made, so that it
is right after any crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from k8e.engine import EngineError, Health, Limits, Place, Refusal, Runtime, RuntimeReport, SandboxSpec
from k8e.engine.local import disk, host_image
from k8e.engine.local.bundle import ID_COUNT, BundleSpec, build_config
from k8e.engine.local.cgroup import Cgroups
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.runtime import OciRuntime, find_runtimes, forget_sandbox, known_sandboxes
from k8e.engine.local.seccomp import build_profile
from k8e.engine.local.tool import finish_in_thread
from k8e.link import AgentLink
from k8e.link.binary import agent_binary, place
from k8e.link.dial import UnixDialer
from k8e.link.errors import LinkError
from k8e.link.model import ExecSpec, Sandbox
from k8e.policy import NOTHING, HostList

# Host ids of native sandboxes: far above people and distributions, below 2^31 where signed readers would trip.
_FIRST_ID = 0x30000000
_SLOTS = (0x7FFF0000 - _FIRST_ID) // ID_COUNT
_START_DEADLINE = 60.0
_PROBE_DEADLINE = 30.0
_LONGEST_SOCKET = 107  # the kernel's limit; runsc puts its control socket somewhere else when it does not fit
_PROBE_LIMITS = Limits(cpus=1.0, memory=256 << 20, pids=64, disk=disk.MIN_DISK * 2, inodes=8192)

_STRENGTH = (Runtime.GVISOR, Runtime.NATIVE, Runtime.KATA, Runtime.FIRECRACKER)  # of those that exist
_INSTALL = {
    Runtime.GVISOR: "install runsc (Debian and Ubuntu: apt-get install runsc; Debian 12: from bookworm-backports)",
    Runtime.NATIVE: "install runc (Debian and Ubuntu: apt-get install runc)",
    Runtime.KATA: "kata does not exist here yet: use gvisor or native",
    Runtime.FIRECRACKER: "firecracker does not exist here yet: use gvisor or native",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What must outlive the daemon to find the way back in."""

    runtime: str
    image: str
    instance: str
    slot: int | None

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        return cls(**json.loads(path.read_text()))


class LocalEngine:
    """Implements `engine.Engine`. Needs root."""

    def __init__(self, state_dir: Path, run_dir: Path, tools_dir: Path | None = None) -> None:
        self.layout = Layout(state_dir, run_dir)
        self._tools = tools_dir or Path("/var/lib/k8e/tools")
        self._cgroups = Cgroups(self.layout.cgroup)
        self._links: dict[str, AgentLink] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # gone with their last user
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._slots: set[int] = set()
        self._prepared: asyncio.Task[Path] | None = None
        self._templates: dict[tuple[int, int], asyncio.Task[Path]] = {}
        self._probes: dict[Runtime, asyncio.Task[RuntimeReport]] = {}
        self._runtimes: dict[Runtime, OciRuntime] = {}

    # Preparation -----------------------------------------------------------------------------------------------------

    async def _root_content(self) -> Path:
        """The directory whose content every sandbox starts with; made once for each daemon."""
        if self._prepared is None:
            self._prepared = asyncio.create_task(asyncio.to_thread(self._prepare))
        try:
            return await asyncio.shield(self._prepared)
        except OSError as error:
            self._prepared = None  # the disk may have room again next time
            raise EngineError("image", f"cannot be prepared: {error}") from error

    def _prepare(self) -> Path:
        layout = self.layout
        shared, private = (layout.state, layout.run, layout.sandboxes, layout.agents), (layout.images,)
        for directory in (*shared, *private):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o711 if directory in shared else 0o700)  # whatever the umask is
        binary = agent_binary()
        target = self.layout.agents / binary.sha256
        if not target.exists():
            place(binary, target)
        for paths in self._all_paths():
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                slot = Record.load(paths.record).slot
                if slot is not None:
                    self._slots.add(slot)
        with tempfile.TemporaryDirectory(dir=self.layout.images, prefix=".root-") as scratch:
            content = Path(scratch, "content")
            content.mkdir()
            content.chmod(0o755)
            host_image.build_root(content / "root")
            final = self.layout.images / f"host-{host_image.digest_tree(content)}"
            if not final.exists():
                content.rename(final)
        for old in self.layout.images.iterdir():
            if old != final and not (old.name.startswith(f"{final.name}-") and old.suffix == ".img"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        return final

    async def _template(self, limits: Limits) -> Path:
        content = await self._root_content()
        key = (limits.disk, limits.inodes)
        if key not in self._templates:
            self._templates[key] = asyncio.create_task(self._make_template(content, *key))
        try:
            return await asyncio.shield(self._templates[key])
        except EngineError:
            self._templates.pop(key, None)
            raise

    async def _make_template(self, content: Path, size: int, inodes: int) -> Path:
        target = content.with_name(f"{content.name}-{size}-{inodes}.img")
        if not target.exists():
            await disk.make_template(content, size, inodes, target)
        return target

    async def edition(self, spec: SandboxSpec) -> str:
        """Changes with a new daemon at most: what it finds at its start it keeps to."""
        report = await self._require(spec.runtime)
        runtime = self._runtimes[spec.runtime]
        overlays = await asyncio.to_thread(host_image.host_overlays, self._tools)
        parts = (
            *(importlib.metadata.version("k8e"), agent_binary().sha256, (await self._root_content()).name),
            *(runtime.binary, runtime.flags, report.version, overlays),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _all_paths(self) -> list[SandboxPaths]:
        with contextlib.suppress(FileNotFoundError):
            return [SandboxPaths(Path(entry)) for entry in os.scandir(self.layout.sandboxes)]
        return []

    # Runtimes --------------------------------------------------------------------------------------------------------

    async def probe(self) -> Sequence[RuntimeReport]:
        return await asyncio.gather(*(self._report(runtime) for runtime in _STRENGTH))

    def runtime(self, runtime: Runtime) -> OciRuntime:
        """What a runtime that was found available is here."""
        return self._runtimes[runtime]

    async def _report(self, runtime: Runtime) -> RuntimeReport:
        if runtime not in self._probes:
            self._probes[runtime] = asyncio.create_task(self._examine(runtime))
        return await asyncio.shield(self._probes[runtime])

    async def _examine(self, runtime: Runtime) -> RuntimeReport:
        """A runtime is available when a sandbox that was started with it answered."""
        failures = []
        for candidate in await find_runtimes(runtime):
            try:
                await self._try_out(candidate)
            except EngineError as error:
                failures.append(f"{candidate.binary} does not work: {error.cause}")
                continue
            self._runtimes[runtime] = candidate
            notes = await self._find_network_stack(candidate) if runtime is Runtime.GVISOR else ()
            return RuntimeReport(runtime, True, version=await candidate.version(), notes=(*notes, *failures))
        missing = "not installed" if runtime in (Runtime.GVISOR, Runtime.NATIVE) else "not supported yet"
        return RuntimeReport(runtime, False, reason="; ".join(failures) or missing, hint=_INSTALL[runtime])

    async def _try_out(self, runtime: OciRuntime) -> None:
        name = f"probe-{runtime.name.value}-{secrets.token_hex(4)}"
        try:
            async with asyncio.timeout(_PROBE_DEADLINE):
                await self._create(name, SandboxSpec(runtime.name, limits=_PROBE_LIMITS), runtime)
                sandbox, _ = await self.attach(name)
                process = await sandbox.start(ExecSpec.of("/bin/true", stdin=False))
                outcome = await process.wait()
        except TimeoutError as error:
            raise EngineError("probe", f"no answer in {_PROBE_DEADLINE:g} s") from error
        except LinkError as error:
            raise EngineError("probe", str(error)) from error
        finally:
            await self.destroy(name)
        if outcome.exit_code != 0:
            raise EngineError("probe", f"a command ended with {outcome}")

    async def _find_network_stack(self, gvisor: OciRuntime) -> tuple[str, ...]:
        """Which stack sandboxes with a network would have: gVisor's own wherever it starts in a namespace."""
        reasons = []
        for mode, stack in (("sandbox", "gVisor's own stack"), ("host", "the stack of the sandbox's namespace")):
            try:
                await self._try_out(gvisor.with_network(mode))
            except EngineError as error:
                reasons.append(f"--network={mode} does not work: {error.cause}")
            else:
                return (f"network: {stack} (--network={mode})", *reasons)
        return ("network: none", *reasons)

    # Creating --------------------------------------------------------------------------------------------------------

    async def _require(self, runtime: Runtime) -> RuntimeReport:
        report = await self._report(runtime)
        if not report.available:
            raise EngineError(f"runtime {runtime.value}", report.reason, report.hint)
        return report

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        await self._require(spec.runtime)
        await self._create(sandbox, spec, self._runtimes[spec.runtime])

    async def _create(self, sandbox: str, spec: SandboxSpec, runtime: OciRuntime) -> None:
        if spec.image != "host":
            raise EngineError(f"image {spec.image}", "only the image `host` exists yet")
        self._refuse_network(spec.egress)
        if len(os.fsencode(self.layout.runtime_root("gvisor"))) + len(f"/runsc-k8e-{sandbox}.sock") > _LONGEST_SOCKET:
            raise EngineError("run directory", f"{self.layout.run} is too long for the sockets below it")
        template = await self._template(spec.limits)
        if sandbox in self._creating:
            raise EngineError("sandbox", f"{sandbox} exists already")
        work = self._creating[sandbox] = asyncio.create_task(self._make(sandbox, spec, runtime, template))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise EngineError("sandbox", f"{sandbox} was destroyed while it was being created") from None
            await cancel_and_wait(work)
            raise
        finally:
            del self._creating[sandbox]

    async def _make(self, sandbox: str, spec: SandboxSpec, runtime: OciRuntime, template: Path) -> None:
        paths = self.layout.sandbox(sandbox)
        try:
            # Not in a thread: cancelled there, it could still happen afterwards.
            os.mkdir(paths.top, 0o700)
            os.chmod(paths.top, 0o711 if runtime.native else 0o700)  # whatever the umask is
        except FileExistsError as error:
            raise EngineError("sandbox", f"{sandbox} exists already") from error
        except OSError as error:
            raise EngineError("disk", str(error)) from error
        try:
            await self._build(sandbox, spec, runtime, template, paths)
        except BaseException as error:
            await asyncio.shield(self._remove(sandbox))
            if isinstance(error, OSError):
                raise EngineError("disk", str(error)) from error
            raise

    async def _build(
        self, sandbox: str, spec: SandboxSpec, runtime: OciRuntime, template: Path, paths: SandboxPaths
    ) -> None:
        instance = secrets.token_bytes(16)
        slot = self._take_slot() if runtime.native else None
        first_id = None if slot is None else _FIRST_ID + slot * ID_COUNT
        Record(spec.runtime.value, spec.image, instance.hex(), slot).save(paths.record)
        await disk.mount_copy(template, paths.disk_image, paths.disk)
        await finish_in_thread(self._lay_out, spec, runtime, paths, instance, first_id, sandbox)
        await runtime.start(self.layout, sandbox, paths, _START_DEADLINE)
        try:
            await self._open_link(sandbox)
        except LinkError as error:
            raise EngineError("agent", f"no answer from the sandbox: {error}") from error

    def _take_slot(self) -> int:
        slot = next((slot for slot in range(_SLOTS) if slot not in self._slots), None)
        if slot is None:
            raise EngineError("user ids", f"all {_SLOTS} ranges are in use")
        self._slots.add(slot)
        return slot

    def _lay_out(
        self,
        spec: SandboxSpec,
        runtime: OciRuntime,
        paths: SandboxPaths,
        instance: bytes,
        first_id: int | None,
        sandbox: str,
    ) -> None:
        paths.link.mkdir(mode=0o700)
        if first_id is not None:
            shift_owners(paths.disk, first_id)
            # The runtime enters as root of the sandbox; other users of the machine have no business here.
            paths.disk.chmod(0o700)
        _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = build_config(
            BundleSpec(
                root=os.fspath(paths.root),
                agent=os.fspath(self.layout.agents / agent_binary().sha256),
                link=os.fspath(paths.link),
                instance=instance,
                hostname=spec.hostname,
                cgroup=self._cgroups.path_of(sandbox),
                limits=spec.limits,
                overlays=host_image.host_overlays(self._tools),
                first_id=first_id,
                seccomp=build_profile(platform.machine(), runtime.native),
                hard_files=hard_files,
            )
        )
        paths.bundle.mkdir(mode=0o700)
        (paths.bundle / "config.json").write_text(json.dumps(config))

    # Using -----------------------------------------------------------------------------------------------------------

    async def attach(self, sandbox: str) -> tuple[Sandbox, Place]:
        # A link learns of the end a little later than the kernel.
        if not (await self.health(sandbox)).alive:
            raise EngineError("sandbox", f"{sandbox} is not running")
        try:
            return await self._open_link(sandbox), host_image.host_place()
        except (LinkError, FileNotFoundError) as error:
            raise EngineError("sandbox", f"{sandbox} does not answer: {error}") from error

    async def _open_link(self, sandbox: str) -> AgentLink:
        async with self._lock(sandbox):
            if sandbox in self._links and self._links[sandbox].failure:
                await self._links.pop(sandbox).close()
            if sandbox not in self._links:
                paths = self.layout.sandbox(sandbox)
                record = await asyncio.to_thread(Record.load, paths.record)
                instance = bytes.fromhex(record.instance)
                self._links[sandbox] = await AgentLink.open(UnixDialer(paths.socket), instance=instance)
            return self._links[sandbox]

    async def health(self, sandbox: str) -> Health:
        return await asyncio.to_thread(self._look_after, sandbox)

    def _look_after(self, sandbox: str) -> Health:
        try:
            return Health(self._cgroups.alive(sandbox), self._cgroups.oom_kills(sandbox))
        except FileNotFoundError:
            return Health(False, 0)  # removed between two looks

    def _lock(self, sandbox: str) -> asyncio.Lock:
        """Held while a sandbox's link is opened, or everything of it is destroyed."""
        lock = self._locks.get(sandbox)
        if lock is None:
            lock = self._locks[sandbox] = asyncio.Lock()
        return lock

    # Network: none but loopback yet ---------------------------------------------------------------------------------

    async def default_egress(self) -> HostList:
        return NOTHING

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        self._refuse_network(hosts)

    def _refuse_network(self, hosts: HostList) -> None:
        if hosts != NOTHING:
            raise EngineError("network", "sandboxes have no network but loopback yet", "leave the list empty")

    async def refusals(self, sandbox: str) -> Sequence[Refusal]:
        return ()

    # Ending ----------------------------------------------------------------------------------------------------------

    async def destroy(self, sandbox: str) -> None:
        work = self._creating.get(sandbox)
        if work is not None:
            await cancel_and_wait(work)
        await self._remove(sandbox)

    async def _remove(self, sandbox: str) -> None:
        async with self._lock(sandbox):
            await self._destroy(sandbox)

    async def _destroy(self, sandbox: str) -> None:
        link = self._links.pop(sandbox, None)
        if link is not None:
            await link.close()
        paths = self.layout.sandbox(sandbox)
        slot = None
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            slot = Record.load(paths.record).slot
        await asyncio.to_thread(self._cgroups.kill, sandbox)
        await asyncio.to_thread(forget_sandbox, self.layout, sandbox)
        await disk.unmount_below(paths.top)
        await asyncio.to_thread(self._cgroups.remove, sandbox)
        await asyncio.to_thread(disk.remove_tree, paths.top)
        if slot is not None:
            self._slots.discard(slot)

    async def list(self) -> Sequence[str]:
        return sorted(await asyncio.to_thread(self._traces))

    def _traces(self) -> set[str]:
        return (
            {paths.top.name for paths in self._all_paths()} | self._cgroups.sandboxes() | known_sandboxes(self.layout)
        )

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()
        if not await self.list():
            await asyncio.to_thread(self._cgroups.remove_all)


async def cancel_and_wait(work: asyncio.Task[None]) -> None:
    """Returns when it has ended, with whatever; its own awaiter hears of that."""
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


def shift_owners(top: Path, first_id: int) -> None:
    """Moves everything below into a sandbox's own range of ids. Nothing runs there yet."""
    for _, directories, files, handle in os.fwalk(top, follow_symlinks=False):
        for name in (*directories, *files):
            status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            os.chown(name, first_id + status.st_uid, first_id + status.st_gid, dir_fd=handle, follow_symlinks=False)
    os.chown(top, first_id, first_id)
