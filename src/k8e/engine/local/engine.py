"""The local engine: sandboxes on this machine, each a bundle under an OCI runtime, or a virtual machine, on a disk and
a wire of its own.

Making one leaves traces in a fixed order: directory, network, disk, mount, bundle, container (with its cgroups).
Everything is named after the sandbox, and `destroy` looks for each kind of trace instead of remembering what was made,
so that it is right after any crash. `stop` does the same and keeps the directory with the record and the disk, and
`start` begins with it: whatever a crash left in between is out of its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from k8e.damage import Damage, Damaged, Damages
from k8e.engine import (
    EngineError,
    Limits,
    Mount,
    Observation,
    Place,
    Refusal,
    Room,
    Runtime,
    RuntimeReport,
    SandboxSpec,
    Usage,
)
from k8e.engine.images import Images
from k8e.engine.links import Links
from k8e.engine.local.disk import disk
from k8e.engine.local.dns.resolv_conf import Server
from k8e.engine.local.engine_locks import EngineLock
from k8e.engine.local.images import LocalImages
from k8e.engine.local.images.limits import USUAL, ImageLimits
from k8e.engine.local.launcher import Launcher
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.kept_parts import pin_mounts
from k8e.engine.local.mounts.mounts import seal_mounts
from k8e.engine.local.mounts.slots import TRAY, fill_slots, list_bindings
from k8e.engine.local.network.addresses import Pool, Wire
from k8e.engine.local.network.network import Network
from k8e.engine.local.record import IdRanges, Record, Records
from k8e.engine.local.removal import Removal
from k8e.engine.local.roots.roots import Roots
from k8e.engine.local.roots.templates import Templates
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.runtime.probes import RuntimeProbes
from k8e.engine.local.runtime.runtime import LocalRuntime, OciRuntime, find_runtimes
from k8e.engine.local.toolchain.registries import CA_BUNDLE
from k8e.engine.local.vm.firecracker import find_firecracker
from k8e.engine.local.vm.kvm import KvmFailures
from k8e.engine.local.vm.launcher import VmLauncher, refuse_shape
from k8e.engine.local.vm.machines import Machines
from k8e.engine.local.vm.runtime import USUAL_VMS, VmOptions, VmRuntime, explain_end, find_kata
from k8e.engine.local.vm.silence import Hung, judge_silence
from k8e.engine.tasks import Makings, finish, finish_in_thread
from k8e.link.binary import agent_binary, loader_library
from k8e.link.errors import LinkError, ProtocolViolation
from k8e.link.model import ExecSpec, Sandbox
from k8e.policy import Address, HostList

_PROBE_DEADLINE = 30.0
_LONGEST_SOCKET = 107  # the kernel's limit; runsc puts its control socket somewhere else when it does not fit
_PROBE_LIMITS = Limits(cpus=1.0, memory=256 << 20, pids=64, disk=disk.MIN_DISK * 2, inodes=8192)


class _Silence(EngineError):
    """A sandbox that was tried did not answer in time."""


class LocalEngine:
    """Implements `engine.Engine`. Needs root."""

    def __init__(
        self,
        state_dir: Path,
        run_dir: Path,
        tools_dir: Path | None = None,
        *,
        pool: Pool | None = None,
        nameservers: Sequence[Address | Server] = (),
        image_limits: ImageLimits = USUAL,
        virtual: VmOptions = USUAL_VMS,
    ) -> None:
        # The kernel names mounts by where they really are, and by that we find them again.
        self.layout = Layout(state_dir.resolve(), run_dir.resolve())
        if self.layout.sandboxes.is_symlink():
            # Mounts would not be found again, and an empty directory in its place would cost all sandboxes.
            hint = "To have sandboxes on another disk, mount it there, or link the whole state directory."
            raise EngineError("sandboxes", f"{self.layout.sandboxes} is a link", hint)
        self._tools = tools_dir or Path("/var/lib/k8e/tools")
        self._damages = Damages(self.layout.state)
        self._cgroups = Cgroups(self.layout.cgroup)
        self._templates = Templates(self.layout, self._tools, self._damages)
        self._images = LocalImages(self.layout, trust=self._more_trusted, limits=image_limits, damages=self._damages)
        self._roots = Roots(self._templates, self._tools, self._images.store)
        self._records = Records(self.layout, self._damages)
        self._ids = IdRanges(self.layout)
        self._network = Network(
            self.layout.tag,
            lambda sandbox: self.layout.sandbox(sandbox).egress,
            pool=pool or Pool(),
            nameservers=nameservers,
            mirrors=self._mirrors,
            damages=self._damages,
        )
        self._virtual = virtual
        self._kvm_failures = KvmFailures(self.layout.state)
        self._launcher = Launcher(self.layout, self._cgroups, self._roots, self._network)
        self._vm_launcher = VmLauncher(self.layout, self._cgroups, self._roots, self._images.store, self._network)
        self._machines = Machines(self.layout, self._records, self._cgroups)
        self._removal = Removal(
            *(self.layout, self._cgroups, self._network), records=self._records, ids=self._ids, damages=self._damages
        )
        self._engine_lock = EngineLock(self.layout, damages=self._damages)
        self._engine_lock.take()
        self._links = Links(self._machines.open_link)
        self._places: dict[str, Place] = {}
        self._makings = Makings()
        self._probes = RuntimeProbes(self._find_runtimes, self._try_out)

    def _mirrors(self) -> frozenset[str]:
        known = self._templates.known_registries
        return known.mirrors if known is not None else frozenset()

    # Runtimes --------------------------------------------------------------------------------------------------------

    async def probe(self) -> Sequence[RuntimeReport]:
        return await self._probes.reports()

    async def choose(self, wanted: Runtime | None = None) -> RuntimeReport:
        return await self._probes.choose(wanted)

    def runtime(self, runtime: Runtime) -> LocalRuntime:
        """The program behind a runtime that was found available."""
        return self._probes.found(runtime)

    async def _find_runtimes(self, runtime: Runtime) -> Sequence[LocalRuntime]:
        if runtime is Runtime.FIRECRACKER:
            return await find_firecracker(self._virtual)
        if runtime is Runtime.KATA:
            return await find_kata(self._virtual)
        return await find_runtimes(runtime)

    async def _try_out(self, runtime: LocalRuntime) -> None:
        if not isinstance(runtime, VmRuntime) or runtime.emulated:
            await self._try_sandbox(runtime)
            return
        tried = (runtime.binary, *runtime.flags, await runtime.version())
        if cause := await asyncio.to_thread(self._kvm_failures.recall, runtime.name.value, tried):
            raise EngineError("probe", f"{cause}, when it was last tried")
        try:
            await self._try_sandbox(runtime)
        except _Silence as error:
            await finish_in_thread(self._kvm_failures.remember, runtime.name.value, tried, error.cause)
            raise

    async def _try_sandbox(self, runtime: LocalRuntime) -> None:
        name = f"probe-{runtime.name.value}-{secrets.token_hex(4)}"
        deadline = runtime.patience if isinstance(runtime, VmRuntime) else _PROBE_DEADLINE
        try:
            async with asyncio.timeout(deadline):
                await self._create(name, SandboxSpec(runtime.name, limits=_PROBE_LIMITS), runtime)
                sandbox, _ = await self.attach(name)
                process = await sandbox.start(ExecSpec.of(*self._network.reach_resolver(name), stdin=False))
                outcome = await process.wait()
        except TimeoutError as error:
            raise _Silence("probe", f"no answer in {deadline:g} s") from error
        except LinkError as error:
            raise EngineError("probe", str(error)) from error
        finally:
            await finish(self.destroy(name))  # the engine may be closed at this very moment
        if outcome.exit_code != 0:
            raise EngineError("probe", f"a command that asks for its resolver ended with {outcome}")

    async def edition(self, spec: SandboxSpec) -> str:
        """Changes with a new daemon at most: what it finds at its start it keeps to."""
        runtime, report = await self._probes.require(spec.runtime)
        parts = (
            *(importlib.metadata.version("k8e"), agent_binary().sha256, loader_library().sha256),
            *(runtime.binary, runtime.flags, report.version),
            *(spec.image, *await self._roots.of(spec.image).edition()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    # Creating --------------------------------------------------------------------------------------------------------

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        runtime, _ = await self._probes.require(spec.runtime)
        await self._create(sandbox, spec, runtime)

    async def _create(self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime) -> None:
        self._engine_lock.take()  # if it was given up by `close`
        virtual = isinstance(runtime, VmRuntime)
        if virtual:
            refuse_shape(spec)
        if len(os.fsencode(self.layout.runtime_root("gvisor"))) + len(f"/runsc-k8e-{sandbox}.sock") > _LONGEST_SOCKET:
            raise EngineError("run directory", f"{self.layout.run} is too long for the sockets below it")
        template = await self._roots.of(spec.image).template(spec.limits, journal=virtual)
        await self._makings.do(sandbox, self._make(sandbox, spec, runtime, template), taken="exists already")

    async def _make(self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime, template: disk.Template) -> None:
        paths = self.layout.sandbox(sandbox)
        try:
            async with self._links.lock(sandbox):  # a destroy that came first would take away what it finds
                # Not in a thread: cancelled there, it could still happen afterwards.
                os.mkdir(paths.top, 0o700)
                os.chmod(paths.top, 0o711 if runtime.own_ids else 0o700)  # whatever the umask is
        except FileExistsError as error:
            raise EngineError("sandbox", f"{sandbox} exists already") from error
        except OSError as error:
            raise EngineError("disk", str(error)) from error
        try:
            await self._build(sandbox, spec, runtime, template, paths)
        except BaseException as error:
            await finish(self._destroy(sandbox))
            if isinstance(error, OSError):
                raise EngineError("disk", str(error)) from error
            raise

    async def _build(
        self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime, template: disk.Template, paths: SandboxPaths
    ) -> None:
        id_range = self._ids.take() if runtime.own_ids else None
        record = Record(spec.runtime.value, spec.image, secrets.token_bytes(16).hex(), id_range, spec.hostname)
        record.save(paths.record)
        await self._bring_up(sandbox, spec, runtime, record, template)

    async def _bring_up(
        self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime, record: Record, template: disk.Template | None
    ) -> None:
        """From a directory with a record to an agent that answers."""
        try:
            await self._launch(sandbox, spec, runtime, record, template)
        except Hung:  # of no use to ask it to halt
            async with self._ended(sandbox):
                await self._removal.stop(sandbox)
            await self._launch(sandbox, spec, runtime, record, template=None)
        if isinstance(runtime, VmRuntime):
            await self._machines.set_clock(sandbox)
        if spec.shape.mounts or spec.shares:
            await finish_in_thread(self._hold_mounts, sandbox, spec.shape.mounts, runtime.native)

    async def _launch(
        self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime, record: Record, template: disk.Template | None
    ) -> None:
        if isinstance(runtime, VmRuntime):
            place = await self._vm_launcher.launch(sandbox, spec, runtime, record, template)
        else:
            assert isinstance(runtime, OciRuntime), "there are two kinds"
            place = await self._launcher.launch(sandbox, spec, runtime, record, template)
        self._places[sandbox] = place
        began = time.monotonic()
        try:
            await self._links.open(sandbox, partial(self._machines.open_link, starting=record))
        except LinkError as error:
            said = await asyncio.to_thread(explain_end, self.layout.sandbox(sandbox))
            if isinstance(runtime, VmRuntime) and not isinstance(error, ProtocolViolation):
                pids, seconds = self._cgroups.processes(sandbox), time.monotonic() - began
                raise await asyncio.to_thread(judge_silence, pids, seconds, said) from error
            cause = f"no answer from the sandbox: {error}{f' ({said})' if said else ''}"
            raise EngineError("agent", cause) from error

    def _hold_mounts(self, sandbox: str, mounts: Sequence[Mount], native: bool) -> None:
        """Before any command: what is kept is kept against gVisor's processes, too."""
        paths = self.layout.sandbox(sandbox)
        if not native:
            pin_mounts(mounts, paths, partial(self._cgroups.processes, sandbox))
        seal_mounts(paths)

    async def bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        await self._makings.do(sandbox, self._bind(sandbox, mounts), taken="is being made")

    async def _bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        paths = self.layout.sandbox(sandbox)
        _, place = await self.attach(sandbox)
        try:
            link = await self._links.open(sandbox)
            record = await asyncio.to_thread(self._records.load, sandbox)
            processes = partial(self._cgroups.processes, sandbox)
            binds = await finish_in_thread(fill_slots, mounts, self.layout, paths, record, place.user, processes)
            if record.first_id is None:
                writable = [os.fsencode(bind.target) for bind in binds if bind.writable]
                await link.bind(list(list_bindings(binds)), writable=writable, last=TRAY.encode())
        except LinkError as error:
            raise EngineError("slots", f"the agent did not mount what they are for: {error}") from error
        except OSError as error:
            raise EngineError("slots", str(error)) from error

    # Using -----------------------------------------------------------------------------------------------------------

    async def attach(self, sandbox: str) -> tuple[Sandbox, Place]:
        # A link learns of the end a little later than the kernel.
        if not self._cgroups.alive(sandbox):
            raise EngineError("sandbox", f"{sandbox} is not running")
        try:
            link = await self._links.open(sandbox)
            await self._resume_network(sandbox)
            return link, self._places.get(sandbox) or await self._find_place(sandbox)
        except (LinkError, OSError) as error:
            raise EngineError("sandbox", f"{sandbox} does not answer: {error}") from error

    async def _find_place(self, sandbox: str) -> Place:
        if sandbox not in self._places:
            paths = self.layout.sandbox(sandbox)
            record = await asyncio.to_thread(self._records.load, sandbox)
            try:
                self._places[sandbox] = await self._roots.of(record.image).place(paths)
            except Damaged as error:
                self._damages.set_aside(paths.place, error)
                raise EngineError("record", f"what commands of {sandbox} start with is damaged: {error}") from error
        return self._places[sandbox]

    async def observe(self, sandbox: str) -> Observation:
        # The kernel answers from memory, sooner than a thread could be told; this is on the way of every command.
        alive, oom_kills = self._cgroups.alive(sandbox), self._cgroups.oom_kills(sandbox)
        if alive:
            oom_kills += await self._machines.count_kills(sandbox)
        refusals: tuple[Refusal, ...] = ()
        unknown = ""
        if not self._links.is_ending(sandbox):  # else its network goes, and is not to be brought back
            try:
                await self._resume_network(sandbox)
                refusals = tuple(self._network.refusals(sandbox))
                if self._network.flushed:
                    await self._network.repair()
            except (EngineError, OSError) as error:
                unknown = str(error) if alive else ""  # the network of one that is gone is gone, too
        return Observation(alive, oom_kills, refusals, unknown)

    async def measure(self, sandbox: str) -> Usage:
        return await asyncio.to_thread(self._cgroups.measure, sandbox)

    async def prolong(self, sandbox: str, life: float) -> None:
        """No sandbox outlives this machine, and its daemon is started again."""

    async def measure_room(self) -> Room | None:
        return None

    async def keep_ready(self, wanted: Mapping[SandboxSpec, int]) -> Mapping[SandboxSpec, int] | None:
        return None

    async def boot_trace(self, sandbox: str) -> str:
        """Of a virtual machine, as its guest tells it: which step was reached when. For measurements."""
        return await self._machines.boot_trace(sandbox)

    # Network ---------------------------------------------------------------------------------------------------------

    async def default_egress(self) -> HostList:
        return (await self._templates.registries()).hosts

    async def _resume_network(self, sandbox: str) -> None:
        """Of a sandbox that an earlier daemon made. Not while it is being destroyed: the network would hold on to
        addresses that are the next sandbox's. FileNotFoundError when there is no such sandbox."""
        if not self._network.knows(sandbox):
            async with self._links.lock(sandbox):
                record = await asyncio.to_thread(self._records.load, sandbox)
                await self._network.resume(sandbox, record.hostname)

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        try:
            await self._resume_network(sandbox)
        except FileNotFoundError:
            raise EngineError("sandbox", f"{sandbox} does not exist") from None
        await self._network.set_hosts(sandbox, hosts)

    async def reserve_wire(self, name: str) -> Wire:
        """For something that is no sandbox, until `destroy`: no sandbox gets its addresses."""
        return await self._network.reserve(name)

    @property
    def images(self) -> Images:
        return self._images

    async def _more_trusted(self) -> str:
        """The certificates that the machine's package clients trust: its image registries may be signed by them too."""
        files = dict((await self._templates.registries()).files)
        return files.get(CA_BUNDLE, b"").decode()

    # Stopping and starting -------------------------------------------------------------------------------------------

    async def stop(self, sandbox: str) -> None:
        await self._makings.end(sandbox)
        await self._stop(sandbox)

    async def _stop(self, sandbox: str) -> None:
        async with self._ended(sandbox):
            await self._machines.halt(sandbox)
            await self._removal.stop(sandbox)

    async def start(self, sandbox: str, spec: SandboxSpec) -> None:
        runtime, _ = await self._probes.require(spec.runtime)
        await self._templates.content()  # with which the agent is where bundles say that it is
        self._engine_lock.take()
        await self._makings.do(sandbox, self._wake(sandbox, spec, runtime), taken="is being started already")

    async def _wake(self, sandbox: str, spec: SandboxSpec, runtime: LocalRuntime) -> None:
        paths = self.layout.sandbox(sandbox)
        try:
            former = self._records.load(sandbox)
        except FileNotFoundError as error:
            hint = "its disk is kept: docs/local-engine.md says how to get at the files"
            raise EngineError("sandbox", f"{sandbox} cannot be started: it has no record", hint) from error
        if former.runtime != spec.runtime.value:
            raise EngineError("sandbox", f"{sandbox} was made with {former.runtime}, not {spec.runtime.value}")
        if former.ready and self._cgroups.alive(sandbox):
            raise EngineError("sandbox", f"{sandbox} is running already")
        await self._stop(sandbox)
        record = replace(former, instance=secrets.token_bytes(16).hex(), ready=False)
        try:
            record.save(paths.record)
            await self._bring_up(sandbox, spec, runtime, record, template=None)
            replace(record, ready=True).save(paths.record)
        except BaseException as error:
            await finish(self._stop(sandbox))
            if isinstance(error, OSError):
                raise EngineError("disk", str(error)) from error
            raise

    # Ending ----------------------------------------------------------------------------------------------------------

    async def destroy(self, sandbox: str) -> None:
        await self._makings.end(sandbox)
        await self._destroy(sandbox)

    async def _destroy(self, sandbox: str) -> None:
        async with self._ended(sandbox):
            await self._removal.destroy(sandbox)

    async def set_aside(self, sandbox: str) -> str:
        async with self._ended(sandbox):
            return await self._removal.set_aside(sandbox)

    @contextlib.asynccontextmanager
    async def _ended(self, sandbox: str) -> AsyncIterator[None]:
        async with self._links.ended(sandbox):
            self._places.pop(sandbox, None)
            yield
            self._machines.forget(sandbox)
            self._cgroups.let_go(sandbox)

    def damages(self) -> Sequence[Damage]:
        return self._damages.take()

    async def list(self) -> Sequence[str]:
        return sorted(await asyncio.to_thread(self._removal.traces))

    async def close(self) -> None:
        """Removes what is half made; what is made lives on."""
        await self._probes.close()
        await self._makings.close()
        await self._templates.close()
        await self._vm_launcher.close()
        await self._links.close()
        await self._network.close()
        self._cgroups.close()
        if not await self.list():
            await asyncio.to_thread(self._cgroups.remove_all)
            self._engine_lock.release()
