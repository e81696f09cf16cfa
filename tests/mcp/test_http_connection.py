"""HTTP/1.1 below the protocol: requests that are malformed, refused or broken off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.doors.connection_limits import ConnectionLimits
from tests.mcp.test_connection_limits import connect, open_address

MIB = 1 << 20


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[int]:
    async with open_address(tmp_path, ConnectionLimits(100)) as port:
        yield port


@pytest.mark.parametrize(
    ("first", "headers", "status"),
    [
        (b"nonsense", b"", 400),
        (b"POST /mcp HTTP/1.1", b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST /mcp HTTP/1.1", b"Content-Length: %d\r\n" % (17 * MIB), 413),
        (b"POST /mcp HTTP/1.1", b"Authorization: Bearer one\r\nAuthorization: Bearer two\r\n", 401),
        (b"HEAD /mcp HTTP/1.1", b"", 405),
        (b"HEAD /mcp HTTP/1.1", b"Authorization: Bearer k8e_x\r\n", 401),
        (b"HEAD /other HTTP/1.1", b"", 404),
        (b"POST /mcp?x&&y=1& HTTP/1.1", b"Authorization: Bearer k8e_x\r\n", 401),
        (b"GET /mcp HTTP/1.1", b"X: " + b"x" * MIB + b"\r\n", 431),
    ],
)
async def test_a_request_that_is_none_is_refused(port: int, first: bytes, headers: bytes, status: int) -> None:
    reader, writer = await connect(port)
    writer.write(b"%b\r\nHost: 127.0.0.1:%d\r\n%b\r\n" % (first, port, headers))
    assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
    writer.transport.abort()


async def test_a_refusal_is_read_also_by_a_client_that_is_still_sending(port: int) -> None:
    reader, writer = await connect(port)
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer k8e_x\r\nContent-Length: {8 * MIB}\r\n"
    )
    writer.write(head.encode() + b"\r\n")
    assert b" 401 " in await reader.readuntil(b"\n")
    writer.write(b" " * 8 * MIB)
    await writer.drain()
    answer = await reader.readuntil(b"}\n")
    assert b"connection: close" in answer.lower()
    writer.transport.abort()


async def test_a_connection_goes_on_after_a_refusal(port: int) -> None:
    reader, writer = await connect(port)
    for _ in range(3):
        writer.write(b"GET /other HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port)
        assert b" 404 " in await reader.readuntil(b"}\n")
    writer.transport.abort()
