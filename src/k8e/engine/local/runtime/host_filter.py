"""The filter that the machine's kernel applies to gVisor's own processes, also when gVisor's kernel is the attacker's.

Their own filters let them set any mode on any file that they were handed. In a project of a user of the machine a
set-user-id file would be that user's, for every other user to run. So the daemon starts the runtime under a filter of
its own, which is inherited and cannot be taken off: no set-user-id and no set-group-id bit (where a directory of the
machine can be written to), no device node, no file by its handle (which would lead around mount points), and none of
the ways to do these things that a filter cannot look into (openat2, io_uring).

Pure; the filter is applied by `calls.seccomp`.
"""

from __future__ import annotations

import errno
import functools
import struct
from collections.abc import Iterable, Mapping
from typing import Final

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000  # x86_64 knows a second spelling of every call

# By architecture: where a call's mode is among its arguments. aarch64 has only the younger calls.
_MODES: Final[Mapping[str, Mapping[int, int]]] = {
    "x86_64": {90: 1, 91: 1, 268: 2, 452: 2, 85: 1},  # chmod fchmod fchmodat fchmodat2 creat
    "aarch64": {52: 1, 53: 2, 452: 2},
}
_OPENS: Final[Mapping[str, Mapping[int, int]]] = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}  # flags; mode is next
_NODES: Final[Mapping[str, Mapping[int, int]]] = {"x86_64": {133: 1, 259: 2}, "aarch64": {33: 2}}
_HANDLES: Final = {"x86_64": (303, 304), "aarch64": (264, 265)}  # name_to_handle_at, open_by_handle_at
_OPAQUE: Final = (425, 426, 427, 437)  # io_uring_setup, _enter, _register, openat2: programs do without them

_CREATES: Final = 0x40 | 0x400000  # O_CREAT, O_TMPFILE
_SET_IDS: Final = 0o6000
_TYPE, _CHARACTER, _BLOCK = 0o170000, 0o020000, 0o060000

# Of classic BPF.
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF0000
_DENY: Final = 0x00050000 | errno.EPERM
_ABSENT: Final = 0x00050000 | errno.ENOSYS

Line = tuple[int, int, int, int]  # code, how many lines to skip if so, if not, value


@functools.cache
def build_filter(machine: str, *, set_ids: bool) -> bytes:
    """`set_ids`: whether files may be given set-user-id and set-group-id bits, as on a sandbox's own disk."""
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _ABSENT),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ABSENT)]
    for number in _OPAQUE:
        lines += _on_call(number, [(_RETURN, 0, 0, _ABSENT)])
    for number in _HANDLES[machine]:
        lines += _on_call(number, [(_RETURN, 0, 0, _DENY)])
    for number, index in _NODES[machine].items():
        lines += _on_call(number, [*_no_device(index), *_judge_mode(index, set_ids)])
    if not set_ids:
        for number, index in _MODES[machine].items():
            lines += _on_call(number, _judge_mode(index, set_ids))
        for number, index in _OPENS[machine].items():
            creates = [(_LOAD, 0, 0, _argument(index)), (_ANY_BIT, 1, 0, _CREATES), (_RETURN, 0, 0, _ALLOW)]
            lines += _on_call(number, [*creates, *_judge_mode(index + 1, set_ids)])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _on_call(number: int, lines: list[Line]) -> Iterable[Line]:
    """Lines for one call, which end with an answer."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _argument(index: int) -> int:
    """The half in which a mode or flags are; both architectures have it first."""
    return _ARGUMENTS_AT + 8 * index


def _judge_mode(index: int, set_ids: bool) -> list[Line]:
    if set_ids:
        return [(_RETURN, 0, 0, _ALLOW)]
    return [
        (_LOAD, 0, 0, _argument(index)),
        (_ANY_BIT, 0, 1, _SET_IDS),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _no_device(index: int) -> list[Line]:
    return [
        (_LOAD, 0, 0, _argument(index)),
        (_AND, 0, 0, _TYPE),
        (_EQUAL, 1, 0, _CHARACTER),
        (_EQUAL, 0, 1, _BLOCK),
        (_RETURN, 0, 0, _DENY),
    ]
