"""The errors of the link, as a closed set.

LinkError
├── LinkLost             the connection is gone for good, or broke under something that must not be repeated
├── LinkTimeout          a deadline passed
├── ProtocolViolation    the peer erred: it is not our agent, or no longer
├── BrokenInput          the command will never read what was written to it
└── AgentError           the agent refused; carries a Code and Linux's errno
    └── NotStarted       ... to start a command; carries the Stage. Nothing ran.
"""

from __future__ import annotations

import enum
import os


class Code(enum.IntEnum):
    OK = 0
    NOT_FOUND = 1
    DENIED = 2
    EXISTS = 3
    NOT_DIRECTORY = 4
    IS_DIRECTORY = 5
    NOT_REGULAR = 6
    NAME_TOO_LONG = 7
    LINK_LOOP = 8
    NO_SPACE = 9
    READ_ONLY = 10
    NOT_EMPTY = 11
    CROSS_DEVICE = 12
    BUSY = 13
    TOO_MANY = 14
    NO_MEMORY = 15
    INVALID = 16
    IO = 17
    TOO_DEEP = 18
    REFUSED = 19
    UNSUPPORTED = 20
    CANCELED = 21
    DETACHED = 22
    UNKNOWN_COMMAND = 23
    DUPLICATE = 24
    TOO_BIG = 25
    NOT_EXECUTABLE = 26
    LOST = 27
    OTHER = 28


class Stage(enum.IntEnum):
    """The step at which starting a command failed."""

    REQUEST = 1
    RESOURCES = 2
    USER = 3
    LIMITS = 4
    CWD = 5
    EXEC = 6


class LinkError(Exception):
    """Base of everything the link raises on its own behalf."""


class LinkLost(LinkError):
    pass


class LinkTimeout(LinkError):
    pass


class ProtocolViolation(LinkError):
    pass


class BrokenInput(LinkError):
    pass


class AgentError(LinkError):
    def __init__(self, code: Code, errno: int = 0, subject: str = "") -> None:
        self.code = code
        self.errno = errno
        cause = os.strerror(errno) if errno else code.name.lower().replace("_", " ")
        super().__init__(f"{subject}: {cause}" if subject else cause)


def shown(path: bytes) -> str:
    """Quotes a path for people. Bytes that are not text, and control characters, are shown as escapes."""
    return repr(path.decode("utf-8", "surrogateescape"))


class NotStarted(AgentError):
    def __init__(self, code: Code, errno: int, stage: Stage, subject: str = "") -> None:
        self.stage = stage
        super().__init__(code, errno, subject)
