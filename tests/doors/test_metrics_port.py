"""/metrics on a port: the one request that is answered, and peers that ask for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from k8e.doors.http import metrics
from k8e.doors.http.metrics import MetricsServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    server = MetricsServer(lambda: "runs_total 7\n")
    server.open("127.0.0.1:0")
    yield server
    await server.close()


async def ask(server: MetricsServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_it_answers_with_the_metrics(server: MetricsServer) -> None:
    head, _, body = (await ask(server, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
    assert body == b"runs_total 7\n"


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1", b"POST /metrics HTTP/1.1", b"GET /v1/sessions HTTP/1.1", b"", b"\xff"]
)
async def test_it_answers_nothing_else(server: MetricsServer, line: bytes) -> None:
    assert (await ask(server, line + b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")


async def test_silent_peers_take_their_places_only(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(metrics._MOST)]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await reader.read() == b""  # closed at once
    for _, other in [*silent, (reader, writer)]:
        other.close()
    while not (await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")):  # their places are free again
        await asyncio.sleep(0.01)


async def test_a_port_that_is_taken_is_logged(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    other = MetricsServer(lambda: "")
    other.open(f"127.0.0.1:{server.port}")
    assert "metrics_not_served" in caplog.text
    await other.close()
