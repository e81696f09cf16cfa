"""The files that an agentkernel.toml copies into a new sandbox.

They are read here, as the user, and written there by the agent, as the sandbox's user. profiles/trust.py has decided
which names a file without trust may use; here no link is followed that leads out of the project.
"""

from __future__ import annotations

import os
import stat

from k8e.cli.process import Failure
from k8e.cli.transfer.destination import FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8e.profiles.config.file import Config
    from k8e.profiles.options import FileCopy
    from k8e.profiles.sandbox_policy import SandboxPolicy

_SOURCE = "[[files]] names plain files of at most 32 MiB that you can read; `agentkernel cp` copies larger ones"
LARGEST = 32 << 20  # base64 takes a third more, and the request has to fit into a message


def read_files(policy: SandboxPolicy, config: Config | None, *, trusted: bool) -> list[tuple[FileCopy, bytes]]:
    """Reads all before the sandbox is made: if one cannot be read, none is made."""
    folder = os.path.realpath(os.path.dirname(config.file) or ".") if config else ""
    return [(file, read_file(file.source, folder, trusted=trusted)) for file in policy.files]


def read_file(source: str, folder: str, *, trusted: bool) -> bytes:
    path = os.path.join(folder, os.path.expanduser(source) if trusted else source)
    if not trusted and os.path.realpath(path) != os.path.normpath(path):
        raise Failure(
            "file_refused",
            f"{source} is, or goes through, a link",
            detail=f"to {os.path.realpath(path)}",
            hint="put the file itself there, or `agentkernel trust` the file that names it",
        )
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        # A sandbox in which the project is mounted may put a link there after the check.
        below = os.path.relpath(os.path.normpath(path), folder).split("/")
        descriptor = os.open(path, flags) if trusted else open_below(folder, below, flags)
    except OSError as error:
        raise Failure("file_unreadable", f"{source} cannot be read", detail=str(error), hint=_SOURCE) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Failure("file_unreadable", f"{source} is no file", hint=_SOURCE)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Failure("file_too_large", f"{source} has more than {LARGEST} bytes", hint=_SOURCE)
    return content


def describe_file(file: FileCopy, content: bytes) -> dict[str, object]:
    """As a request has it."""
    from binascii import b2a_base64

    text = b2a_base64(content, newline=False).decode("ascii")
    return {"path": file.dest, "content_base64": text, "mode": file.mode}


def open_below(top: str, words: Sequence[str], flags: int = FOLDER) -> int:
    """Opens the last word with the flags, or `top` if there are no words. Links on the way to `top` are followed.

    A sandbox may be changing what is below: each step is on an open descriptor, none through a link. A path that is
    checked first and opened then may be another one by then."""
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
