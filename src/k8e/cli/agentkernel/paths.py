"""Opening what lies below a folder that a sandbox may be changing just now: each step on an open descriptor, none
through a link. To look at a path first and open it then would be to believe that it is still the same one."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(top: str, words: Sequence[str], flags: int = FOLDER) -> int:
    """Links on the way to the folder itself are its user's. The last word is opened with the flags; without words it is
    the folder."""
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, word in enumerate(words):
        try:
            if word == "..":
                raise PermissionError(f"{'/'.join(words)} leads out of {top}")
            inner = os.open(word, FOLDER if index < len(words) - 1 else flags | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = inner
    return here
