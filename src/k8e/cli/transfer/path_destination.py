"""The directory into which files are written, on a system that has no open directories (Windows): by paths.

A link that another program puts there between a look and a step is followed. No sandbox runs on such a system, so what
a sandbox chooses is names only; those that mean something else there are refused.
"""

from __future__ import annotations

import os
import stat

from k8e.cli.portable import BINARY
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k8e.cli.transfer.destination import Destination

REPARSE_POINT = 0x400  # a link or a junction
DEVICES = ("CON", "PRN", "AUX", "NUL", *(f"{kind}{number}" for kind in ("COM", "LPT") for number in range(10)))


class PathDestination:
    def __init__(self, folder: str) -> None:
        self._top = os.path.abspath(folder)
        if not os.path.isdir(self._top):
            hint = "name a directory that is there and that you can write to"
            raise Failure("destination_unusable", f"{folder} cannot be used", detail="it is no directory", hint=hint)

    def close(self) -> None:
        pass

    def make_folder(self, words: Sequence[str]) -> None:
        self._descend(words)

    def write(self, words: Sequence[str], pieces: Iterable[bytes], permissions: int) -> None:
        check_names(words)
        folder = self._descend(words[:-1])
        draft = os.path.join(folder, f".k8e-{os.urandom(8).hex()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.writelines(pieces)
                os.chmod(draft, permissions & 0o755 | 0o600)
                os.replace(draft, os.path.join(folder, words[-1]))
            except BaseException:
                os.unlink(draft)
                raise
        except OSError as error:
            hint = "is there room, may you write there, and is no directory in its place?"
            name = "/".join(words)
            raise Failure("file_unwritable", f"{name} cannot be written", detail=str(error), hint=hint) from error

    def _descend(self, words: Sequence[str]) -> str:
        check_names(words)
        here = self._top
        for word in words:
            here = os.path.join(here, word)
            try:
                os.makedirs(here, exist_ok=True)
                found = os.lstat(here)
                plain = stat.S_ISDIR(found.st_mode) and not getattr(found, "st_file_attributes", 0) & REPARSE_POINT
                cause = "" if plain else "a link or a file is in the way"
            except OSError as error:
                cause = str(error)
            if cause:
                hint = "links are not followed: copy to another directory, or move away what is there"
                raise Failure("destination_refused", f"{'/'.join(words)} cannot be entered", detail=cause, hint=hint)
        return here


def check_names(words: Sequence[str]) -> None:
    for word in words:
        device = word.partition(".")[0].rstrip().upper() in DEVICES
        if device or word[-1:] in (".", " ") or any(letter in '\\/:*?"<>|' or letter < " " for letter in word):
            error = f"this system cannot have a file of that name: {word!r}"
            raise Failure("name_refused", error, hint="rename it in the sandbox, or copy an archive of it")


def open_destination(folder: str) -> Destination | PathDestination:
    from k8e.cli import portable

    if not portable.has_folder_handles:
        return PathDestination(folder)
    from k8e.cli.transfer.destination import Destination

    return Destination(folder)
