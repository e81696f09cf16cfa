"""The agent's side of the codec, for the agent that tests play: decodes requests, encodes answers."""

from __future__ import annotations

import struct

from k8e.link.codec.frames import FrameType
from k8e.link.codec.records import (
    _CAUSES,
    _COMMAND,
    _ENTRY,
    _EVENT,
    _EXITED,
    _LENGTH,
    _OUTCOME,
    _SIGNALLED,
    _UNREADABLE,
)
from k8e.link.codec.requests import (
    _ATTACH,
    _EXEC,
    _FILE,
    _PARK,
    _RLIMIT,
    _U32,
    DETACHED,
    KEEP_CAPABILITIES,
    NO_STDIN,
    OWN_ID,
    PARKED,
    PTY,
    FileRequest,
)
from k8e.link.model import CommandInfo, Entry, ExecSpec, Identity, Outcome, Rlimit, TerminalSize, WatchEvent


def _decode_id(value: int) -> int | None:
    return None if value == OWN_ID else value


def decode_park(payload: bytes) -> tuple[ExecSpec, bytes, float | None]:
    """Decodes what `encode_park` encoded, for the agent that tests play."""
    kept, length = _PARK.unpack_from(payload)
    end = _PARK.size + length
    return decode_exec(payload[end:]), payload[_PARK.size : end], kept / 1000 if kept else None


def decode_exec(payload: bytes) -> ExecSpec:
    """Decodes what `encode_exec` encoded, for the agent that tests play. Raises ValueError or struct.error."""
    (flags, uid, gid, timeout, grace, drain, window, umask, rows, columns, group_count, rlimit_count, argc, envc) = (
        _EXEC.unpack_from(payload)
    )
    at = _EXEC.size
    groups = struct.unpack_from(f"<{group_count}I", payload, at)
    at += 4 * group_count
    limits = []
    for _ in range(rlimit_count):
        resource, _zero, soft, hard = _RLIMIT.unpack_from(payload, at)
        limits.append(Rlimit(resource, soft, hard))
        at += _RLIMIT.size
    texts = []
    for _ in range(1 + argc + envc):
        (length,) = _U32.unpack_from(payload, at)
        at += 4
        if at + length > len(payload):
            raise ValueError("a text goes beyond the end")
        texts.append(payload[at : at + length])
        at += length
    if at != len(payload):
        raise ValueError("something follows the end")
    variables = (text.partition(b"=") for text in texts[1 + argc :])
    return ExecSpec(
        argv=tuple(texts[1 : 1 + argc]),
        env=tuple((name, value) for name, _, value in variables),
        cwd=texts[0],
        identity=Identity(_decode_id(uid), _decode_id(gid), groups),
        stdin=not flags & NO_STDIN,
        terminal=TerminalSize(rows, columns) if flags & PTY else None,
        timeout=timeout / 1000 if timeout else None,
        grace=grace / 1000,
        drain=drain / 1000,
        window=window,
        umask=umask,
        rlimits=tuple(limits),
        detached=bool(flags & DETACHED),
        parked=bool(flags & PARKED),
        keep_capabilities=bool(flags & KEEP_CAPABILITIES),
    )


def decode_attach(payload: bytes) -> tuple[int, int]:
    stdout_from, stderr_from = _ATTACH.unpack(payload)
    return stdout_from, stderr_from


def decode_file_request(operation: FrameType, payload: bytes) -> FileRequest:
    """Decodes what `FileRequest.encode` encoded, for the agent that tests play."""
    uid, gid, flags, mode, offset, length, first, second = _FILE.unpack_from(payload)
    if len(payload) != _FILE.size + first + second:
        raise ValueError("the paths do not fill the payload")
    path = payload[_FILE.size : _FILE.size + first]
    identity = Identity(_decode_id(uid), _decode_id(gid))
    return FileRequest(operation, path, payload[_FILE.size + first :], flags, mode, offset, length, identity)


def encode_record(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def encode_entry(entry: Entry) -> bytes:
    target = entry.target or b""
    fixed = _ENTRY.pack(
        ord(entry.type.value),
        _UNREADABLE if entry.unreadable else 0,
        0,
        entry.mode,
        entry.uid,
        entry.gid,
        entry.size,
        entry.mtime_ns,
        len(entry.name),
        len(target),
    )
    return encode_record(fixed + entry.name + target)


def encode_event(event: WatchEvent) -> bytes:
    return encode_record(_EVENT.pack(event.mask, event.cookie, len(event.name)) + event.name)


def encode_command(info: CommandInfo) -> bytes:
    how = _EXITED if info.exit_code is not None else _SIGNALLED if info.signal is not None else 0
    cause = next((number for number, cause in _CAUSES.items() if cause is info.cause), 0)
    fixed = _COMMAND.pack(
        info.pid,
        info.id,
        1 if info.running else 2,
        info.attached,
        how,
        cause,
        info.exit_code or info.signal or 0,
        round(info.started * 1000),
        info.stdout_bytes,
        info.stderr_bytes,
        len(info.name),
    )
    return encode_record(fixed + info.name)


def encode_outcome(outcome: Outcome) -> bytes:
    value = outcome.signal if outcome.exit_code is None else outcome.exit_code
    if value is None:
        raise ValueError("an outcome has an exit code or a signal")
    return _OUTCOME.pack(
        _EXITED if outcome.exit_code is not None else _SIGNALLED,
        next(number for number, cause in _CAUSES.items() if cause is outcome.cause),
        0,
        value,
        outcome.stdout_bytes,
        outcome.stderr_bytes,
        round(outcome.wall_seconds * 1e6),
        round(outcome.user_seconds * 1e6),
        round(outcome.system_seconds * 1e6),
        outcome.max_rss_kib,
    )
