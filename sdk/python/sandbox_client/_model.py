"""The results of calls, as plain data. Output is text, decoded as UTF-8 with U+FFFD for what is none, and beside it the
exact bytes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox_client import sandbox_pb2 as pb
from sandbox_client._hints import hint_at_hosts

STDOUT, STDERR = "stdout", "stderr"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that the code asked of the network and did not get; the hint says what to ask for."""

    host: str
    address: str
    port: int
    reason: str
    hint: str

    @classmethod
    def read(cls, message: pb.Refusal, session_id: str) -> Refusal:
        """From the gateway's message."""
        hint = hint_at_hosts(session_id, message.entry, message.hint)
        return cls(message.host, message.address, message.port, message.reason, hint)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run: how it ended, or how it stands, and its output."""

    stdout: str
    stderr: str
    exit_code: int | None  # 124 after a timeout, 128+n for a signal; None while it runs or when its end is not known
    session_id: str
    run_id: str
    status: str  # running, completed, timed_out, killed, oom_killed, lost
    duration_ms: int
    truncated: bool  # some of the output is not here: the middle of more than 1 MiB
    stdout_bytes: int  # how much there was, exactly
    stderr_bytes: int
    denied: tuple[Refusal, ...] = ()
    reason: str = ""  # why it was ended, where that was not the command's own doing nor yours: its session was stopped
    emulated: bool = False  # in a virtual machine without the processor's help: some ten times slower than usual
    raw_stdout: bytes = field(default=b"", repr=False)
    raw_stderr: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, message: pb.ExecResponse) -> RunResult:
        """From the gateway\'s message."""
        return cls(
            stdout=message.stdout.decode("utf-8", "replace"),
            stderr=message.stderr.decode("utf-8", "replace"),
            exit_code=message.exit_code if message.HasField("exit_code") else None,
            session_id=message.session_id,
            run_id=message.run_id,
            status=message.status,
            duration_ms=message.duration_ms,
            truncated=message.truncated,
            stdout_bytes=message.stdout_bytes,
            stderr_bytes=message.stderr_bytes,
            denied=tuple(Refusal.read(refusal, message.session_id) for refusal in message.denied),
            reason=message.reason,
            emulated=message.emulated,
            raw_stdout=message.stdout,
            raw_stderr=message.stderr,
        )


class Chunk(str):
    """A piece of live output: text that can be printed as it is. `data` is exactly what was written; a character that
    was split between two pieces is in the text of the second."""

    stream: str  # STDOUT or STDERR
    data: bytes
    __slots__ = ("data", "stream")

    @classmethod
    def of(cls, text: str, stream: str, data: bytes) -> Chunk:
        """A chunk of that text, which the bytes became."""
        chunk = cls(text)
        chunk.stream = stream
        chunk.data = data
        return chunk


class ChunkReader:
    """Turns the frames of one run into chunks."""

    def __init__(self) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {STDOUT: make("replace"), STDERR: make("replace")}

    def read(self, output: pb.ExecOutput) -> Chunk:
        stream = STDERR if output.stream == pb.STREAM_STDERR else STDOUT
        return Chunk.of(self._decoders[stream].decode(output.data), stream, output.data)

    def rest(self) -> list[Chunk]:
        """Returns the rest: an incomplete character at the very end."""
        last = [(decoder.decode(b"", True), stream) for stream, decoder in self._decoders.items()]
        return [Chunk.of(text, stream, b"") for text, stream in last if text]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session, as its owner sees it."""

    session_id: str
    tenant_id: str
    phase: str  # creating, active, stopping, stopped, starting, destroying, destroyed
    runtime_class: str
    image: str
    env_keys: tuple[str, ...]  # never the values
    created: float
    last_used: float
    ttl: float
    allowed_hosts: tuple[str, ...]
    denied: tuple[Refusal, ...]
    parent_session_id: str = ""  # whose sub-agent's it is, if it is one
    children: tuple[str, ...] = ()  # its sub-agents' sessions
    persistent: bool = False  # it can be stopped and started, and does not end by itself
    secret_keys: tuple[str, ...] = ()  # to be given again when it is started
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    read_only: bool = False
    powerless: bool = False
    emulated: bool = False  # a virtual machine without the processor's help: some ten times slower than usual

    @classmethod
    def read(cls, message: pb.Session) -> SessionInfo:
        """From the gateway\'s message."""
        return cls(
            session_id=message.session_id,
            tenant_id=message.tenant_id,
            phase=message.phase,
            runtime_class=message.runtime_class,
            image=message.image,
            env_keys=tuple(message.env_keys),
            created=message.created,
            last_used=message.last_used,
            ttl=message.ttl,
            allowed_hosts=tuple(message.allowed_hosts),
            denied=tuple(Refusal.read(refusal, message.session_id) for refusal in message.denied),
            parent_session_id=message.parent_session_id,
            children=tuple(message.children),
            persistent=message.persistent,
            secret_keys=tuple(message.secret_keys),
            labels=dict(message.labels),
            read_only=message.read_only,
            powerless=message.powerless,
            emulated=message.emulated,
        )


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An image that sessions can be made of."""

    image: str
    digest: str
    size: int
    added: float
    last_used: float

    @classmethod
    def read(cls, message: pb.Image) -> ImageInfo:
        """From the gateway\'s message."""
        return cls(message.image, message.digest, message.size, message.added, message.last_used)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file or directory in a sandbox."""

    path: str
    raw_path: bytes  # the exact bytes, also where they are not UTF-8
    modified: float
    type: str  # file, directory, symlink, ...
    size: int

    @classmethod
    def read(cls, message: pb.FileInfo) -> FileInfo:
        """From the gateway\'s message."""
        raw = message.path_bytes or message.path.encode()
        return cls(message.path, raw, message.modified, message.type, message.size)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The amount that was copied into a sandbox or out of one."""

    bytes: int
    files: int
    skipped: tuple[str, ...] = ()  # links and special files, which are not copied


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A command that runs in a session."""

    pid: int  # inside the sandbox
    command: str  # its first word
    raw_command: bytes  # the exact bytes of it, also where they are not UTF-8
    started: float  # unix seconds
    stdout_bytes: int  # how much it has written so far
    stderr_bytes: int

    @classmethod
    def read(cls, message: pb.ProcessInfo) -> ProcessInfo:
        """From the gateway's message."""
        return cls(
            pid=message.pid,
            command=message.command,
            raw_command=message.command_bytes or message.command.encode(),
            started=message.started,
            stdout_bytes=message.stdout_bytes,
            stderr_bytes=message.stderr_bytes,
        )


@dataclass(frozen=True, slots=True)
class PipResult:
    """The end of a `pip install`, and all that it wrote."""

    output: str
    exit_code: int | None
    denied: tuple[Refusal, ...]

    @classmethod
    def read(cls, message: pb.PipInstallResponse) -> PipResult:
        """From the gateway\'s message."""
        code = message.exit_code if message.HasField("exit_code") else None
        denied = tuple(Refusal.read(refusal, message.run.session_id) for refusal in message.run.denied)
        return cls(message.output.decode("utf-8", "replace"), code, denied)


@dataclass(frozen=True, slots=True)
class Approval:
    """A question to a person, and what became of it. Its texts have no characters that a terminal acts on."""

    approval_id: str
    session_id: str
    tenant_id: str
    action: str
    status: str  # pending, approved, rejected, expired, withdrawn
    approved: bool  # the only one that means yes
    asked_by: str
    asked_at: float
    expires_at: float
    answered_by: str
    answered_at: float  # 0: not answered
    reason: str

    @classmethod
    def read(cls, message: pb.Approval) -> Approval:
        """From the gateway\'s message."""
        return cls(
            approval_id=message.approval_id,
            session_id=message.session_id,
            tenant_id=message.tenant_id,
            action=message.action,
            status=message.status,
            approved=message.status == "approved",
            asked_by=message.asked_by,
            asked_at=message.asked_at,
            expires_at=message.expires_at,
            answered_by=message.answered_by,
            answered_at=message.answered_at,
            reason=message.reason,
        )


@dataclass(frozen=True, slots=True)
class StatusInfo:
    """Whether sandboxes work at the gateway, and who it says is calling."""

    available: bool
    version: str
    runtime_class: str
    sessions: int
    tenant_id: str
    scope: str
    name: str  # of the caller: that of its API key, or uid:NUMBER for a user of the gateway's machine

    @classmethod
    def read(cls, message: pb.StatusResponse) -> StatusInfo:
        """From the gateway\'s message."""
        return cls(
            available=message.available,
            version=message.version,
            runtime_class=message.runtime_class,
            sessions=message.sessions,
            tenant_id=message.tenant_id,
            scope=message.scope,
            name=message.name,
        )
