"""The id of the session that is used when none is named: a small file per tenant below ~/.k8e/sandbox.

The file may be missing, broken, or name a session that is long gone. It is replaced under a lock on its directory, so
that two commands at once end up in one session.
"""

from __future__ import annotations

import os

from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

DEFAULT = "default"
NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def is_name(text: str) -> bool:
    return 1 <= len(text) <= 63 and not text.startswith("-") and NAME.issuperset(text)


class State:
    """The file of one tenant. As a context it holds the lock."""

    def __init__(self, tenant: str, place: str = "") -> None:
        """`place` is the directory of a gateway, whose sessions are not this machine's."""
        if tenant and not is_name(tenant):
            error = "tenant: must be 1 to 63 of A-Z a-z 0-9 _ - and not begin with -"
            raise Failure("invalid_argument", error, hint="--tenant web", more={"field": "tenant"})
        self.tenant = tenant or DEFAULT
        self._directory = os.path.join(os.path.expanduser("~"), ".k8e", "sandbox", place, self.tenant)
        self._path = os.path.join(self._directory, "state.json")
        self._lock = -1

    def read(self) -> str:
        """The session's id; empty if there is none."""
        try:
            # Not blocking, because the file may be a pipe.
            descriptor = os.open(self._path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise unusable(self._path, error) from error
        try:
            content = os.read(descriptor, 64 << 10)
        except OSError:
            return ""
        finally:
            os.close(descriptor)
        return find_session(content)

    def write(self, session_id: str) -> None:
        draft = f"{self._path}.{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(draft, flags, 0o600)
            try:
                os.write(descriptor, b'{"session_id": "%b"}\n' % session_id.encode("ascii"))
            finally:
                os.close(descriptor)
            os.replace(draft, self._path)
        except OSError as error:
            raise unusable(self._path, error) from error

    def __enter__(self) -> Self:
        from k8e.cli.portable import lock_folder

        try:
            for directory in self._parents():
                try:
                    os.mkdir(directory, 0o700)
                except FileExistsError:
                    pass
            self._lock = lock_folder(self._directory)
        except OSError as error:
            raise unusable(self._directory, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _parents(self) -> list[str]:
        """From ~/.k8e downwards."""
        parents = [self._directory]
        while os.path.basename(parents[0]) != ".k8e":
            parents.insert(0, os.path.dirname(parents[0]))
        return parents


def find_session(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    # As we write it: no need for a parser.
    if text.startswith('{"session_id": "') and text.endswith('"}\n') and is_name(text[16:-3]):
        return text[16:-3]
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    found = value.get("session_id") if isinstance(value, dict) else None
    return found if isinstance(found, str) and is_name(found) else ""


def unusable(path: str, error: OSError) -> Failure:
    return Failure(
        "state_unusable",
        "the file that remembers your session cannot be used",
        detail=str(error),
        hint=f"see to {path}, or name a session with --session-id",
    )
