"""Files and directories of a sandbox, copied to this machine.

The sandbox chooses names, kinds and sizes, and changes them while it is read; a gateway may say anything in its place.
destination.py sees to it that nothing is written but below the directory that the user named.
"""

from __future__ import annotations

import os

from k8e.cli.process import Failure, ServiceError
from k8e.cli.transfer.destination import split_name
from k8e.cli.transfer.path_destination import open_destination
from k8e.cli.transfer.transfer import Transfer
from k8e.cli.transfer.upload import NAMELESS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from k8e.cli.transfer.destination import Destination
    from k8e.cli.transfer.path_destination import PathDestination

SLACK = 64 << 20  # a file may grow while it is read; not for ever
# Of a file that was there a moment ago: the sandbox goes on while it is copied.
PASSED_OVER = {
    "permission_denied": "it cannot be read",
    "file_not_found": "it is gone",
    "not_a_directory": "it is gone",
    "is_a_directory": "it is a directory now",
    "not_a_regular_file": "a special file",
    "link_loop": "a link",
}


class Download(Transfer):
    def copy(self, destination: str) -> None:
        found = self._client.get_tree(self._session, self._path).parse()
        base = os.path.basename(os.path.normpath(self._path))
        into = destination.endswith("/") or os.path.isdir(destination)
        if base in NAMELESS or not into:
            folder, name = os.path.split(os.path.normpath(destination))
        else:
            folder, name = destination, base
        if found["type"] == "directory":
            if base in NAMELESS and os.path.isdir(destination):
                folder, name = destination, ""
            self._fetch_folder(open_destination(folder or "."), split_name(name) if name else [], found["entries"])
        elif found["type"] == "file":
            self._fetch(open_destination(folder or "."), split_name(name), self._path, found)
        else:
            error = f"{self._path} is no file and no folder"
            raise Failure("source_unreadable", error, detail=str(found["type"]), hint="name one of them")

    def _fetch_folder(self, to: Destination | PathDestination, top: list[str], entries: list[dict[str, Any]]) -> None:
        to.make_folder(top)
        for entry in entries:
            words = split_name(entry["path"])
            if entry["type"] == "directory":
                to.make_folder([*top, *words])
                if entry["unreadable"]:
                    self._leave_out(entry["path"], "it cannot be read")
            elif entry["type"] == "file":
                self._fetch(to, [*top, *words], f"{self._path.rstrip('/')}/{entry['path']}", entry)
            else:
                self._leave_out(entry["path"], "a link" if entry["type"] == "symlink" else "a special file")

    def _fetch(self, to: Destination | PathDestination, words: list[str], path: str, entry: dict[str, Any]) -> None:
        try:
            pieces = self._client.read_pieces(self._session, path)
        except ServiceError as error:
            if error.code not in PASSED_OVER or path == self._path:
                raise
            self._leave_out(path, PASSED_OVER[error.code])
            return
        to.write(words, self._count(pieces, int(entry["size"]) + SLACK, path), int(entry["permissions"]))
        self.files += 1

    def _count(self, pieces: Iterator[bytes], most: int, path: str) -> Iterator[bytes]:
        for piece in pieces:
            most -= len(piece)
            if most < 0:
                hint = "copy it when the program that writes it has ended"
                raise Failure("file_grows", f"{path} grows while it is read", hint=hint)
            self.bytes += len(piece)
            yield piece
