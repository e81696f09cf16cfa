"""The short way of the usual request: what it takes h11 takes as well, and reads the same; the rest is h11's."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8e.doors.http.wire import QuickHead, Wire, read_quickly

PLAIN = b"POST /v1/sessions/x/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"

words = st.sampled_from(
    [
        *(
            b"GET",
            b"POST",
            b"PUT",
            b"DELETE",
            b"HEAD",
            b"CONNECT",
            b"get",
            b" ",
            b"  ",
            b"\t",
            b"/",
            b"/v1/a?b=c",
            b"*",
        ),
        *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"Host", b"host", b": ", b":"),
        *(b"localhost", b"Content-Length", b"content-length", b"0", b"2", b"+2", b"02", b"2, 2", b"Transfer-Encoding"),
        *(b"chunked", b"Connection", b"close", b"Expect", b"100-continue", b"\0", b"\xff", b"{}", b"X", b"Accept"),
    ]
)
fields = st.sampled_from(
    [
        *(b"Host: localhost", b"Host: ", b"Host:x", b"HOST: y", b"Content-Length: 2", b"Content-Length: 2 "),
        *(b"Content-Length: 3", b"Content-Length: 02", b"Content-Length: 2_0", b"content-length: 2", b"Accept: */*"),
        *(b"Content-Type: application/json", b" folded", b"Transfer-Encoding: chunked", b"Transfer-Encoding : chunked"),
        *(b"Connection: close", b"Expect: 100-continue", b"A b: c", b"User-Agent: \xff", b"Accept: a\0b", b"Origin: x"),
    ]
)
requests = st.builds(
    lambda method, target, version, lines, end, body: (
        b" ".join((method, target, version)) + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + end + body
    ),
    st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PO ST"]),
    st.sampled_from([b"/", b"/v1/sessions?a=b", b"//x", b"/\x7f", b"/a b", b"http://x/", b"*", b""]),
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/1.1 "]),
    st.lists(fields, max_size=4),
    st.sampled_from([b"\r\n", b"\n", b"\r\n\r\n", b""]),
    st.sampled_from([b"", b"{}", b"{}G", b"2\r\n{}\r\n0\r\n\r\n"]),
)


def read_slowly(data: bytes) -> tuple[bytes, bytes, dict[bytes, bytes], bytes]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    head = connection.next_event()
    assert isinstance(head, h11.Request)
    body = b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert connection.trailing_data == (b"", False)
    assert connection.our_state is h11.SEND_RESPONSE
    connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.start_next_cycle()  # it would keep the connection
    return head.method, head.target, dict(head.headers), body


@given(st.one_of(requests, st.lists(words, max_size=24).map(b"".join), st.binary(max_size=64)))
@example(PLAIN)
@example(PLAIN.replace(b"Host: localhost\r\n", b""))
@example(PLAIN + b"x")
@example(PLAIN[:-1])
@example(PLAIN.replace(b"localhost", b"a" * 5000))
def test_what_is_read_quickly_h11_reads_the_same(data: bytes) -> None:
    quick = read_quickly(data)
    if quick is None:
        return
    head = quick.next_event()
    assert isinstance(head, QuickHead)
    assert (head.method, head.target, dict(head.headers), quick.take_body()) == read_slowly(data)


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("method", [b"GET", b"POST", b"PUT", b"DELETE"])
def test_the_usual_request_is_read_quickly(method: bytes, body: bytes) -> None:
    fields = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body) if body else b""
    data = method + b" /v1/x?y=z HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n" + fields + b"\r\n" + body
    assert read_quickly(data) is not None


def answer(wire: Wire, data: bytes, status: int, fields: list[tuple[bytes, bytes]], *pieces: bytes) -> bytes:
    wire.receive_data(data)
    assert isinstance(wire.next_event(), QuickHead | h11.Request)
    while wire.next_event() not in (h11.PAUSED, h11.NEED_DATA):
        pass
    sent = wire.start(status, fields, b"OK")
    for piece in pieces:
        sent += b"".join(wire.pack(piece[:1], piece[1:]))
    return sent + wire.end([(b"K8E-Exit-Code", b"3")] if status == 200 and not fields else ())


@pytest.mark.parametrize(
    ("status", "fields", "pieces"),
    [
        (200, [(b"Content-Length", b"5")], (b"hello",)),
        (200, [(b"Content-Length", b"0"), (b"X-Y", b"z")], ()),
        (200, [], (b"hello", b"", b"x" * 20)),
        (200, [], ()),
        (204, [], ()),
        (404, [(b"Content-Length", b"1"), (b"Connection", b"close")], (b"n",)),
    ],
)
def test_answers_are_what_h11_makes_of_them(
    status: int, fields: list[tuple[bytes, bytes]], pieces: tuple[bytes, ...]
) -> None:
    quick, slow = Wire(1 << 15), Wire(1 << 15)
    told = answer(quick, PLAIN, status, fields, *pieces)
    # A space that h11 leaves out: the request is not of the usual form.
    assert told == answer(slow, PLAIN.replace(b"Host: ", b"Host:  "), status, fields, *pieces)
    assert quick.our_state is slow.our_state


def test_both_ways_take_turns_on_one_connection() -> None:
    wire = Wire(1 << 15)
    for data in (PLAIN, PLAIN.replace(b"Host: ", b"Host:  "), PLAIN, PLAIN):
        assert answer(wire, data, 200, [(b"Content-Length", b"1")], b"x").endswith(b"\r\n\r\nx")
        wire.start_next_cycle()
    wire.receive_data(PLAIN[:20])
    assert wire.next_event() is h11.NEED_DATA
    wire.receive_data(PLAIN[20:] + PLAIN)  # two at once
    for _ in range(2):
        assert isinstance(wire.next_event(), h11.Request)
        wire.next_event()
        assert isinstance(wire.next_event(), h11.EndOfMessage)
        wire.start(200, [(b"Content-Length", b"0")])
        wire.end()
        wire.start_next_cycle()
    wire.receive_data(PLAIN)
    assert isinstance(wire.next_event(), QuickHead)
