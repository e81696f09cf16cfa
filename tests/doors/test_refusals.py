"""Requests that the door refuses: those of web pages, malformed, too large or too slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.doors.http import connection, server
from tests.doors.dialogue import JSON, House, open_house

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class TestWebPages:
    """A browser can be told to send requests; it cannot be told to hide that it is one."""

    @pytest.mark.parametrize(
        "origin", ["http://evil.example", "null", "http://localhost", "https://127.0.0.1:8080", ""]
    )
    @pytest.mark.parametrize("target", ["/healthz", "/v1/status", "/metrics"])
    async def test_an_origin_is_refused_whatever_it_is(self, house: House, origin: str, target: str) -> None:
        answer = await house.ask("GET", target, headers={"Origin": origin})
        assert (answer.status, answer.json["code"]) == (403, "origin_refused")
        assert house.service.turned_away == [(f"uid:{os.getuid()}", f"GET {target}", "origin_refused")]
        assert not house.service.callers

    async def test_the_headers_of_a_browser_are_refused(self, house: House) -> None:
        answer = await house.ask("GET", "/v1/status", headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status == 403

    @pytest.mark.parametrize(
        "host", ["evil.example", "localhost.evil.example", "127.0.0.1", "localhost:80", "LOCALHOST"]
    )
    async def test_another_host_is_refused(self, house: House, host: str) -> None:
        """DNS rebinding: the page's own name leads here."""
        answer = await house.ask("GET", "/v1/status", headers={"Host": host})
        assert (answer.status, answer.json["code"]) == (403, "host_refused")
        assert not house.service.callers

    async def test_no_host_is_fine(self, house: House) -> None:
        assert (await house.converse(b"GET /healthz HTTP/1.1\r\nHost:\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert (await house.converse(b"GET /healthz HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    @pytest.mark.parametrize(
        "content_type",
        ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp"],
    )
    async def test_what_a_form_can_send_is_refused(self, house: House, content_type: str) -> None:
        headers = {"Content-Type": content_type} if content_type else {}
        answer = await house.ask("POST", "/v1/sessions", b"{}", headers)
        assert (answer.status, answer.json["code"]) == (415, "content_type")
        assert not house.service.sessions_by_id

    async def test_json_may_name_its_encoding(self, house: House) -> None:
        answer = await house.ask("POST", "/v1/sessions", b"{}", {"Content-Type": "Application/JSON; charset=utf-8"})
        assert answer.status == 201

    async def test_a_preflight_gets_nothing(self, house: House) -> None:
        answer = await house.ask("OPTIONS", "/v1/sessions", headers={"Access-Control-Request-Method": "POST"})
        assert answer.status == 405
        assert not any(name.startswith("access-control") for name in answer.headers)


class TestAddresses:
    @pytest.mark.parametrize(
        "target", ["/", "/v1", "/v2/status", "/v1/sessions/", "/v1/sessions/a/b", "//v1/status", "/v1/../healthz", "*"]
    )
    async def test_that_do_not_exist_are_not_found(self, house: House, target: str) -> None:
        answer = await house.ask("POST", target, {})
        assert answer.status in (400, 404, 405)
        assert not house.service.sessions_by_id

    async def test_have_their_methods(self, house: House) -> None:
        answer = await house.ask("DELETE", "/v1/status")
        assert (answer.status, answer.json["code"]) == (405, "method_not_allowed")

    async def test_a_session_that_looks_like_a_path_is_one_name(self, house: House) -> None:
        answer = await house.ask("GET", "/v1/sessions/..%2F..%2Fetc")
        assert (answer.status, answer.json["error"]) == (404, "there is no session ../../etc")

    @pytest.mark.parametrize("query", ["phase", "a=%zz&b", "&".join(f"a{i}=1" for i in range(30))])
    async def test_a_malformed_query_is_refused(self, house: House, query: str) -> None:
        assert (await house.ask("GET", f"/v1/sessions?{query}")).status == 400


class TestSizes:
    async def test_an_announced_body_that_is_too_large_is_refused_unread(self, house: House) -> None:
        async with await house.dial() as client:
            await client.begin("POST", "/v1/sessions", {**JSON, "Content-Length": str((64 << 20) + 1)})
            answer = await client.read_answer()
        assert (answer.status, answer.json["code"], answer.headers["connection"]) == (413, "message_too_large", "close")

    async def test_so_is_one_that_grows(self, house: House) -> None:
        async with await house.dial() as client:
            client.writer.write(
                b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            answer = asyncio.create_task(client.reader.readuntil(b"\r\n\r\n"))
            block = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
            with pytest.raises(ConnectionError):
                for _ in range(70):
                    client.writer.write(block)
                    await client.writer.drain()
                await client.writer.wait_closed()
            assert (await answer).startswith(b"HTTP/1.1 413")

    async def test_the_largest_is_taken(self, house: House) -> None:
        session = await house.make_session()
        content = bytes(64 << 20)
        octets = {"Content-Type": "application/octet-stream"}
        answer = await house.ask("PUT", f"/v1/sessions/{session}/files?path=a", content, octets)
        assert answer.json["bytes"] == 64 << 20

    async def test_a_head_has_its_limit(self, house: House) -> None:
        answer = await house.converse(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        assert answer.startswith(b"HTTP/1.1 431")

    async def test_a_client_that_waits_to_be_asked_is_asked(self, house: House) -> None:
        """curl does that with larger bodies."""
        async with await house.dial() as client:
            await client.begin("POST", "/v1/sessions", {**JSON, "Content-Length": "2", "Expect": "100-continue"})
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")

    async def test_a_body_where_none_belongs_is_refused(self, house: House) -> None:
        answer = await house.ask("GET", "/healthz", b"x", {"Content-Type": "text/plain"})
        assert answer.status == 413


class TestNonsense:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /healthz\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\n\r\n",  # no Host
            b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
            # A proxy before the door may end the first request elsewhere, and take the rest for another client's.
            b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEAD,
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding : chunked\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: +0\r\n\r\n",
            b"GET /heal\0thz HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ],
    )
    async def test_is_answered_as_such(self, house: House, data: bytes) -> None:
        answer = await house.converse(data)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), answer
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert set(body) == {"error", "detail", "code", "hint"}

    @settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(
        st.one_of(
            st.binary(max_size=300),
            st.lists(
                st.sampled_from([HEAD, HEAD[:30], b"\r\n", b"\0", b"POST ", b"Content-Length: 5\r\n", b"0\r\n\r\n"])
            ).map(b"".join),
            st.tuples(st.integers(0, len(HEAD)), st.binary(max_size=20)).map(lambda cut: HEAD[: cut[0]] + cut[1]),
        )
    )
    async def test_of_any_kind_leaves_the_door_open(self, house: House, data: bytes) -> None:
        answer = await house.converse(data)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), "an answer, or none"
        assert not answer.startswith(b"HTTP/1.1 500")
        assert (await house.ask("GET", "/healthz")).status == 200

    async def test_does_not_reach_the_log_as_an_error(self, house: House, caplog: pytest.LogCaptureFixture) -> None:
        await house.converse(b"\xff\xfe\xfd")
        await house.converse(HEAD[:20])
        assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


class TestSlowness:
    async def test_a_head_that_never_ends_is_given_up(self, tmp_path: Path) -> None:
        async with open_house(tmp_path, head_patience=0.05) as house, await house.dial() as client:
            client.writer.write(HEAD[:10])
            assert await client.reader.read() == b"", "closed without a word"

    async def test_dripping_does_not_buy_time(self, tmp_path: Path) -> None:
        async with open_house(tmp_path, head_patience=0.1) as house, await house.dial() as client:

            async def drip() -> None:
                client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
                while True:
                    client.writer.write(b"X: y\r\n")
                    await asyncio.sleep(0.005)

            dripping = asyncio.create_task(drip())
            with contextlib.suppress(ConnectionResetError):  # what was sent last was not read
                assert await client.reader.read() == b""
            dripping.cancel()

    async def test_others_are_served_meanwhile(self, house: House) -> None:
        slow = [await house.dial() for _ in range(50)]
        for client in slow:
            client.writer.write(HEAD[:10])
        assert (await house.ask("GET", "/healthz")).status == 200
        for client in slow:
            client.writer.write(HEAD[10:])
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            client.writer.close()


class TestCrowds:
    async def test_two_hundred_clients_at_once(self, house: House) -> None:
        session = await house.make_session()

        async def run(number: int) -> str:
            answer = await house.ask("POST", f"/v1/sessions/{session}/runs", {"argv": ["echo", str(number)]})
            return str(answer.json["stdout"])

        outputs = await asyncio.gather(*map(run, range(200)))
        assert outputs == [f"{number}\n" for number in range(200)]

    async def test_one_user_cannot_take_every_place(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "CONNECTIONS_PER_USER", 3)
        clients = [await house.dial() for _ in range(3)]
        for client in clients:
            assert (await client.ask("GET", "/healthz")).status == 200
        async with await house.dial() as fourth:
            answer = await fourth.read_answer()
        assert (answer.status, answer.json["code"]) == (503, "too_many_connections")
        for client in clients:
            client.writer.close()
            await client.writer.wait_closed()


class TestClosing:
    async def test_waits_for_what_is_under_way_and_no_longer_for_the_idle(self, tmp_path: Path) -> None:
        async with open_house(tmp_path) as house:
            session = await house.make_session()
            idle = await house.dial()
            assert (await idle.ask("GET", "/healthz")).status == 200
            busy = asyncio.create_task(house.ask("POST", f"/v1/sessions/{session}/runs", {"code": "sleep 1000"}))
            await house.service.started.wait()
            assert await house.door.close(grace=0) == 1
            assert await idle.reader.read() == b""
            house.service.processes[0].process.kill()
            assert (await busy).json["status"] == "killed", "answered all the same"
            idle.writer.close()


async def test_a_transport_that_is_closed_has_no_client() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        departure = connection.Departure(writer)
        assert not departure.is_gone()
        writer.transport.abort()
        await writer.wait_closed()
        assert departure.is_gone()
