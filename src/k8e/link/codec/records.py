"""Parses what the agent sends: directory entries, events, commands, and the payloads of OPENED and RESULT. Pure.

All of it comes from inside a sandbox: every length has a limit and every enumeration is closed. Anything else is a
ProtocolViolation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

from k8e.link.errors import ProtocolViolation, Stage
from k8e.link.model import Cause, CommandInfo, Entry, FileType, Outcome, WatchEvent

MAX_NAME: Final = 4096  # PATH_MAX: a longer one could not be used for anything
MAX_SIGNAL: Final = 64
IN_Q_OVERFLOW: Final = 0x4000

_EXITED: Final = 1
_SIGNALLED: Final = 2
_UNREADABLE: Final = 1
_ENDED: Final = 1
_HANDED_OVER: Final = 2
_COPY: Final = 4
_CAUSES: Final = {0: Cause.ITSELF, 1: Cause.TIMEOUT, 2: Cause.ENDED}
_TYPES: Final = {ord(kind.value): kind for kind in FileType}

_LENGTH: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<BBHIIIQqII")
_EVENT: Final = struct.Struct("<III")
_COMMAND: Final = struct.Struct("<IQBBBBIQQQI")
_OPENED: Final = struct.Struct("<IIQQQ")
_OUTCOME: Final = struct.Struct("<BBHIQQQQQQ")

MAX_RECORD: Final = _ENTRY.size + 2 * MAX_NAME

Record = TypeVar("Record")


def _refuse(what: str) -> NoReturn:
    raise ProtocolViolation(what)


def parse_entry(record: bytes) -> Entry:
    if len(record) < _ENTRY.size:
        _refuse("an entry is too short")
    kind, flags, zero, mode, uid, gid, size, mtime, name_length, target_length = _ENTRY.unpack_from(record)
    if len(record) != _ENTRY.size + name_length + target_length or max(name_length, target_length) > MAX_NAME:
        _refuse("an entry's lengths do not add up")
    if kind not in _TYPES or flags > _UNREADABLE or zero or mode > 0o7777:
        _refuse("an entry has an unknown type or mode")
    name = record[_ENTRY.size : _ENTRY.size + name_length]
    target = record[_ENTRY.size + name_length :]
    file_type = _TYPES[kind]
    if b"\0" in name or b"\0" in target or (target and file_type is not FileType.SYMLINK):
        _refuse("an entry has an impossible name or target")
    if flags and file_type is not FileType.DIRECTORY:
        _refuse("what is no directory could not be entered")
    shown = target if file_type is FileType.SYMLINK else None
    return Entry(name, file_type, mode, uid, gid, size, mtime, shown, unreadable=flags == _UNREADABLE)


def parse_event(record: bytes) -> WatchEvent:
    if len(record) < _EVENT.size:
        _refuse("an event is too short")
    mask, cookie, length = _EVENT.unpack_from(record)
    name = record[_EVENT.size :]
    if len(name) != length or length > MAX_NAME or b"\0" in name:
        _refuse("an event's name is impossible")
    return WatchEvent(mask, cookie, name, bool(mask & IN_Q_OVERFLOW))


def _parse_end(how: int, cause: int, value: int) -> tuple[int | None, int | None, Cause]:
    if cause not in _CAUSES:
        _refuse(f"a command ended for unknown reason {cause}")
    if how == _EXITED and value <= 255:
        return value, None, _CAUSES[cause]
    if how == _SIGNALLED and 1 <= value <= MAX_SIGNAL:
        return None, value, _CAUSES[cause]
    _refuse(f"a command ended impossibly: {how}, {value}")


def parse_command(record: bytes) -> CommandInfo:
    if len(record) < _COMMAND.size:
        _refuse("a command's record is too short")
    pid, command, state, attached, how, cause, value, started, stdout, stderr, length = _COMMAND.unpack_from(record)
    name = record[_COMMAND.size :]
    if len(name) != length or length > MAX_NAME:
        _refuse("a command's name is impossible")
    if state not in (1, 2) or attached > 1 or command == 0:
        _refuse(f"a command is in unknown state {state}")
    exit_code, signal, why = None, None, None
    # An ended command whose supervisor was killed (LOST) ended in no known way: 0.
    if state == 2 and how:
        exit_code, signal, why = _parse_end(how, cause, value)
    return CommandInfo(
        command, pid, state == 1, attached == 1, exit_code, signal, why, started / 1000, stdout, stderr, name
    )


def parse_only_entry(payload: bytes) -> Entry:
    """The entry that READ's OPENED and STAT's RESULT consist of; it has no name."""
    if len(payload) < 4 or _LENGTH.unpack_from(payload)[0] != len(payload) - 4:
        _refuse("an entry's length is wrong")
    entry = parse_entry(payload[4:])
    if entry.name:
        _refuse("a nameless entry has a name")
    return entry


class Attachment(NamedTuple):
    """OPENED of EXEC and ATTACH."""

    pid: int
    ended: bool
    received: int
    stdout_start: int
    stderr_start: int
    handed_over: bool = False  # to an interpreter that was parked
    copied: bool = False  # which is a template's copy

    def encode(self) -> bytes:
        state = _ENDED * self.ended | _HANDED_OVER * self.handed_over | _COPY * self.copied
        return _OPENED.pack(self.pid, state, self.received, self.stdout_start, self.stderr_start)


def parse_attachment(payload: bytes) -> Attachment:
    if len(payload) != _OPENED.size:
        _refuse("OPENED has the wrong size")
    pid, state, received, stdout_start, stderr_start = _OPENED.unpack(payload)
    if state > _ENDED | _HANDED_OVER | _COPY or state & _COPY > 2 * (state & _HANDED_OVER):
        _refuse("OPENED is malformed")
    return Attachment(
        pid,
        bool(state & _ENDED),
        received,
        stdout_start,
        stderr_start,
        handed_over=bool(state & _HANDED_OVER),
        copied=bool(state & _COPY),
    )


def parse_outcome(payload: bytes) -> Outcome:
    """EXEC's RESULT without code and errno."""
    if len(payload) != _OUTCOME.size:
        _refuse("RESULT has the wrong size")
    how, cause, zero, value, stdout, stderr, wall, user, system, resident = _OUTCOME.unpack(payload)
    if zero:
        _refuse("RESULT is malformed")
    exit_code, signal, why = _parse_end(how, cause, value)
    return Outcome(exit_code, signal, why, stdout, stderr, wall / 1e6, user / 1e6, system / 1e6, resident)


def parse_stage(payload: bytes) -> Stage:
    """Parses the RESULT of an EXEC that started nothing."""
    try:
        return Stage(*_LENGTH.unpack(payload))
    except (struct.error, ValueError):
        _refuse("RESULT has no valid stage")


def parse_count(payload: bytes) -> int:
    """Parses the RESULT of WRITE and LIST."""
    if len(payload) != 8:
        _refuse("RESULT has the wrong size")
    return int.from_bytes(payload, "little")


class RecordReader(Generic[Record]):
    """Records out of a stream that may be cut anywhere. Holds at most one incomplete record."""

    def __init__(self, parse: Callable[[bytes], Record], longest: int = MAX_RECORD) -> None:
        self._parse = parse
        self._longest = longest
        self._rest = b""

    @property
    def buffered(self) -> int:
        return len(self._rest)

    def feed(self, content: bytes) -> list[Record]:
        data = self._rest + content
        records = []
        start = 0
        while len(data) - start >= 4:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > self._longest:
                _refuse(f"a record of {length} bytes")
            after = start + 4 + length
            if after > len(data):
                break
            records.append(self._parse(data[start + 4 : after]))
            start = after
        self._rest = data[start:]
        return records

    def finish(self) -> None:
        if self._rest:
            _refuse("the stream ended within a record")
