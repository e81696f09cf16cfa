"""The link's data, plain and frozen, and `Sandbox`, the contract that every way into a sandbox fulfils.

The link to the agent implements it; later engines and gateways implement it too. The conformance suite uses nothing
else.
"""

from __future__ import annotations

import enum
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

OUTPUT_WINDOW = 256 * 1024


class Cause(enum.Enum):
    """The reason why a command ended."""

    ITSELF = "itself"
    TIMEOUT = "timeout"
    ENDED = "ended"  # on request


class Scope(enum.IntEnum):
    """The processes that a signal reaches."""

    PROCESS = 0
    GROUP = 1
    TREE = 2


class FileType(enum.Enum):
    FILE = "f"
    DIRECTORY = "d"
    SYMLINK = "l"
    FIFO = "p"
    SOCKET = "s"
    BLOCK_DEVICE = "b"
    CHAR_DEVICE = "c"
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Identity:
    """The user and groups of an operation; None is the agent's own (root of the sandbox)."""

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()


AGENT = Identity()


@dataclass(frozen=True, slots=True)
class TerminalSize:
    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class Rlimit:
    """`resource` is Linux's number (`resource.RLIMIT_*`)."""

    resource: int
    soft: int
    hard: int


class ExecOptions(TypedDict, total=False):
    """The fields of `ExecSpec` that are the same in strings and in bytes."""

    identity: Identity
    stdin: bool
    terminal: TerminalSize | None
    timeout: float | None
    grace: float
    drain: float
    window: int
    umask: int
    rlimits: tuple[Rlimit, ...]
    detached: bool
    keep_capabilities: bool
    parked: bool


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """One command, exactly as it is to be started."""

    argv: tuple[bytes, ...]
    env: tuple[tuple[bytes, bytes], ...] = ()
    cwd: bytes = b"/"
    identity: Identity = AGENT
    stdin: bool = True  # False: /dev/null
    terminal: TerminalSize | None = None
    timeout: float | None = None  # seconds of wall clock
    grace: float = 2.0  # between TERM and KILL
    drain: float = 0.05  # for output pipes that background children hold
    window: int = OUTPUT_WINDOW
    umask: int = 0o022
    rlimits: tuple[Rlimit, ...] = ()
    detached: bool = False
    keep_capabilities: bool = False
    parked: bool = False  # a matching parked interpreter may take this command

    @classmethod
    def of(
        cls,
        *argv: str | bytes,
        env: Mapping[str, str] | None = None,
        cwd: str | bytes = b"/",
        **options: Unpack[ExecOptions],
    ) -> ExecSpec:
        """Makes a spec from strings."""
        variables = tuple((os.fsencode(name), os.fsencode(value)) for name, value in (env or {}).items())
        return cls(tuple(map(os.fsencode, argv)), variables, os.fsencode(cwd), **options)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. Exactly one of exit_code and signal is set."""

    exit_code: int | None
    signal: int | None
    cause: Cause
    stdout_bytes: int
    stderr_bytes: int
    wall_seconds: float
    user_seconds: float
    system_seconds: float
    max_rss_kib: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that was run to its end, with the output that was kept."""

    outcome: Outcome
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class CommandInfo:
    id: int
    pid: int
    running: bool
    attached: bool
    exit_code: int | None
    signal: int | None
    cause: Cause | None
    started: float  # unix time
    stdout_bytes: int
    stderr_bytes: int
    name: bytes  # argv[0]


@dataclass(frozen=True, slots=True)
class Entry:
    name: bytes
    type: FileType
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: bytes | None = None  # of a symlink
    unreadable: bool = False  # a directory that a recursive listing could not enter


@dataclass(frozen=True, slots=True)
class WatchEvent:
    mask: int
    cookie: int
    name: bytes
    overflow: bool = False  # events were lost


class ByteReader(Protocol):
    """An output stream. The writer inside the sandbox waits when the caller does not read."""

    async def read(self) -> bytes:
        """The next bytes, b"" at the end."""

    async def read_all(self) -> tuple[bytes, ...]:
        """All bytes that have arrived, in pieces, up to where some were dropped; waits for the first. Empty at the
        end."""

    @property
    def ready(self) -> bool:
        """Whether `read_all` returns, or raises, at once."""

    def listen(self, callback: Callable[[], object] | None) -> None:
        """Calls back, once and again, when it may have become ready; None ends that."""

    @property
    def position(self) -> int:
        """The offset in the whole stream at which the last read ended; dropped bytes count."""

    @property
    def queued(self) -> int:
        """Bytes that arrived and are not read yet."""

    @property
    def dropped(self) -> int:
        """Bytes lost while no caller was attached."""

    def divert(self, sink: Callable[[bytes], object]) -> None:
        """Passes what is queued and all that arrives to `sink`, at once: there is nothing left to `read`."""


class Process(Protocol):
    """A started command. `wait` returns only when both streams are read to the end or discarded."""

    @property
    def id(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def handed_over(self) -> bool:
        """Whether a parked interpreter took this command."""

    @property
    def copied(self) -> bool:
        """Whether that is a template's copy: the next one waits for another command already."""

    @property
    def ended(self) -> bool:
        """Whether `wait` returns at once."""

    @property
    def stdout(self) -> ByteReader: ...
    @property
    def stderr(self) -> ByteReader: ...
    async def write(self, data: bytes) -> None:
        """Writes to stdin; waits while the command does not read, raises BrokenInput when it never will."""

    async def close_stdin(self) -> None: ...
    async def signal(self, number: int, scope: Scope = Scope.PROCESS) -> None: ...
    async def end(self, grace: float = 2.0) -> None:
        """Asks the agent to end the whole process tree; `wait` returns when it has ended."""

    async def resize(self, size: TerminalSize) -> None: ...
    async def detach(self) -> None:
        """Leaves the command running; `Sandbox.attach` finds it again."""

    def discard(self) -> None:
        """Reads the rest of the output and drops it."""

    async def wait(self) -> Outcome: ...


class Connection(Protocol):
    """A byte stream to a socket inside the sandbox."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close_write(self) -> None: ...
    async def close(self) -> None: ...


class Watcher(Protocol):
    """The changes of a path, in order; ends when the path is gone."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...
    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A way into one sandbox: runs commands and handles files."""

    async def start(self, spec: ExecSpec) -> Process: ...
    async def attach(
        self, command: int, stdout_from: int = 0, stderr_from: int = 0, *, hold: bool = False, keep: int = 0
    ) -> Process:
        """Attaches to a command. With `hold` the agent keeps the output of an ended command until `release`, so that
        the caller can store it first and read it again. A hold does not survive a lost connection, and a command that
        still runs waits when its window is full; unless the agent is to keep only the last `keep` bytes that were
        read (at most a quarter of the window)."""

    async def commands(self) -> Sequence[CommandInfo]: ...
    async def park(self, spec: ExecSpec, loader: bytes, *, keep: float | None = None) -> None:
        """Starts an interpreter that waits for code in place of its last argument, with `loader` (a library in the
        sandbox) preloaded; returns when it waits. It ends after `keep` seconds without use. Up to four that were
        parked alike wait beside each other; others of the same kind are replaced. A matching start with `parked` is
        handed to it. AgentError UNSUPPORTED when it cannot be parked."""

    async def release(self, command: int) -> None: ...
    def read_stream(
        self, path: bytes, *, offset: int = 0, length: int | None = None, identity: Identity = AGENT
    ) -> AsyncIterator[bytes]: ...
    async def read_file(
        self,
        path: bytes,
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = 64 << 20,
        identity: Identity = AGENT,
    ) -> bytes: ...
    async def write_file(
        self,
        path: bytes,
        content: bytes | AsyncIterable[bytes],
        *,
        append: bool = False,
        exclusive: bool = False,
        mode: int | None = None,
        identity: Identity = AGENT,
    ) -> int:
        """Returns the file's new size."""

    def list_stream(
        self, path: bytes, *, recursive: bool = False, identity: Identity = AGENT
    ) -> AsyncIterator[Entry]: ...
    async def list_dir(
        self, path: bytes, *, recursive: bool = False, limit: int = 100_000, identity: Identity = AGENT
    ) -> list[Entry]: ...
    async def stat(self, path: bytes, *, follow: bool = True, identity: Identity = AGENT) -> Entry: ...
    async def mkdir(
        self, path: bytes, *, mode: int = 0o755, parents: bool = True, identity: Identity = AGENT
    ) -> None: ...
    async def move(self, source: bytes, target: bytes, *, replace: bool = True, identity: Identity = AGENT) -> None: ...
    async def remove(self, path: bytes, *, recursive: bool = False, identity: Identity = AGENT) -> None: ...
    async def chmod(self, path: bytes, mode: int, *, identity: Identity = AGENT) -> None: ...
    async def watch(self, path: bytes, *, identity: Identity = AGENT) -> Watcher:
        """Returns once the watch is in place."""

    async def connect(
        self, *, port: int | None = None, path: bytes | None = None, identity: Identity = AGENT
    ) -> Connection: ...
