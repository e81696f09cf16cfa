"""The plain variables of persistent sessions, which have to be there at the next start, after a reboot too.

No file of the machine has a value of any other session (environment.py), nor any session's secrets. Each session here
has a file of its own, which root alone can read and which is gone with the session. Files and not rows, because a
database goes on having what was deleted from it. Several gateways have Secrets of the cluster instead (k8e.replicas).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

from k8e.core.sandbox.environment import Variables, read_variables, write_variables
from k8e.core.store.schema import StoreFailed
from k8e.damage import Damaged, Damages, own_directory, read_own

P = ParamSpec("P")
T = TypeVar("T")

_MAGIC: Final = b"k8e environment "  # and the sha256 of what follows its line
_VARIABLE: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


class Environments(Protocol):
    """A place for variables. Its methods raise Fault."""

    damages: Damages

    async def keep(self, sandbox: str, env: Variables) -> None:
        """They are kept when this returns, instead of what was. The session is on record before."""

    async def recall(self, sandbox: str) -> Variables:
        """None when there are none, or when they are damaged, which `damages` says then."""

    async def forget(self, sandbox: str) -> None: ...

    async def forget_others(self, sandboxes: Collection[str]) -> None:
        """Removes those of sessions that ended just before their daemon was killed."""


class FileEnvironments:
    def __init__(self, folder: Path | None) -> None:
        """Without a folder nothing can be kept, and a caller who needs that is told."""
        self._folder = folder
        self.damages = Damages(folder.parent if folder else Path("/nowhere"))

    async def keep(self, sandbox: str, env: Variables) -> None:
        """On the disk when it returns."""
        await self._do(self._keep, sandbox, env)

    async def recall(self, sandbox: str) -> Variables:
        return await self._do(self._recall, sandbox)

    async def forget(self, sandbox: str) -> None:
        if self._folder is not None:
            await self._do(self._path(sandbox).unlink, missing_ok=True)

    async def forget_others(self, sandboxes: Collection[str]) -> None:
        if self._folder is not None:
            await self._do(self._forget_others, frozenset(sandboxes))

    async def _do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except OSError as error:
            raise StoreFailed(error) from error

    def _path(self, sandbox: str) -> Path:
        if self._folder is None:
            raise OSError("there is no place for the environments of persistent sessions")
        return self._folder / sandbox

    def _keep(self, sandbox: str, env: Variables) -> None:
        path = self._path(sandbox)
        own_directory(path.parent, 0o700, self.damages)
        draft = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, write_environment(env))
            os.fsync(file)
        finally:
            os.close(file)
        if path.is_dir() and not path.is_symlink():
            self.damages.set_aside(path, "it is a directory")
        draft.rename(path)

    def _recall(self, sandbox: str) -> Variables:
        path = self._path(sandbox)
        try:
            content = read_own(path)
            if content.startswith(_MAGIC):
                return read_environment(content)
            env = _read_older(content)
            self._keep(sandbox, env)
            return env
        except FileNotFoundError:
            return ()
        except Damaged as error:
            self.damages.set_aside(path, error)
            return ()

    def _forget_others(self, sandboxes: frozenset[str]) -> None:
        assert self._folder is not None
        if not os.path.lexists(self._folder):
            return
        own_directory(self._folder, 0o700, self.damages)
        for name in os.listdir(self._folder):
            path = self._folder / name
            if name in sandboxes:
                # A damaged one is found before the session is to be started. What cannot be read now may be later.
                with contextlib.suppress(OSError):
                    self._recall(name)
            elif path.is_dir() and not path.is_symlink():
                self.damages.set_aside(path, "it is a directory")
            else:
                path.unlink(missing_ok=True)


def _read_older(content: bytes) -> Variables:
    """Of a daemon that wrote no digest: every variable is whole."""
    found = read_variables(content)
    if not found or write_variables(found) != content or not all(_VARIABLE.fullmatch(name) for name, _ in found):
        raise Damaged("it is no list of variables")
    return found


def write_environment(env: Variables) -> bytes:
    """With a digest, by which damage is seen."""
    content = write_variables(env)
    return _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read_environment(content: bytes) -> Variables:
    """Raises Damaged."""
    head, _, rest = content.partition(b"\n")
    if not head.startswith(_MAGIC) or hashlib.sha256(rest).hexdigest().encode() != head.removeprefix(_MAGIC):
        raise Damaged("its content is not what was written")
    return read_variables(rest)
