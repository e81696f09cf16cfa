"""Files and directories of this machine, copied into a sandbox.

Inside, the agent does every step, as the sandbox's user. Links and special files are left out: a link would mean
something else on the other side.
"""

from __future__ import annotations

import os
import stat

from k8e.cli.portable import BINARY, CLOEXEC, DIRECTORY, NOCTTY, NOFOLLOW, NONBLOCK, has_folder_handles
from k8e.cli.process import Failure, ServiceError
from k8e.cli.transfer.destination import FOLDER
from k8e.cli.transfer.transfer import PIECE, Transfer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

READ = os.O_RDONLY | NONBLOCK | NOCTTY | CLOEXEC | BINARY
NAMELESS = ("", ".", "..")  # last parts of a path that are no name to keep


class Upload(Transfer):
    def copy(self, source: str) -> None:
        try:
            found = os.stat(source)
        except OSError as error:
            raise unreadable(source, error) from error
        target = self._path
        base = os.path.basename(os.path.normpath(source))
        if base not in NAMELESS and (target.endswith("/") or self._is_folder(target)):
            target = f"{target.rstrip('/')}/{base}"
        if stat.S_ISREG(found.st_mode):
            self._send(open_source(source, READ), source, target)
        elif stat.S_ISDIR(found.st_mode):
            self._send_folder(open_folder(source, os.O_RDONLY | DIRECTORY | CLOEXEC), source, target)
        else:
            raise Failure("source_unreadable", f"{source} is no file and no folder", hint="name one of them")

    def _is_folder(self, path: str) -> bool:
        try:
            return bool(self._client.get_tree(self._session, path, below=False).parse()["type"] == "directory")
        except ServiceError as error:
            if error.code not in ("file_not_found", "not_a_directory"):
                raise
            return False

    def _send_folder(self, folder: int | None, source: str, target: str) -> None:
        """Sends the directory and closes its descriptor. It descends on open descriptors: a sandbox in which this
        directory is mounted can put a link where a directory just was."""
        try:
            self._client.create_directory(self._session, target)
            for entry in list_folder(folder, source):
                place, below = os.path.join(source, entry.name), f"{target.rstrip('/')}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    self._send_folder(open_folder(entry.name, FOLDER, folder, place), place, below)
                elif entry.is_file(follow_symlinks=False):
                    self._send(open_source(entry.name, READ | NOFOLLOW, folder, place), place, below)
                else:
                    self._leave_out(place, "a link" if entry.is_symlink() else "a special file")
        finally:
            if folder is not None:
                os.close(folder)

    def _send(self, descriptor: int, source: str, target: str) -> None:
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self._leave_out(source, "a special file")
                return
            permissions = stat.S_IMODE(found.st_mode) & 0o777
            pieces = read_pieces(descriptor, source)
            self.bytes += int(self._client.write_pieces(self._session, target, pieces, permissions).parse()["bytes"])
            self.files += 1
        finally:
            os.close(descriptor)


def open_source(name: str, flags: int, folder: int | None = None, shown: str = "") -> int:
    try:
        return os.open(name if has_folder_handles else shown or name, flags, dir_fd=folder)
    except OSError as error:
        raise unreadable(shown or name, error) from error


def open_folder(name: str, flags: int, folder: int | None = None, shown: str = "") -> int | None:
    """None where directories cannot be opened: then their paths are used, and no sandbox runs on such a system."""
    return open_source(name, flags, folder, shown) if has_folder_handles else None


def list_folder(folder: int | None, shown: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder if folder is not None else shown) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(shown, error) from error


def read_pieces(descriptor: int, shown: str) -> Iterator[bytes]:
    try:
        while piece := os.read(descriptor, PIECE):
            yield piece
    except OSError as error:
        raise unreadable(shown, error) from error


def unreadable(name: str, error: OSError) -> Failure:
    hint = "name a file or a folder that is there and that you can read"
    return Failure("source_unreadable", f"{name} cannot be read", detail=str(error), hint=hint)
