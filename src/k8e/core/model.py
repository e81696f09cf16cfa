"""Sessions and runs as plain data. Sizes are bytes, times are unix seconds, output is bytes."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from k8e.engine import PLAIN, Limits, Runtime, RuntimeReport, Shape
from k8e.policy import NOTHING, HostList

WORKSPACE = b"/workspace"
DEFAULT_TIMEOUT = 30.0
OUTPUT_LIMIT = 1 << 20  # kept per stream: the first half and the last half
MAX_ENV_KEYS = 64
MAX_ENV_BYTES = 32 << 10
MAX_MESSAGE = 64 << 20


class Language(enum.Enum):
    BASH = "bash"
    PYTHON = "python"
    NODE = "node"
    TS = "ts"

    @classmethod
    def _missing_(cls, value: object) -> Language | None:
        """`js` is another word for node."""
        return cls.NODE if value == "js" else None


class Phase(enum.Enum):
    """Where a session is in its life. Written before the step it announces is begun."""

    CREATING = "creating"
    ACTIVE = "active"
    STOPPING = "stopping"
    STOPPED = "stopped"  # its files are kept, nothing of it runs; persistent ones only
    STARTING = "starting"
    DESTROYING = "destroying"
    DESTROYED = "destroyed"


class Status(enum.Enum):
    RUNNING = "running"
    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    OOM_KILLED = "oom_killed"
    LOST = "lost"


class Scope(enum.Enum):
    """The rights of a caller; each includes the ones before it."""

    RUN = "run"  # use the sandboxes of its own tenant
    OPERATOR = "operator"  # of all its tenants, and answer for people
    ADMIN = "admin"  # everything, API keys included


REMOTE = -1  # the owner of what API keys made: no user of this machine


@dataclass(frozen=True, slots=True)
class Meant:
    """The sessions that a caller means, of those that it may see: ids are unique for one owner and tenant only."""

    owner: int | None = None  # a uid, or REMOTE; None: any
    tenant: str = ""  # empty: any

    def covers(self, owner: int, tenant: str) -> bool:
        return self.owner in (None, owner) and self.tenant in ("", tenant)


@dataclass(frozen=True, slots=True)
class Caller:
    """Makes a request. Doors authenticate callers, core trusts them; access.py says what each may do.

    A caller with an API key has the sessions of its tenant, a user of this machine those of all their tenants.
    """

    uid: int  # REMOTE: known by a key, or a token of the cluster
    tenant: str = ""  # empty: not bound to one
    tenants: tuple[str, ...] = ()  # an operator's others
    scope: Scope = Scope.RUN
    name: str = ""  # of the key or the account, for the log
    confined: bool = False  # to its tenants, also as root: an AI agent's connection is not all of its user
    pid: int = field(default=0, compare=False)  # of the process on this machine; 0: not known
    dialogue: bool = False  # brings what a person answered in the asking program's own dialogue
    meant: Meant = Meant()  # narrows what it sees, for one call

    @property
    def label(self) -> str:
        if ":" in self.name:  # no key's name has one: a service account, account:NAMESPACE/NAME
            return self.name
        return f"key:{self.name}" if self.name else f"uid:{self.uid}"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    path: str
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class ManifestDir:
    path: str


@dataclass(frozen=True, slots=True)
class ManifestRepo:
    path: str
    repo: str
    ref: str = ""


ManifestEntry = ManifestFile | ManifestDir | ManifestRepo


@dataclass(frozen=True, slots=True)
class SessionSpec:
    session_id: str = ""  # empty: chosen here
    tenant: str = ""  # empty: the caller's, or "default"
    runtime: Runtime | None = None  # None: the strongest that works
    image: str = "host"
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits | None = None  # None: the settings'
    ttl: float | None = None  # None: the settings'
    allowed_hosts: Sequence[str] | None = None  # None: the settings' or the engine's; none at all: nothing
    more_hosts: Sequence[str] = ()  # besides the usual ones; not together with allowed_hosts
    manifest: Sequence[ManifestEntry] = ()
    shape: Shape = PLAIN
    secrets: Mapping[str, str] = field(default_factory=dict)  # like env; their values are never kept on a disk
    persistent: bool = False  # it can be stopped and started, survives a reboot, and never expires
    labels: Mapping[str, str] = field(default_factory=dict)  # what a front door wants to find again (its profile)
    workdir: str = ""  # where its commands start that say nothing, an absolute path; empty: the workspace


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child to be made. It has from its parent what is left out here, and never more than it (children.py)."""

    session_id: str = ""  # empty: chosen here
    runtime: Runtime | None = None
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # its own: the parent's variables are not its business
    limits: Mapping[str, float] = field(default_factory=dict)  # by the names of Limits' fields
    ttl: float | None = None
    allowed_hosts: Sequence[str] | None = None
    read_only: bool | None = None
    powerless: bool | None = None
    agent_type: str = ""  # a label, for people
    workspace_path: str = ""  # where its commands start that say nothing: a directory of the workspace


@dataclass(frozen=True, slots=True)
class HostsChange:
    """A change of a session's list of hosts: a new list, or entries to add and to remove."""

    hosts: Sequence[str] | None = None  # instead of what is there; none at all: nothing is allowed any more
    add: Sequence[str] = ()
    remove: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Denial:
    """Something that a sandbox asked of the network and did not get, and what to do about it."""

    host: str  # empty: no name is known
    address: str  # empty: the name was refused
    port: int  # 0: none is known
    reason: str  # a stable word, see docs/egress.md
    hint: str
    at: float  # the last time
    entry: str = ""  # of a list of hosts: it would allow it; empty: none does


@dataclass(frozen=True, slots=True)
class Denials:
    entries: tuple[Denial, ...] = ()  # oldest first, each different from the others
    more: int = 0  # that are not among them


NONE_DENIED = Denials()


@dataclass(frozen=True, slots=True)
class Load:
    """A session at this moment: what it takes, and what it does."""

    cpu_seconds: float  # since its sandbox was created or started
    memory: int  # bytes
    commands: int  # that run
    denied: int  # hosts and addresses that it was refused lately


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    tenant: str
    owner: int  # uid, or REMOTE
    phase: Phase
    runtime: Runtime
    image: str
    limits: Limits
    env_keys: tuple[str, ...]  # never the values; secrets' too
    created: float
    last_used: float
    ttl: float
    hosts: HostList = NOTHING  # what it may reach
    denied: Denials = NONE_DENIED  # lately; only where one session is asked for
    parent: str = ""  # the id of the session whose workspace it shares and with which it ends
    shape: Shape = PLAIN
    persistent: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    children: tuple[str, ...] = ()  # ids of the sub-agents' sessions that it has now
    workdir: str = ""  # where its commands start that say nothing; empty: the workspace
    secret_keys: tuple[str, ...] = ()  # of a persistent one: to be given again when it is started
    load: Load | None = None  # only where it is asked for
    emulated: bool = False  # its runtime had no help of the processor when it was last started


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal that a person sits at."""

    rows: int = 24
    columns: int = 80
    term: str = ""  # its kind, as TERM has it; empty: not known


@dataclass(frozen=True, slots=True)
class RunSpec:
    session_id: str
    code: str = ""  # with language; or argv
    language: Language = Language.BASH
    argv: tuple[bytes, ...] = ()
    timeout: float = DEFAULT_TIMEOUT
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""  # empty: /workspace
    stdin: bytes = b""
    background: bool = False
    terminal: Terminal | None = None  # then there is one stream, stdout
    entrypoint: bool = False  # argv comes after what the image puts before commands; without argv: the image's command
    user: str = ""  # a name or number of the sandbox's passwd, perhaps with `:` and a group's; empty: the default user


@dataclass(frozen=True, slots=True)
class TerminalSpec:
    """A terminal that a client wants to be at: one that runs without a client, if there is one, else a new one."""

    session_id: str
    terminal: Terminal = Terminal()
    command: str = ""  # for a shell, instead of an interactive one; then the terminal is a new one
    user: str = ""  # as of a run; then the terminal is a new one
    run_id: str = ""  # this one, also when another client is at it
    new: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    run_id: str
    session_id: str
    status: Status
    exit_code: int | None  # None only while running or when lost; 128+n for a signal, 124 for a timeout
    stdout: bytes
    stderr: bytes
    stdout_bytes: int  # all of it, also what was dropped
    stderr_bytes: int
    truncated: bool
    duration_ms: int
    denied: Denials = NONE_DENIED  # while it ran, to any process of the session
    reason: str = ""  # why it was ended, where that was not the command's own doing nor its caller's
    terminal: bool = False  # a client can come back to it while it runs
    emulated: bool = False  # its runtime had no help of the processor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of live output, in the pieces in which it came: joining them costs a copy."""

    stream: int  # 1 stdout, 2 stderr
    pieces: tuple[bytes, ...]

    @property
    def data(self) -> bytes:
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    available: bool
    version: str
    runtime: Runtime | None  # the default
    runtimes: Sequence[RuntimeReport]
    sessions: int
    warm: int  # sandboxes that are ready for a session


@dataclass(frozen=True, slots=True)
class Reservation:
    """Sandboxes of one kind that are to be ready, asked for by a name."""

    name: str
    runtime: Runtime
    image: str
    asked: int
    wanted: int  # as many of them as the machine's settings allow
    ready: int
    trouble: str = ""  # why there are not as many as wanted


@dataclass(frozen=True, slots=True)
class PoolStatus:
    enabled: bool
    most: int  # that are ever ready at once
    warm: int  # that are, of all kinds
    reservations: Sequence[Reservation] = ()


class ApprovalStatus(enum.Enum):
    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"  # without an answer in time
    WITHDRAWN = "withdrawn"  # its session ended first


@dataclass(frozen=True, slots=True)
class Approval:
    """A question to a person, and what became of it. Its texts have no characters that a terminal acts on."""

    approval_id: str
    session_id: str
    tenant: str
    action: str
    status: ApprovalStatus
    asker: str  # a caller's label
    asked: float
    expires: float
    answerer: str = ""
    answered: float | None = None
    reason: str = ""

    @property
    def approved(self) -> bool:
        return self.status is ApprovalStatus.APPROVED


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image by one of its names."""

    name: str  # as people write it
    digest: str
    size: int  # bytes, also of what it shares with others
    owner: int  # whose name for it this is; see images.py
    tenant: str
    added: float
    last_used: float
