"""HTTP/1.1 between bytes and events: h11, and beside it a short way for the usual request.

h11 parses and checks anything, in Python, at a tenth of what `true` costs the daemon. Most requests have the same
simple form, and their answers too: a request that is there as a whole, and of which every byte is as expected, is read
here, and everything else is h11's. What is taken here h11 would take as well, and would read the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import h11

_QUICK: Final = 4096  # bytes of a head
_HEAD: Final = re.compile(
    rb"(GET|POST|PUT|DELETE) (/[!-~]*) HTTP/1\.1\r\n((?:[A-Za-z0-9-]+: [!-~](?:[ !-~]*[!-~])?\r\n){1,16})\r\n"
)
# These and no others, each once: nothing that says how the body is sent or what becomes of the connection.
_NAMES: Final = frozenset({b"host", b"user-agent", b"accept", b"content-type", b"content-length", b"origin"})
_DIGITS: Final = re.compile(rb"[0-9]{1,9}")
_BODILESS: Final = (204, 304)


class Head(Protocol):
    """The beginning of a request, as either way reads it."""

    @property
    def method(self) -> bytes: ...
    @property
    def target(self) -> bytes: ...
    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...
    @property
    def http_version(self) -> bytes: ...


class QuickHead(NamedTuple):
    method: bytes
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    http_version: bytes = b"1.1"


Fields = Sequence[tuple[bytes, bytes]]
Event = h11.Event | type | QuickHead  # or a sentinel
State = type  # one of h11's sentinels


class Wire:
    """A server's side of a connection: what arrives, and the bytes of answers. The states are h11's."""

    def __init__(self, head_size: int) -> None:
        self._slow = h11.Connection(h11.SERVER, max_incomplete_event_size=head_size)
        self._untouched = True  # h11 has no byte of the next request
        self._quick: _QuickExchange | None = None

    @property
    def our_state(self) -> State:
        return self._quick.our_state if self._quick is not None else self._slow.our_state

    @property
    def their_state(self) -> State:
        return self._quick.their_state if self._quick is not None else self._slow.their_state

    @property
    def fresh(self) -> bool:
        """Whether nothing of the next request is here."""
        return self._untouched and self._quick is None

    def receive_data(self, data: bytes) -> None:
        if self._untouched and self._quick is None:
            self._quick = read_quickly(data)
            if self._quick is not None:
                return
        self._untouched = False
        self._slow.receive_data(data)

    def next_event(self) -> Event:
        return self._quick.next_event() if self._quick is not None else self._slow.next_event()

    def take_body(self) -> bytes | None:
        """All of it at once, where that is known to be here."""
        return self._quick.take_body() if self._quick is not None else None

    def start_next_cycle(self) -> None:
        if self._quick is not None:
            self._quick = None
        else:
            self._slow.start_next_cycle()
            self._untouched = not self._slow.trailing_data[0]

    # Each returns what is to be sent

    def go_on(self) -> bytes:
        """For a client that waits to be told so before it sends the body."""
        if self._quick is not None or not self._slow.they_are_waiting_for_100_continue:
            return b""
        return self._slow.send(h11.InformationalResponse(status_code=100, headers=[])) or b""

    def start(self, status: int, fields: Fields, reason: bytes = b"") -> bytes:
        """Without a length among the fields, what follows is sent in chunks."""
        if self._quick is not None:
            return self._quick.start(status, fields, reason)
        return self._slow.send(h11.Response(status_code=status, headers=list(fields), reason=reason)) or b""

    def pack(self, *parts: bytes) -> Sequence[bytes]:
        """A piece of the body: all parts together."""
        if self._quick is not None:
            return self._quick.pack(parts)
        return self._slow.send_with_data_passthrough(h11.Data(data=b"".join(parts))) or ()

    def end(self, trailer: Fields = ()) -> bytes:
        if self._quick is not None:
            return self._quick.end(trailer)
        return self._slow.send(h11.EndOfMessage(headers=list(trailer))) or b""


class _QuickExchange:
    def __init__(self, head: QuickHead, body: bytes) -> None:
        self.our_state: State = h11.SEND_RESPONSE
        self.their_state: State = h11.SEND_BODY
        self._head: QuickHead | None = head
        self._body: bytes | None = body
        self._chunked = False
        self._closing = False

    def next_event(self) -> Event:
        head, self._head = self._head, None
        if head is not None:
            return head
        if self.their_state is h11.DONE:
            return h11.PAUSED
        body = self.take_body()
        return h11.Data(data=body) if body else h11.EndOfMessage()

    def take_body(self) -> bytes | None:
        body, self._body = self._body, None
        self.their_state = h11.DONE
        return body

    def start(self, status: int, fields: Fields, reason: bytes) -> bytes:
        names = {name.lower() for name, _ in fields}
        self._closing = b"connection" in names
        self._chunked = b"content-length" not in names and status not in _BODILESS
        self.our_state = h11.SEND_BODY
        framing = b"Transfer-Encoding: chunked\r\n" if self._chunked else b""
        return b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (status, reason, _write_fields(fields), framing)

    def pack(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        if not self._chunked:
            return parts
        size = sum(map(len, parts))
        return (b"%x\r\n" % size, *parts, b"\r\n") if size else ()

    def end(self, trailer: Fields) -> bytes:
        self.our_state = h11.MUST_CLOSE if self._closing else h11.DONE
        return b"0\r\n%b\r\n" % _write_fields(trailer) if self._chunked else b""


def _write_fields(fields: Fields) -> bytes:
    return b"".join(b"%b: %b\r\n" % field for field in fields)


def read_quickly(data: bytes) -> _QuickExchange | None:
    """None: it is not the usual form, or not one whole request."""
    found = _HEAD.match(data)
    if found is None or found.end() > _QUICK:
        return None
    lines = found[3].split(b"\r\n")[:-1]
    headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
    named = dict(headers)
    length = named.get(b"content-length", b"0")
    if len(named) < len(headers) or not named.keys() <= _NAMES or b"host" not in named:
        return None
    if _DIGITS.fullmatch(length) is None or int(length) != len(data) - found.end():
        return None
    return _QuickExchange(QuickHead(found[1], found[2], headers), data[found.end() :])
