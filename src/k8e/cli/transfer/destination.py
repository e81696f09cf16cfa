"""The directory of this machine into which files from a sandbox are written: below it, and nowhere else.

The sandbox chooses names, kinds and sizes, or a gateway does for it, and it may be able to change the directory while
we write (a mounted project). So only plain names are used, every step down is taken on an open descriptor without
following links, and a file is moved to its name when it is complete, replacing what had the name.
"""

from __future__ import annotations

import os

from k8e.cli.portable import BINARY, CLOEXEC, DIRECTORY, NOFOLLOW
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FOLDER = os.O_RDONLY | DIRECTORY | NOFOLLOW | CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC | BINARY


def split_name(name: str) -> list[str]:
    """Splits a relative name. Raises Failure when it could lead anywhere but down."""
    words = name.split("/")
    if any(word in ("", ".", "..") or "\0" in word for word in words):
        error = f"the sandbox has a name that leads elsewhere: {name!r}"
        raise Failure("name_refused", error, hint="do not trust what is in it: a file system has no such names")
    return words


class Destination:
    def __init__(self, folder: str) -> None:
        """The user names the directory; links on the way to it are followed."""
        try:
            self._top = os.open(folder, os.O_RDONLY | DIRECTORY | CLOEXEC)
        except OSError as error:
            hint = "name a directory that is there and that you can write to"
            raise Failure("destination_unusable", f"{folder} cannot be used", detail=str(error), hint=hint) from error

    def close(self) -> None:
        os.close(self._top)

    def make_folder(self, words: Sequence[str]) -> None:
        os.close(self._descend(words))

    def write(self, words: Sequence[str], pieces: Iterable[bytes], permissions: int) -> None:
        folder = self._descend(words[:-1])
        draft = f".k8e-{os.urandom(8).hex()}"
        try:
            descriptor = os.open(draft, NEW, 0o600, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb", buffering=0) as file:
                    for piece in pieces:
                        write_through(file.fileno(), piece)
                    os.fchmod(file.fileno(), permissions & 0o777 & ~read_umask())
                os.replace(draft, words[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(draft, dir_fd=folder)
                raise
        except OSError as error:
            hint = "is there room, may you write there, and is no directory in its place?"
            name = "/".join(words)
            raise Failure("file_unwritable", f"{name} cannot be written", detail=str(error), hint=hint) from error
        finally:
            os.close(folder)

    def _descend(self, words: Sequence[str]) -> int:
        here = os.dup(self._top)
        try:
            for word in words:
                try:
                    os.mkdir(word, 0o777, dir_fd=here)
                except FileExistsError:
                    pass
                below = os.open(word, FOLDER, dir_fd=here)
                os.close(here)
                here = below
        except OSError as error:
            os.close(here)
            cause = "a link or a file is in the way" if error.errno in (20, 40) else str(error)  # ENOTDIR, ELOOP
            hint = "links are not followed: copy to another directory, or move away what is there"
            name = "/".join(words)
            raise Failure("destination_refused", f"{name} cannot be entered", detail=cause, hint=hint) from error
        return here


def write_through(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
