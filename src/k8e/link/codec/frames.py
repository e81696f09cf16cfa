"""The frames of the agent protocol as plain tuples; `protocol` turns them into bytes and back.

Tuples rather than dataclasses because DATA is the hot path, and one rule for all is easier to remember.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from k8e.link.errors import Code


class FrameType(enum.IntEnum):
    HELLO = 1
    PING = 2
    PONG = 3
    GOODBYE = 4
    EXEC = 16
    ATTACH = 17
    READ = 18
    WRITE = 19
    LIST = 20
    STAT = 21
    MKDIR = 22
    MOVE = 23
    REMOVE = 24
    CHMOD = 25
    WATCH = 26
    CONNECT = 27
    COMMANDS = 28
    PARK = 29
    BIND = 30
    DATA = 32
    EOF = 33
    ACK = 34
    OPENED = 35
    RESULT = 36
    SIGNAL = 37
    END = 38
    RESIZE = 39
    DETACH = 40
    RELEASE = 41
    CANCEL = 42


class GoodbyeReason(enum.IntEnum):
    """The reason in the agent's GOODBYE."""

    SUPERSEDED = 1
    PROTOCOL_ERROR = 2
    NO_COMMON_GENERATION = 3
    SHUTTING_DOWN = 4


class Side(enum.Enum):
    HOST = "host"
    AGENT = "agent"


class HostHello(NamedTuple):
    lowest: int
    highest: int
    nonce: bytes


class AgentHello(NamedTuple):
    generation: int
    nonce: bytes
    instance: bytes
    version: str


class Ping(NamedTuple):
    token: int


class Pong(NamedTuple):
    token: int


class Goodbye(NamedTuple):
    reason: GoodbyeReason


class Request(NamedTuple):
    """Opens a channel; the payloads are made in `requests`."""

    id: int
    type: FrameType
    payload: bytes


class Data(NamedTuple):
    id: int
    stream: int
    offset: int
    content: bytes


class Eof(NamedTuple):
    id: int
    stream: int
    offset: int


class Ack(NamedTuple):
    id: int
    stream: int
    offset: int


class Opened(NamedTuple):
    id: int
    payload: bytes


class Result(NamedTuple):
    id: int
    code: Code
    errno: int
    payload: bytes  # what follows code and errno


class Signal(NamedTuple):
    id: int
    number: int
    scope: int


class End(NamedTuple):
    id: int
    grace_ms: int


class Resize(NamedTuple):
    id: int
    rows: int
    columns: int


class Order(NamedTuple):
    """DETACH, RELEASE or CANCEL: a frame that is nothing but its type."""

    id: int
    type: FrameType


ChannelFrame = Data | Eof | Ack | Opened | Result
Frame = HostHello | AgentHello | Ping | Pong | Goodbye | Request | ChannelFrame | Signal | End | Resize | Order
