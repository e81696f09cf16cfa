"""The facts about whoever asks: gathered by a front door, so that deciding needs no file and no variable."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def nothing_to_read(path: str) -> bytes:
    return b""


class Scene(Record):
    """All paths are real ones: absolute, without links. Empty: there is none."""

    cwd: str = ""
    home: str = ""
    names: frozenset[str] = frozenset()  # of what lies in the directory
    environ: Mapping[str, str] = {}
    read_start: Callable[[str], bytes] = staticmethod(nothing_to_read)  # the first bytes of a file in the directory
