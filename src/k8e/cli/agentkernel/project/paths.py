"""Opens paths below a directory that a sandbox may be changing: each step on an open descriptor, none through a link. A
path that is checked first and opened then may be another one by then."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(top: str, words: Sequence[str], flags: int = FOLDER) -> int:
    """Opens the last word with the flags, or `top` if there are no words. Links on the way to `top` are followed."""
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
