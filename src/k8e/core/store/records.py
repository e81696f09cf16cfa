"""Sessions, runs, warm sandboxes, images and approvals as the store keeps them, and as rows of its tables.

A record has a column for each field, read and written by its name. A field's type says how its value is kept; a new
field needs a column of its name (schema.py) and nothing here.
"""

from __future__ import annotations

import contextlib
import enum
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, get_type_hints

from k8e.core.access.lineage import Lineage, parse_lineage, write_lineage
from k8e.core.model import NONE_DENIED, Approval, ApprovalStatus, Denial, Denials, RunResult, Session, Status
from k8e.engine import PLAIN, Limits, Mount, Runtime, Shape
from k8e.policy import NOTHING, HostList, InvalidEntry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session, and what only the daemon knows of it."""

    sandbox: str  # the engine's name for it, never used twice
    session: Session
    boot: str  # within which `used_at` means something
    used_at: float  # monotonic
    reason: str = ""  # why it ended
    parent_sandbox: str = ""  # of the session it is a child of: a session's id may be used again, this never
    fleeting: bool = False  # there for one command, and gone with it
    digest: str = "host"  # of the image, when it was made: what the name means may change


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: str
    sandbox: str
    background: bool
    started: float
    oom_before: int = 0  # kills by the kernel in this sandbox before the run
    command: int | None = None  # the agent's id, 64 bits
    finished: float | None = None
    status: Status = Status.RUNNING
    exit_code: int | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    duration_ms: int = 0
    kept_stdout: int | None = None  # bytes of output kept in the sandbox
    kept_stderr: int | None = None
    denied: Denials = NONE_DENIED
    reason: str = ""  # why it was ended, where that was not the command's own doing nor its caller's
    terminal: bool = False  # clients come and go
    emulated: bool = False  # its session was

    def show(self, session_id: str, stdout: bytes = b"", stderr: bytes = b"") -> RunResult:
        return RunResult(
            run_id=self.run_id,
            session_id=session_id,
            status=self.status,
            exit_code=self.exit_code,
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=self.stdout_bytes,
            stderr_bytes=self.stderr_bytes,
            truncated=self.truncated,
            duration_ms=self.duration_ms,
            denied=self.denied,
            reason=self.reason,
            terminal=self.terminal,
            emulated=self.emulated,
        )


@dataclass(frozen=True, slots=True)
class WarmRecord:
    """A warm sandbox: it belongs to no session yet."""

    sandbox: str
    runtime: Runtime
    image: str
    limits: Limits
    edition: str  # what it was made of, in the engine's words
    ready: bool  # False while it is made, and again from when it is to be destroyed
    shape: Shape = PLAIN


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """A name for an image, and whose it is."""

    owner: int
    tenant: str
    name: str  # canonical
    digest: str
    added: float
    last_used: float


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    approval_id: str
    sandbox: str
    session_id: str
    tenant: str
    owner: int
    action: str
    asker: str
    lineage: Lineage  # of the process that asked
    asked: float
    expires: float  # for people
    boot: str  # within which `deadline` means something
    deadline: float  # monotonic
    status: ApprovalStatus = ApprovalStatus.PENDING
    answerer: str = ""
    answered: float | None = None
    reason: str = ""

    def show(self) -> Approval:
        return Approval(
            approval_id=self.approval_id,
            session_id=self.session_id,
            tenant=self.tenant,
            action=self.action,
            status=self.status,
            asker=self.asker,
            asked=self.asked,
            expires=self.expires,
            answerer=self.answerer,
            answered=self.answered,
            reason=self.reason,
        )


def write_shape(shape: Shape) -> str:
    return json.dumps(asdict(shape)) if shape != PLAIN else ""


def read_shape(text: str) -> Shape:
    if not text:
        return PLAIN
    value = json.loads(text)
    lists = ("kept", "hidden", "private")
    mounts = [{**each, **{name: tuple(each.get(name, ())) for name in lists}} for each in value.pop("mounts")]
    slots = tuple(value.pop("slots", ()))
    return Shape(mounts=tuple(Mount(**each) for each in mounts), slots=slots, **value)


def _read_hosts(text: str) -> HostList:
    """Leaves out entries that an earlier version allowed and this one does not: no session gets more."""
    hosts = NOTHING
    for entry in json.loads(text):
        with contextlib.suppress(InvalidEntry):
            hosts = hosts.plus(HostList.parse([entry]))
    return hosts


def _write_denials(denials: Denials) -> str:
    return json.dumps(asdict(denials)) if denials.entries or denials.more else ""


def _read_denials(text: str) -> Denials:
    if not text:
        return Denials()
    value = json.loads(text)
    return Denials(tuple(Denial(**entry) for entry in value["entries"]), value["more"])


@dataclass(frozen=True, slots=True)
class Codec:
    """Turns a field's value into a column's and back."""

    write: Callable[[Any], object]
    read: Callable[[Any], Any]


def _keep(value: Any) -> Any:
    return value


_PLAIN: Final = Codec(_keep, _keep)
_CODECS: Final[Mapping[object, Codec]] = {
    bool: Codec(_keep, bool),
    tuple[str, ...]: Codec(json.dumps, lambda text: tuple(json.loads(text))),
    Mapping[str, str]: Codec(lambda labels: json.dumps(dict(labels)), json.loads),
    Limits: Codec(lambda limits: json.dumps(asdict(limits)), lambda text: Limits(**json.loads(text))),
    HostList: Codec(lambda hosts: json.dumps(hosts.texts), _read_hosts),
    Shape: Codec(write_shape, read_shape),
    Denials: Codec(_write_denials, _read_denials),
    Lineage: Codec(write_lineage, parse_lineage),
}
# SQLite's integers have a sign, and the agent's ids 64 bits.
_COMMAND: Final = Codec(
    lambda command: None if command is None else str(command), lambda text: None if text is None else int(text)
)


def _find_codec(kind: object) -> Codec:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return Codec(lambda member: member.value, kind)
    return _CODECS.get(kind, _PLAIN)


class _Columns:
    """Fields that are written together. Every command writes two rows, of values that are nearly all kept as they are:
    these are taken all at once."""

    def __init__(self, fields: Sequence[tuple[str, str, Codec]]) -> None:
        self._columns = tuple(column for _, column, _ in fields)
        self._values: Callable[[Any], tuple[object, ...]] = attrgetter(*(name for name, _, _ in fields))
        self._written = [(column, codec.write) for _, column, codec in fields if codec.write is not _keep]

    def write(self, record: object) -> dict[str, object]:
        values = dict(zip(self._columns, self._values(record), strict=True))
        for column, write in self._written:
            values[column] = write(values[column])
        return values


class Fields(Generic[T]):
    """The fields of a record as columns; `within`: fields that are records themselves, in the same row."""

    def __init__(
        self,
        record: type[T],
        *,
        columns: Mapping[str, str] = MappingProxyType({}),  # where one is not called like its field
        codecs: Mapping[str, Codec] = MappingProxyType({}),
        left_out: Collection[str] = (),
        within: Mapping[str, Fields[Any]] = MappingProxyType({}),
    ) -> None:
        self._record = record
        self._within = within
        hints = get_type_hints(record)
        names = [name for name in hints if name not in left_out and name not in within]
        self._fields = [(name, columns.get(name, name), codecs.get(name) or _find_codec(hints[name])) for name in names]
        self._all = _Columns(self._fields)
        self._some: dict[frozenset[str], _Columns] = {}  # by the columns that were asked for

    @property
    def columns(self) -> tuple[str, ...]:
        """Without those of records within."""
        return tuple(column for _, column, _ in self._fields)

    def write_some(self, record: T, columns: frozenset[str]) -> dict[str, object]:
        """By the names of the columns, without those of records within."""
        some = self._some.get(columns)
        if some is None:
            some = self._some[columns] = _Columns([each for each in self._fields if each[1] in columns])
        return some.write(record)

    def write(self, record: T) -> dict[str, object]:
        """By the names of the columns."""
        values = self._all.write(record)
        for name, fields in self._within.items():
            values |= fields.write(getattr(record, name))
        return values

    def read(self, row: sqlite3.Row) -> T:
        values = {name: codec.read(row[column]) for name, column, codec in self._fields}
        for name, fields in self._within.items():
            values[name] = fields.read(row)
        return self._record(**values)


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    name: str
    keys: tuple[str, ...]
    fields: Fields[T]

    def insert(self, connection: sqlite3.Connection, record: T, *, instead: bool = False) -> None:
        """`instead`: of a row with the same keys."""
        values = self.fields.write(record)
        columns, places = ", ".join(values), ", ".join(f":{column}" for column in values)
        connection.execute(
            f"INSERT {'OR REPLACE ' if instead else ''}INTO {self.name} ({columns}) VALUES ({places})", values
        )

    def update(self, connection: sqlite3.Connection, record: T, columns: Iterable[str], condition: str = "") -> int:
        """Writes these columns of the row with the record's keys; returns how many rows there were."""
        changes = ", ".join(f"{column} = :{column}" for column in columns)
        found = " AND ".join([*(f"{key} = :{key}" for key in self.keys), *filter(None, [condition])])
        values = self.fields.write(record)
        return connection.execute(f"UPDATE {self.name} SET {changes} WHERE {found}", values).rowcount


_SESSION: Final = Fields(
    Session, columns={"parent": "parent_id", "secret_keys": "withheld"}, left_out=("denied", "children", "load")
)
SESSIONS: Final = Table(
    "sessions",
    ("sandbox",),
    Fields(SessionRecord, columns={"parent_sandbox": "parent"}, within={"session": _SESSION}),
)
RUNS: Final = Table("runs", ("run_id",), Fields(RunRecord, codecs={"command": _COMMAND}))
WARM: Final = Table("warm", ("sandbox",), Fields(WarmRecord))
APPROVALS: Final = Table("approvals", ("approval_id",), Fields(ApprovalRecord))
IMAGES: Final = Table("images", ("owner", "tenant", "name"), Fields(ImageRecord))
