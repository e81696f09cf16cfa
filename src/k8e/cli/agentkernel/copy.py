"""`agentkernel cp`: files and directories, into a sandbox and out of it.

Inside, the agent does every step, as the sandbox's user. Links and special files are left out and reported, in both
directions: a link would mean something else on the other side.
"""

from __future__ import annotations

import os
import stat

from k8e.cli.agentkernel.destination import Destination, split_name
from k8e.cli.agentkernel.exec import explain
from k8e.cli.agentkernel.leading_options import show_help, take_options, wants_help
from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.project.files import FOLDER
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import FAILED, Failure, ServiceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

USAGE = "cp SOURCE NAME:PATH, or cp NAME:PATH DESTINATION"
ABOUT = """\
Copies a file, or a folder with everything in it, into the sandbox NAME or out of it. A PATH that does not begin with /
begins in /workspace. Into a folder that is there already, or a destination that ends in /, it is copied under its own
name. Permissions are kept; links and special files are left out, and said (exit code 1)."""

PIECE = 256 << 10
SLACK = 64 << 20  # a file may grow while it is read; not for ever
SHOWN = 10
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def main(words: list[str]) -> int:
    if wants_help(words, {}):
        return show_help(USAGE, ABOUT, {})
    rest = take_options(words, {}, object())
    if len(rest) == 2:
        source, destination = map(split_place, rest)
        try:
            if source[0] and not destination[0]:
                return Download(source[0], source[1]).copy(rest[1])
            if destination[0] and not source[0]:
                return Upload(destination[0], destination[1]).copy(rest[0])
        except ServiceError as error:
            raise explain(error, source[0] or destination[0]) from None
    raise Failure("usage", "one of both is in a sandbox, the other one here", hint=f"agentkernel {USAGE}")


def split_place(text: str) -> tuple[str, str]:
    """(sandbox, path); no sandbox: it is here. ./a:b is a file of this machine."""
    name, colon, path = text.partition(":")
    if not colon or not name or "/" in name:
        return "", text
    return name, path or "."


class Copy:
    def __init__(self, name: str, path: str) -> None:
        self._session = SessionName(name)
        self._path = path
        self._client = LocalClient()
        self._left_out: list[str] = []

    def _leave_out(self, name: str, kind: str) -> None:
        self._left_out.append(f"{name} ({kind})")

    def _report(self) -> int:
        for line in self._left_out[:SHOWN]:
            say(f"left out: {line}")
        if len(self._left_out) > SHOWN:
            say(f"left out: {len(self._left_out) - SHOWN} more")
        return FAILED if self._left_out else 0


class Upload(Copy):
    def copy(self, source: str) -> int:
        try:
            found = os.stat(source)
        except OSError as error:
            raise Failure("source_unreadable", f"{source} cannot be read", detail=str(error)) from error
        target = self._path
        base = os.path.basename(os.path.normpath(source))
        if base not in (".", "..", "") and (target.endswith("/") or self._is_folder(target)):
            target = f"{target.rstrip('/')}/{base}"
        if stat.S_ISREG(found.st_mode):
            self._send(open_source(source, READ), source, target)
        elif stat.S_ISDIR(found.st_mode):
            self._send_folder(open_source(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), source, target)
        else:
            raise Failure("source_unreadable", f"{source} is no file and no folder")
        return self._report()

    def _is_folder(self, path: str) -> bool:
        try:
            return bool(self._client.get_tree(self._session, path).parse()["type"] == "directory")
        except ServiceError as error:
            if error.code not in ("file_not_found", "not_a_directory"):
                raise
            return False

    def _send_folder(self, folder: int, source: str, target: str) -> None:
        """Sends the directory and closes its descriptor. It descends on open descriptors: a sandbox in which this
        directory is mounted can put a link where a directory just was."""
        try:
            self._client.create_directory(self._session, target)
            for entry in list_folder(folder, source):
                place, below = os.path.join(source, entry.name), f"{target.rstrip('/')}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    self._send_folder(open_source(entry.name, FOLDER, folder, place), place, below)
                elif entry.is_file(follow_symlinks=False):
                    self._send(open_source(entry.name, READ | os.O_NOFOLLOW, folder, place), place, below)
                else:
                    self._leave_out(place, "a link" if entry.is_symlink() else "a special file")
        finally:
            os.close(folder)

    def _send(self, descriptor: int, source: str, target: str) -> None:
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self._leave_out(source, "a special file")
                return
            permissions = stat.S_IMODE(found.st_mode) & 0o777
            self._client.write_pieces(self._session, target, read_pieces(descriptor), permissions)
        finally:
            os.close(descriptor)


class Download(Copy):
    def copy(self, destination: str) -> int:
        found = self._client.get_tree(self._session, self._path).parse()
        base = os.path.basename(os.path.normpath(self._path))
        into = destination.endswith("/") or os.path.isdir(destination)
        if base in ("", ".", "..") or not into:
            folder, name = os.path.split(os.path.normpath(destination))
        else:
            folder, name = destination, base
        if found["type"] == "directory":
            if base in ("", ".", "..") and os.path.isdir(destination):
                folder, name = destination, ""
            self._fetch_folder(Destination(folder or "."), split_name(name) if name else [], found["entries"])
        elif found["type"] == "file":
            self._fetch(Destination(folder or "."), split_name(name), self._path, found)
        else:
            raise Failure("source_unreadable", f"{self._path} is no file and no folder", detail=found["type"])
        return self._report()

    def _fetch_folder(self, to: Destination, top: list[str], entries: list[dict[str, Any]]) -> None:
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

    def _fetch(self, to: Destination, words: list[str], path: str, entry: dict[str, Any]) -> None:
        try:
            pieces = self._client.read_pieces(self._session, path)
        except ServiceError as error:
            if error.code != "permission_denied":
                raise
            self._leave_out(path, "it cannot be read")
            return
        to.write(words, bounded(pieces, int(entry["size"]) + SLACK, path), int(entry["permissions"]))


def open_source(name: str, flags: int, folder: int | None = None, shown: str = "") -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        raise Failure("source_unreadable", f"{shown or name} cannot be read", detail=str(error)) from error


def list_folder(folder: int, shown: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise Failure("source_unreadable", f"{shown} cannot be read", detail=str(error)) from error


def read_pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, PIECE):
        yield piece


def bounded(pieces: Iterator[bytes], most: int, path: str) -> Iterator[bytes]:
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise Failure("file_grows", f"{path} grows while it is read")
        yield piece
