"""An HTTP/1.1 answer, read with care. The peer at the socket may be a daemon of another version, or another program;
nothing that it sends may hang us, fill our memory or end in a traceback."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Iterator

    from k8e.cli.process import Failure

PIECE = 256 << 10
HEAD = 64 << 10  # of an answer
ANSWER = 256 << 20  # a body that is kept in memory


class Response:
    """The head, and the body as far as it was read. Raises Failure when the daemon goes away, is silent or sends
    nonsense (failures.py).

    `harmless`: the request changes nothing; `whole`: all of it was sent; `early`: the daemon begins to act before it
    has read all of it."""

    def __init__(self, connection: socket, *, harmless: bool = False, whole: bool = True, early: bool = False) -> None:
        self._connection = connection
        self._harmless = harmless
        self._whole = whole
        self._early = early
        self._buffer = b""
        self._silences = 0
        self.wait: Callable[[], None] | None = None  # called before there may be something to wait for
        self.status = 0
        self.headers: dict[str, str] = {}
        while self.status < 200:
            self._read_head()

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    @property
    def exit_code(self) -> int | None:
        """The command's; with frames it follows them. None is unknown, which is never success."""
        text = self.headers.get("k8e-exit-code")
        return None if text is None else read_number(text, 10, 255)

    def read(self) -> bytes:
        pieces = []
        left = ANSWER
        for piece in self.pieces():
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise nonsense(f"an answer of more than {ANSWER} bytes")
        return b"".join(pieces)

    def pieces(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            yield from self._chunks()
        else:
            yield from self._take(read_number(self.headers.get("content-length", ""), 10, 1 << 62))

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yields (kind, bytes). JSON (kind 3 and up) comes whole, output in pieces of any length."""
        pending = b""
        kind, missing = 0, 0
        for piece in self.pieces():
            pending += piece
            while pending:
                if not missing:
                    if len(pending) < 5:
                        break
                    kind, missing = pending[0], int.from_bytes(pending[1:5], "big")
                    pending = pending[5:]
                    if kind > 2 and missing > ANSWER:
                        raise nonsense(f"a frame of {missing} bytes")
                if kind > 2 and len(pending) < missing:
                    break
                part, pending = pending[:missing], pending[missing:]
                missing -= len(part)
                yield kind, part
        if pending or missing:
            raise nonsense("it ends within a frame")

    def _read_head(self) -> None:
        received = 0
        while b"\r\n\r\n" not in self._buffer:
            received += 1
            if len(self._buffer) > HEAD or received > 64:
                raise nonsense("a head without an end")
            self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/1."):
            raise nonsense(f"{first[:64]!r} is no HTTP")
        self.status = read_number(first[9:12], 10, 599)
        self._read_fields(lines)

    def _read_fields(self, lines: list[str]) -> None:
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    def _chunks(self) -> Iterator[bytes]:
        while size := read_number(self._line(), 16, 1 << 62):
            yield from self._take(size)
            if self._line():
                raise nonsense("a chunk that is longer than it says")
        trailer = []
        while line := self._line():
            trailer.append(line)
            if len(trailer) > 64:
                raise nonsense("a trailer without an end")
        self._read_fields(trailer)

    def _line(self) -> str:
        while b"\r\n" not in self._buffer:
            if len(self._buffer) > HEAD:
                raise nonsense("a line without an end")
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line.decode("latin-1")

    def _take(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._buffer:
                self._receive()
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            yield piece

    def _receive(self) -> None:
        data: bytes | None = None
        while data is None:
            try:
                if self.wait is not None:
                    self.wait()
                data = self._connection.recv(PIECE)
            except BlockingIOError:  # nothing came for a while
                from k8e.cli.client.failures import check_presence

                self._silences += 1
                check_presence(self._connection, self._silences, harmless=self._harmless)
            except ConnectionError as error:
                raise self._lost(error) from error
        if not data:
            raise self._lost()
        self._silences = 0
        self._buffer += data

    def _lost(self, error: OSError | None = None) -> Failure:
        """The kernel resets the connection if the daemon ended before it had read everything; the daemon reads most
        requests to their end before it acts on them."""
        from k8e.cli.client.failures import lost

        unread = not self._whole or isinstance(error, ConnectionResetError)
        begun = self.status >= 200 or self._early
        return lost(error, nothing=self._harmless or (unread and not begun))


def read_number(text: str, base: int, most: int) -> int:
    """Stricter than `int`, which takes signs, spaces and underscores."""
    digits = "0123456789abcdefABCDEF"[: 10 if base == 10 else 22]
    if not text or len(text) > 20 or text.strip(digits) or int(text, base) > most:
        raise nonsense(f"{text[:64]!r} is no number")
    return int(text, base)


def nonsense(cause: str) -> Failure:
    from k8e.cli.client import failures

    return failures.nonsense(cause)
