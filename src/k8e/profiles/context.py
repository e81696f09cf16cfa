"""The facts about an invocation, collected by the command line or the MCP door, so that deciding is pure."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def nothing_to_read(path: str) -> bytes:
    return b""


class Context(Record):
    """All paths are absolute and without links; an empty path means that there is none."""

    cwd: str = ""
    home: str = ""
    names: frozenset[str] = frozenset()  # of the files in the directory
    environ: Mapping[str, str] = {}
    read_start: Callable[[str], bytes] = staticmethod(nothing_to_read)  # the first bytes of a file in the directory
