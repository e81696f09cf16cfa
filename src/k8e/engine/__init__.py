"""The contract of engines: the seam between core, which decides, and the engine, which runs sandboxes.

An engine knows sandboxes by an id that core chose and nothing else of sessions, tenants or doors. Everything it makes
for one is derived from that id, so that `destroy` can clean up after any crash without knowing how far `create` got.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from k8e.damage import Damage
from k8e.engine.images import Images
from k8e.link.model import Identity, Sandbox
from k8e.policy import NOTHING, HostList


class Runtime(enum.Enum):
    """The kinds of isolation that users can name."""

    GVISOR = "gvisor"
    NATIVE = "native"
    KATA = "kata"
    FIRECRACKER = "firecracker"


@dataclass(frozen=True, slots=True)
class Limits:
    cpus: float = 1.0
    memory: int = 1 << 30
    pids: int = 512
    disk: int = 2 << 30  # writable layer and workspace together
    inodes: int = 131_072
    open_files: int = 4096


WHOLE = "."  # the name of the part that is all of a mount


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the machine that a sandbox sees, with the rights that one user of the machine has there. Inside,
    that user's files belong to the default user and all other files to the account `nobody`; what only root may do
    there no process inside may do."""

    source: str  # an absolute path on the machine, as that user finds it
    target: str  # where it is inside
    owner: int  # the user
    writable: bool = False
    kept: tuple[str, ...] = ()  # below it: cannot be changed, moved or replaced from inside
    hidden: tuple[str, ...] = ()  # below it: not there, also when it comes to be later; only where it is not writable
    # Of the kept parts, directories of which the sandbox has a copy of its own that it can change. WHOLE is all of a
    # mount that is not writable.
    private: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """How a sandbox is built, beyond its limits: fixed for its life."""

    mounts: tuple[Mount, ...] = ()
    read_only: bool = False  # nothing can be written but /tmp, what is memory, and mounts that say so
    powerless: bool = False  # not even its root has capabilities
    slots: tuple[str, ...] = ()  # where mounts will be that are not known yet: see Sandboxes.bind

    @property
    def unbound(self) -> Shape:
        """The shape of a warm sandbox that becomes one like this: its mounts are not known yet, only their places."""
        return replace(self, mounts=(), slots=tuple(mount.target for mount in self.mounts)) if self.mounts else self


PLAIN = Shape()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    runtime: Runtime
    image: str = "host"  # or the digest of one of the engine's images, or what `Images.refer` names
    limits: Limits = Limits()
    hostname: str = "sandbox"
    egress: HostList = NOTHING  # in force before the first process of the sandbox starts
    shape: Shape = PLAIN
    shares: str = ""  # the sandbox whose workspace is this one's too, live in both directions
    life: float = 0.0  # seconds after which it may end by itself, unless it is prolonged; 0: the engine's own choice
    tenant: str = ""  # of the gateway, for engines that keep tenants apart; empty: a user of the daemon's machine


@dataclass(frozen=True, slots=True)
class Place:
    """The user, directories and environment that commands in a sandbox start with."""

    user: Identity  # the default one: unprivileged, unless an image says otherwise
    home: bytes
    workspace: bytes
    env: tuple[tuple[bytes, bytes], ...]  # PATH, HOME, LANG, ...
    loader: bytes = b""  # the library for parked interpreters, inside; empty: there is none
    workdir: bytes = b"/workspace"  # where commands start that say nothing
    entrypoint: tuple[bytes, ...] = ()  # what the image puts before a command
    command: tuple[bytes, ...] = ()  # what it runs when there is none
    capable: bool = False  # its user is root and can do there what package managers need: chown, setuid, ...

    @property
    def file_owner(self) -> Identity:
        """The default user, in the form that file operations take."""
        return Identity(self.user.uid, self.user.gid)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that a sandbox asked of the network and did not get."""

    host: str  # the name that was asked for, or by which the address is known here; empty: no name is known
    address: str  # empty: it was the name that was refused
    port: int  # 0: none is known
    reason: str  # a stable word: docs/egress.md
    at: float  # unix seconds, of the last time


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that the machine alone can tell about a sandbox: core asks before and after every command."""

    alive: bool
    oom_kills: int  # so far
    refusals: tuple[Refusal, ...] = ()  # since the last observation: each is told once
    refusals_unknown: str = ""  # why they could not be read now


@dataclass(frozen=True, slots=True)
class Usage:
    """The part of its machine that a sandbox takes."""

    cpu_seconds: float  # since it was created or started
    memory: int  # bytes, now; a stopped one takes none


@dataclass(frozen=True, slots=True)
class Room:
    """All that sandboxes can have together, elsewhere than on this machine."""

    cpus: float
    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """Whether a runtime works here, found out by starting a sandbox with it."""

    runtime: Runtime
    available: bool
    version: str = ""
    reason: str = ""  # why not
    hint: str = ""  # what to install or do
    notes: tuple[str, ...] = ()  # e.g. which network stack is used
    emulated: bool = False  # a virtual machine without the processor's help: everything in it is some ten times slower


class EngineError(Exception):
    """A sandbox could not be made or reached. `control` names what could not be applied; `reason` is a stable word
    where there are several (images: see docs/images.md)."""

    def __init__(self, control: str, cause: str, hint: str = "", reason: str = "") -> None:
        self.control = control
        self.cause = cause
        self.hint = hint
        self.reason = reason
        super().__init__(f"{control}: {cause}")


class MountRefused(EngineError):
    """A directory of the machine is not mounted: its owner may not see it, or no sandbox may."""


class SharingRefused(EngineError):
    """A sandbox of this runtime cannot have the workspace of another one."""


class Sandboxes(Protocol):
    """The life of one sandbox, each by its id."""

    async def create(self, sandbox: str, spec: SandboxSpec) -> None:
        """Returns when the agent answers. On any failure nothing is left. Fails closed: EngineError.

        Inside, `/run` is memory and not disk, and its root can write there: core keeps in it what must survive the
        daemon and reach no file of the machine.
        """

    async def bind(self, sandbox: str, mounts: Sequence[Mount]) -> None:
        """Gives a sandbox that was made with slots a mount for each, before a command or anything that is root there
        has run in it: from then on it is like one that was created with them, and is started again as such. After an
        EngineError it is of no more use."""

    async def attach(self, sandbox: str) -> tuple[Sandbox, Place]:
        """Opens the link; every caller gets the same one. EngineError when the sandbox is gone."""

    async def observe(self, sandbox: str) -> Observation:
        """Answers at once. A sandbox that is not there is not alive."""

    async def measure(self, sandbox: str) -> Usage:
        """A sandbox that is not there takes nothing."""

    async def prolong(self, sandbox: str, life: float) -> None:
        """It may end by itself after that many seconds from now, and not before. It is for engines whose sandboxes go
        on when the daemon's machine is gone; others do nothing. One that is not there stays so."""

    async def set_egress(self, sandbox: str, hosts: HostList) -> None:
        """In force when it returns, with no moment in between: new connections follow the new list, those that it
        does not allow any more are cut. On EngineError the old list is in force."""

    async def stop(self, sandbox: str) -> None:
        """Ends every process and gives back everything but the files. Fine to call twice, and for one that died."""

    async def start(self, sandbox: str, spec: SandboxSpec) -> None:
        """Brings a stopped sandbox back, on its own files, also after a reboot. Like `create`; on failure it is
        stopped as before. The spec is the one it was created with, but for limits and egress."""

    async def destroy(self, sandbox: str) -> None:
        """Removes every trace, whatever state it is in. Fine to call twice, or for one that never was."""


class Engine(Sandboxes, Protocol):
    """Everything that is not about one sandbox that core knows: what can be made here, of what, and what is there."""

    @property
    def images(self) -> Images: ...

    async def probe(self) -> Sequence[RuntimeReport]:
        """All known runtimes, the strongest first. Slow the first time, remembered after."""

    async def choose(self, wanted: Runtime | None = None) -> RuntimeReport:
        """The one that is wanted, or the strongest that works; an unavailable one where none does. It does not wait for
        those that take long to try, unless they are needed."""

    async def edition(self, spec: SandboxSpec) -> str:
        """Names what a sandbox made like this now is made of (content, agent, runtime, ...): one that was made earlier
        is as good as a new one if this has not changed. EngineError when none could be made."""

    async def keep_ready(self, wanted: Mapping[SandboxSpec, int]) -> Mapping[SandboxSpec, int] | None:
        """Has so many of each kind ready from now on, and none of others, so that `create` is fast. Returns how many
        are ready now, or None: this engine has none ready by itself, and core makes warm sandboxes."""

    async def measure_room(self) -> Room | None:
        """None: sandboxes are on this machine, and it has what it has."""

    async def default_egress(self) -> HostList:
        """The hosts that a session may reach that named none: the machine's package registries and code hosts."""

    async def list(self) -> Sequence[str]:
        """Every sandbox of which any trace exists."""

    async def set_aside(self, sandbox: str) -> str:
        """Stops a sandbox that is on no record and keeps its files, where no daemon takes them for a sandbox any more.
        Returns where; empty when there was nothing to keep."""

    def damages(self) -> Sequence[Damage]:
        """Which files of the engine were found damaged since this was last asked: each is told once."""

    async def close(self) -> None:
        """Closes the links. Sandboxes live on."""
