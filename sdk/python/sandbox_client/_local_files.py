"""Files of this machine that are copied into a sandbox or come out of one. Names from a sandbox are not trusted:
nothing is written outside of the folder that the caller named, and no link in it is followed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from sandbox_client._errors import Failed, InvalidArgument

LocalPath = str | os.PathLike[str]

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a folder that is to be copied."""

    path: str
    name: bytes  # below the folder


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """The content of a folder that is to be copied."""

    files: tuple[FoundFile, ...]
    bare: tuple[bytes, ...]  # folders below it that have no files or folders
    skipped: tuple[str, ...]  # links and special files


def list_folder(top: LocalPath) -> FoundFolder:
    """Links are not followed: they may lead anywhere, also to secrets."""
    files, folders, skipped = [], [], []
    waiting = [(os.fspath(top), b"")]
    while waiting:
        path, prefix = waiting.pop()
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + os.fsencode(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                    waiting.append((entry.path, name + b"/"))
                elif entry.is_file(follow_symlinks=False):
                    files.append(FoundFile(entry.path, name))
                else:
                    skipped.append(entry.path)
    needed = {name.rpartition(b"/")[0] for name in (*folders, *(file.name for file in files))}
    return FoundFolder(tuple(files), tuple(name for name in folders if name not in needed), tuple(skipped))


def open_source(path: LocalPath) -> IO[bytes]:
    """Opens a regular file; anything else could keep the caller waiting for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        hint = "open it yourself and give the open file"
        raise InvalidArgument(f"{os.fspath(path)!r} is no file or folder", code="not_a_regular_file", hint=hint)
    return os.fdopen(descriptor, "rb")


def find_permissions(file: IO[bytes]) -> int:
    """The permissions of an open file of this machine."""
    return os.fstat(file.fileno()).st_mode & 0o777


@contextlib.contextmanager
def replace_file(path: LocalPath, *, executable: bool = False) -> Iterator[IO[bytes]]:
    """A file that has its name when it is complete; folders above it are made."""
    whole = Path(path)
    whole.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(whole.parent, _FOLDER)
    try:
        with _replace_in(folder, os.fsencode(whole.name), executable) as file:
            yield file
    finally:
        os.close(folder)


class TargetFolder:
    """A folder of this machine that is filled from a sandbox."""

    def __init__(self, path: LocalPath) -> None:
        os.makedirs(path, exist_ok=True)
        self._path = os.fspath(path)

    def make(self, name: bytes) -> None:
        """Makes a folder below, with those above it."""
        os.close(self._enter(_split(name)))

    @contextlib.contextmanager
    def replace(self, name: bytes, *, executable: bool = False) -> Iterator[IO[bytes]]:
        """A file below that has its name when it is complete."""
        *above, last = _split(name)
        folder = self._enter(above)
        try:
            with _replace_in(folder, last, executable) as file:
                yield file
        finally:
            os.close(folder)

    def _enter(self, names: list[bytes]) -> int:
        folder = os.open(self._path, _FOLDER)
        for name in names:
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder


def _split(name: bytes) -> list[bytes]:
    names = name.split(b"/")
    if any(part in (b"", b".", b"..") or b"\0" in part for part in names):
        raise _unsafe(name)
    return names


def _unsafe(name: bytes) -> Failed:
    hint = "the sandbox lists what cannot be below this folder: do not trust what it says"
    return Failed(f"{name!r} is no name of a file below the folder", code="unsafe_name", hint=hint)


@contextlib.contextmanager
def _replace_in(folder: int, name: bytes, executable: bool) -> Iterator[IO[bytes]]:
    temporary = b".k8e-" + secrets.token_hex(8).encode()
    # Whether it is a program is all that is taken over: the rest is for this machine's umask to say.
    with os.fdopen(os.open(temporary, _NEW, 0o777 if executable else 0o666, dir_fd=folder), "wb") as file:
        try:
            yield file
            file.flush()
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(temporary, dir_fd=folder)
            raise
