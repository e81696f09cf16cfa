"""Encodes the payloads of requests to the agent, and checks them first. Pure.

A value that the protocol cannot carry is a ValueError that names the field; no value is rounded or truncated silently.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from k8e.link.codec.frames import FrameType
from k8e.link.codec.protocol import MAX_CONTROL, MAX_REQUEST, MAX_WINDOW, MIN_WINDOW, WINDOW_STEP
from k8e.link.model import AGENT, ExecSpec, Identity, Rlimit

OWN_ID: Final = 0xFFFF_FFFF
KEEP_MODE: Final = 0xFFFF_FFFF
TO_THE_END: Final = 0xFFFF_FFFF_FFFF_FFFF

PTY: Final = 1
NO_STDIN: Final = 2
DETACHED: Final = 4
KEEP_CAPABILITIES: Final = 8
PARKED: Final = 16

_EXEC: Final = struct.Struct("<8I4H2I4x")  # EXEC_FIXED: the last four bytes carry nothing
_FILE: Final = struct.Struct("<4I2Q2I")
_ATTACH: Final = struct.Struct("<QQ")
_PARK: Final = struct.Struct("<II")
_U32: Final = struct.Struct("<I")
_RLIMIT: Final = struct.Struct("<IIQQ")


def _check_range(field: str, value: int, highest: int, lowest: int = 0) -> int:
    if not lowest <= value <= highest:
        raise ValueError(f"{field} is {value}, must be {lowest} to {highest}")
    return value


def _check_text(field: str, value: bytes) -> bytes:
    if b"\0" in value:
        raise ValueError(f"{field} contains a NUL byte")
    return value


def milliseconds(field: str, seconds: float) -> int:
    """Rounds up: a short time must not become 0, which means none."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{field} is {seconds} seconds")
    return _check_range(f"{field} in milliseconds", math.ceil(round(seconds * 1000, 6)), 0xFFFF_FFFF)


def _encode_id(field: str, value: int | None) -> int:
    # 0xFFFFFFFF means "the agent's own" in the protocol. Linux reads it as -1, so no account has it.
    return OWN_ID if value is None else _check_range(field, value, OWN_ID - 1)


def effective_window(window: int) -> int:
    """Returns the window that the agent uses for the one that EXEC asks for."""
    _check_range("window", window, MAX_WINDOW, MIN_WINDOW)
    return -(-window // WINDOW_STEP) * WINDOW_STEP


Variables = tuple[tuple[bytes, bytes], ...]


class Environments:
    """Encodes environments for one sandbox and remembers the last one: nearly all of its commands have the same."""

    _KEPT: Final = 16 << 10  # a longer one is encoded each time: an idle link is to hold little

    def __init__(self) -> None:
        self._last: tuple[Variables, bytes] = ((), b"")

    def encode(self, env: Variables) -> bytes:
        last, content = self._last
        if env is last:
            return content
        content = encode_environment(env)
        if len(content) <= self._KEPT:
            self._last = (env, content)
        return content


def encode_environment(env: Variables) -> bytes:
    _check_range("number of variables in env", len(env), MAX_REQUEST)
    return _encode_texts((_join_variable(name, value) for name, value in env), lambda at: f"env[{env[at][0]!r}]")


def encode_exec(spec: ExecSpec, environment: bytes | None = None) -> bytes:
    """`environment`: that of the spec, where it is encoded already."""
    if not spec.argv:
        raise ValueError("argv is empty")
    if not spec.cwd:
        raise ValueError("cwd is empty")
    timeout = 0
    if spec.timeout is not None:
        timeout = _check_range("timeout in milliseconds", milliseconds("timeout", spec.timeout), 0xFFFF_FFFF, 1)
    flags = (
        PTY * (spec.terminal is not None)
        | NO_STDIN * (not spec.stdin)
        | DETACHED * spec.detached
        | KEEP_CAPABILITIES * spec.keep_capabilities
        | PARKED * spec.parked
    )
    size = spec.terminal
    fixed = _encode_fixed(
        flags,
        spec.identity.uid,
        spec.identity.gid,
        timeout,
        spec.grace,
        spec.drain,
        spec.window,
        spec.umask,
        size.rows if size else 0,
        size.columns if size else 0,
        len(spec.identity.groups),
        len(spec.rlimits),
        len(spec.argv),
        len(spec.env),
    )
    parts = [fixed]
    parts += [_U32.pack(_check_range("identity.groups", group, OWN_ID - 1)) for group in spec.identity.groups]
    parts += [_encode_rlimit(limit) for limit in spec.rlimits]
    parts.append(_encode_texts((spec.cwd, *spec.argv), lambda at: f"argv[{at - 1}]" if at else "cwd"))
    parts.append(encode_environment(spec.env) if environment is None else environment)
    payload = b"".join(parts)
    if len(payload) > MAX_REQUEST:
        raise ValueError(f"argv and env take {len(payload)} bytes together, the limit is {MAX_REQUEST}")
    return payload


@functools.lru_cache(maxsize=64)
def _encode_fixed(
    flags: int,
    uid: int | None,
    gid: int | None,
    timeout: int,
    grace: float,
    drain: float,
    window: int,
    umask: int,
    rows: int,
    columns: int,
    groups: int,
    rlimits: int,
    arguments: int,
    variables: int,
) -> bytes:
    """The numbers at the beginning of EXEC: of most commands the same."""
    return _EXEC.pack(
        flags,
        _encode_id("identity.uid", uid),
        _encode_id("identity.gid", gid),
        timeout,
        milliseconds("grace", grace),
        milliseconds("drain", drain),
        effective_window(window),
        _check_range("umask", umask, 0o777),
        _check_range("terminal.rows", rows, 0xFFFF),
        _check_range("terminal.columns", columns, 0xFFFF),
        _check_range("number of identity.groups", groups, 0xFFFF),
        _check_range("number of rlimits", rlimits, 0xFFFF),
        _check_range("number of arguments", arguments, MAX_REQUEST),
        _check_range("number of variables in env", variables, MAX_REQUEST),
    )


def _encode_texts(texts: Iterable[bytes], name: Callable[[int], str]) -> bytes:
    """`name`: the field of one, which only a refusal needs."""
    parts = []
    for index, text in enumerate(texts):
        if b"\0" in text:
            raise ValueError(f"{name(index)} contains a NUL byte")
        parts.append(_U32.pack(len(text)))
        parts.append(text)
    return b"".join(parts)


def encode_park(spec: ExecSpec, loader: bytes, keep: float | None) -> bytes:
    """Encodes a command whose last argument is a placeholder for the program."""
    if not loader or len(spec.argv) < 2:
        raise ValueError("a parked command is an interpreter in a library's hands, and at its end a placeholder")
    kept = 0 if keep is None else _check_range("keep in milliseconds", milliseconds("keep", keep), 0xFFFF_FFFF, 1)
    payload = _PARK.pack(kept, len(loader)) + _check_text("loader", loader) + encode_exec(spec)
    if len(payload) > MAX_REQUEST:
        raise ValueError(f"argv and env take {len(payload)} bytes together, the limit is {MAX_REQUEST}")
    return payload


def _encode_rlimit(limit: Rlimit) -> bytes:
    return _RLIMIT.pack(
        _check_range("rlimits.resource", limit.resource, 0xFFFF_FFFF),
        0,
        _check_range("rlimits.soft", limit.soft, TO_THE_END),
        _check_range("rlimits.hard", limit.hard, TO_THE_END),
    )


def _join_variable(name: bytes, value: bytes) -> bytes:
    if not name or b"=" in name:
        raise ValueError(f"env has the name {name!r}")
    return b"%b=%b" % (name, value)


def encode_attach(stdout_from: int, stderr_from: int) -> bytes:
    return _ATTACH.pack(
        _check_range("stdout_from", stdout_from, TO_THE_END), _check_range("stderr_from", stderr_from, TO_THE_END)
    )


@dataclass(frozen=True, slots=True)
class FileRequest:
    """An operation on files or sockets; the protocol's page says what each field means to each."""

    operation: FrameType
    path: bytes
    second: bytes = b""
    flags: int = 0
    mode: int = 0
    offset: int = 0
    length: int = 0
    identity: Identity = AGENT

    def encode(self) -> bytes:
        if self.identity.groups:
            raise ValueError("identity.groups: file operations take a user and one group")
        payload = (
            _FILE.pack(
                _encode_id("identity.uid", self.identity.uid),
                _encode_id("identity.gid", self.identity.gid),
                self.flags,
                self.mode if self.mode == KEEP_MODE else _check_range("mode", self.mode, 0o7777),
                _check_range("offset", self.offset, TO_THE_END),
                _check_range("length", self.length, TO_THE_END),
                len(_check_text("path", self.path)),
                len(_check_text("target", self.second)),
            )
            + self.path
            + self.second
        )
        if len(payload) > MAX_CONTROL:
            raise ValueError(f"path is {len(self.path) + len(self.second)} bytes long")
        return payload
