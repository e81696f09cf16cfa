"""Runs whose output is read as it comes, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import h11
import pytest

from k8e.core.model import Phase, RunSpec, Terminal
from k8e.doors.http.frames import BadFrame, Frame, FrameKind, FrameReader
from tests.doors.dialogue import FRAMES, Client, House, pack_frame


async def begin_run(client: Client, session: str, **fields: Any) -> None:
    body = json.dumps({"stream": True, **fields}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    await client.begin("POST", f"/v1/sessions/{session}/runs", headers)
    await client.send(h11.Data(data=body), h11.EndOfMessage())


async def begin_fed_run(client: Client, session: str, **fields: Any) -> None:
    await client.begin("POST", f"/v1/sessions/{session}/runs", FRAMES)
    await client.send(pack_frame(FrameKind.REQUEST, json.dumps(fields).encode()))


async def gather(client: Client) -> tuple[dict[FrameKind, bytes], list[FrameKind]]:
    contents: dict[FrameKind, bytearray] = {}
    kinds = []
    async for frame in client.read_frames():
        contents.setdefault(frame.kind, bytearray()).extend(frame.data)
        kinds.append(frame.kind)
    return {kind: bytes(content) for kind, content in contents.items()}, kinds


class TestStreaming:
    async def test_frames_carry_both_streams_and_end_with_the_result(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="printf 'a\\377'; printf b >&2; exit 7")
            answer = await client.read_answer()
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-k8e-frames")
        assert answer.headers["k8e-exit-code"] == "7", "in the trailer"
        first, *output, last = FrameReader(1 << 20).feed(answer.body)
        assert (first.kind, json.loads(first.data)) == (FrameKind.STARTED, {"run_id": "run-1", "session_id": session})
        assert {frame.kind: frame.data for frame in output} == {FrameKind.STDOUT: b"a\xff", FrameKind.STDERR: b"b"}
        assert last.kind is FrameKind.RESULT
        assert json.loads(last.data) == {
            "exit_code": 7,
            "session_id": session,
            "run_id": "run-1",
            "status": "completed",
            "duration_ms": 1,
            "truncated": False,
            "stdout_bytes": 2,
            "stderr_bytes": 1,
            "denied": [],
        }

    async def test_output_arrives_while_the_command_runs(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="echo ready; read line; echo got $line")
            await client.read_head()
            frames = client.read_frames()
            assert (await anext(frames)).kind is FrameKind.STARTED
            assert await anext(frames) == Frame(FrameKind.STDOUT, b"ready\n")
            await client.send(pack_frame(FrameKind.STDIN, b"it\n"), h11.EndOfMessage())
            assert await anext(frames) == Frame(FrameKind.STDOUT, b"got it\n")
            assert (await anext(frames)).kind is FrameKind.RESULT

    async def test_stdin_in_the_request_is_fed_and_ended(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="cat", stdin="all of it")
            await client.read_head()
            contents, _ = await gather(client)
        assert contents[FrameKind.STDOUT] == b"all of it"

    async def test_without_stdin_the_command_sees_its_end(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="cat; echo done")
            await client.read_head()
            contents, _ = await gather(client)
        assert contents[FrameKind.STDOUT] == b"done\n"

    async def test_much_input_comes_through_exactly(self, house: House) -> None:
        session = await house.make_session()
        block = bytes(range(256)) * 4096
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="sha256sum; head -c 1")
            await client.read_head()

            async def send() -> None:
                for _ in range(16):
                    await client.send(pack_frame(FrameKind.STDIN, block))
                await client.send(h11.EndOfMessage())

            sending = asyncio.create_task(send())
            contents, _ = await gather(client)
            await sending
        assert contents[FrameKind.STDOUT].split()[0].decode() == hashlib.sha256(block * 16).hexdigest()

    async def test_a_fault_before_the_start_is_an_ordinary_answer(self, house: House) -> None:
        async with await house.dial() as client:
            await begin_run(client, "nope", code="true")
            answer = await client.read_answer()
        assert (answer.status, answer.json["code"]) == (404, "session_not_found")

    async def test_a_slow_reader_slows_the_command(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="head -c 50000000 /dev/zero; echo finished >&2")
            await client.read_head()
            # However long we wait here, it does not get further than the buffers between us.
            process = house.service.processes[0]
            for _ in range(200):
                await asyncio.sleep(0)
            assert process.counts[1] < 8_000_000
            contents, _ = await gather(client)
        assert len(contents[FrameKind.STDOUT]) == 50_000_000
        assert contents[FrameKind.STDERR] == b"finished\n"


class TestOddFrames:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x03\x00\x00\x00\x02{}"[:4],
            b"\x00\x00\x00\x00\x01x",
            b"\x09\x00\x00\x00\x00",
            b"\x03\xff\xff\xff\xff",
            b"\x03\x00\x00\x00\x02[]",
        ],
    )
    async def test_are_refused_and_nothing_is_run(self, house: House, data: bytes) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await client.begin("POST", f"/v1/sessions/{session}/runs", FRAMES)
            await client.send(h11.Data(data=data), h11.EndOfMessage())
            answer = await client.read_answer()
        assert answer.status == 400
        assert not house.service.processes

    async def test_in_the_middle_end_the_command(self, house: House) -> None:
        """It has been given input that is not what the client meant."""
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="cat")
            await client.read_head()
            await client.send(pack_frame(FrameKind.RESULT, b"{}"))
            contents, kinds = await gather(client)
        assert kinds[-1] is FrameKind.ERROR
        assert json.loads(contents[FrameKind.ERROR])["code"] == "bad_request"
        await house.service.processes[0].killed.wait()

    async def test_input_that_ends_early_ends_the_command(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="cat")
            await client.read_head()
            client.writer.write_eof()
            contents, _ = await gather(client)
        assert json.loads(contents[FrameKind.ERROR])["code"] == "bad_request"
        await house.service.processes[0].killed.wait()

    def test_a_reader_takes_any_cut(self) -> None:
        stream = b"\x01\x00\x00\x00\x02ab\x02\x00\x00\x00\x00"
        for size in range(1, len(stream) + 1):
            reader = FrameReader(10)
            pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
            frames = [frame for piece in pieces for frame in reader.feed(piece)]
            assert frames == [Frame(FrameKind.STDOUT, b"ab"), Frame(FrameKind.STDERR, b"")]
            assert reader.between_frames

    def test_a_reader_keeps_no_more_than_its_limit(self) -> None:
        with pytest.raises(BadFrame):
            list(FrameReader(10).feed(b"\x01\x00\x00\x00\x0b"))


class TestLeaving:
    """The client closes its connection: what it waited for is ended."""

    async def test_in_a_run_that_waits(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            body = json.dumps({"code": "sleep 1000"}).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            await client.begin("POST", f"/v1/sessions/{session}/runs", headers)
            await client.send(h11.Data(data=body), h11.EndOfMessage())
            await house.service.started.wait()
        await house.service.processes[0].killed.wait()

    async def test_in_a_silent_live_run(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="sleep 1000")
            await client.read_head()
        await house.service.processes[0].killed.wait()

    async def test_in_a_run_that_writes_without_end(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="yes")
            await client.read_head()
        await house.service.processes[0].killed.wait()

    async def test_while_the_command_does_not_take_its_input(self, house: House) -> None:
        """The connection is not read then, and reading would not show its end."""
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="sleep 1000")
            await client.read_head()
            transport: asyncio.WriteTransport = client.writer.transport
            block = pack_frame(FrameKind.STDIN, bytes(1 << 19))
            while not transport.get_write_buffer_size():
                client.writer.write(client.protocol.send(block) or b"")
                await asyncio.sleep(0)
            transport.abort()
        await house.service.processes[0].killed.wait()

    async def test_with_more_requests_sent_ahead(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="sleep 1000")
            client.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000)
            await client.read_head()
            client.writer.transport.abort()
        await house.service.processes[0].killed.wait()

    async def test_but_finishing_to_send_is_not_leaving(self, house: House) -> None:
        session = await house.make_session()
        body = json.dumps({"code": "echo still here"}).encode()
        head = f"POST /v1/sessions/{session}/runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = await house.converse(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b"still here" in answer

    async def test_a_background_run_goes_on(self, house: House) -> None:
        session = await house.make_session()
        answer = await house.ask("POST", f"/v1/sessions/{session}/runs", {"code": "x", "background": True})
        assert answer.json["status"] == "running"
        assert not house.service.processes


class TestSpecs:
    async def test_a_live_run_is_the_same_request(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_run(client, session, code="true", language="node", timeout=3, env={"A": "1"}, workdir="/")
            await client.read_answer()
        spec = house.service.specs[-1]
        assert isinstance(spec, RunSpec)
        assert (spec.language.value, spec.timeout, spec.env, spec.workdir) == ("node", 3.0, {"A": "1"}, "/")


class TestOnce:
    """A session and its one command in one request."""

    async def test_the_session_is_gone_with_the_result(self, house: House) -> None:
        body = {"session": {"image": "host"}, "argv": ["sh", "-c", "cat; exit 5"], "stdin": "in"}
        answer = await house.ask("POST", "/v1/runs", body)
        assert (answer.status, answer.json["stdout"], answer.json["exit_code"]) == (200, "in", 5)
        assert house.service.sessions_by_id[answer.json["session_id"]].phase is Phase.DESTROYED

    async def test_live_with_its_session_in_the_first_frame(self, house: House) -> None:
        async with await house.dial() as client:
            await client.begin("POST", "/v1/runs", FRAMES)
            fields = {"session": {"env": {"A": "b"}}, "argv": ["cat"], "keep": True}
            await client.send(pack_frame(FrameKind.REQUEST, json.dumps(fields).encode()))
            await client.send(pack_frame(FrameKind.STDIN, b"fed"), h11.EndOfMessage())
            await client.read_head()
            contents, kinds = await gather(client)
        assert kinds == [FrameKind.STARTED, FrameKind.STDOUT, FrameKind.RESULT]
        session = house.service.sessions_by_id[json.loads(contents[FrameKind.STARTED])["session_id"]]
        assert (contents[FrameKind.STDOUT], session.phase) == (b"fed", Phase.ACTIVE)

    async def test_a_client_that_leaves_takes_it_along(self, house: House) -> None:
        async with await house.dial() as client:
            await client.begin("POST", "/v1/runs", FRAMES)
            await client.send(pack_frame(FrameKind.REQUEST, b'{"session": {}, "argv": ["sleep", "1000"]}'))
            await client.read_head()
        await house.service.processes[0].killed.wait()
        assert [session.phase for session in house.service.sessions_by_id.values()] == [Phase.DESTROYED]

    async def test_a_command_line_of_any_length_that_the_service_takes(self, house: House) -> None:
        words = ["x" * 100_000] * 15
        async with await house.dial() as client:
            await client.begin("POST", "/v1/runs", FRAMES)
            request = json.dumps({"session": {}, "argv": ["sh", "-c", "echo ${#1} $#", "sh", *words]}).encode()
            await client.send(pack_frame(FrameKind.REQUEST, request), h11.EndOfMessage())
            await client.read_head()
            contents, _ = await gather(client)
        assert contents[FrameKind.STDOUT] == b"100000 15\n"

    @pytest.mark.parametrize("body", [{"session": {"nonsense": 1}}, {"session": 7}, {"nonsense": 1}, {"keep": "yes"}])
    async def test_what_is_not_known_is_refused(self, house: House, body: dict[str, Any]) -> None:
        assert (await house.ask("POST", "/v1/runs", {"argv": ["true"], **body})).status == 400
        assert not house.service.processes


class TestOrders:
    async def test_signals_and_sizes_are_requests_of_their_own(self, house: House) -> None:
        session = await house.make_session()
        async with await house.dial() as client:
            await begin_fed_run(client, session, code="trap 'echo heard; exit 3' USR1; echo ready; while :; do :; done")
            await client.read_head()
            frames = client.read_frames()
            assert (await anext(frames)).kind is FrameKind.STARTED
            assert await anext(frames) == Frame(FrameKind.STDOUT, b"ready\n")
            # The command takes no input, and so there is no way past it.
            block = pack_frame(FrameKind.STDIN, bytes(1 << 20))
            feeding = [asyncio.create_task(client.send(block)) for _ in range(8)]
            assert (await house.ask("POST", "/v1/runs/run-1/resize", {"rows": 7, "columns": 9})).status == 200
            assert (await house.ask("POST", "/v1/runs/run-1/signal", {"signal": 10})).status == 200
            assert await anext(frames) == Frame(FrameKind.STDOUT, b"heard\n")
            assert json.loads((await anext(frames)).data)["exit_code"] == 3
            for task in feeding:
                task.cancel()
        assert house.service.processes[0].sizes == [(7, 9)]

    async def test_a_terminal_is_part_of_the_request(self, house: House) -> None:
        session = await house.make_session()
        terminal = {"rows": 3, "columns": 4, "term": "vt100"}
        await house.ask("POST", f"/v1/sessions/{session}/runs", {"argv": ["true"], "terminal": terminal})
        (spec,) = (spec for spec in house.service.specs if isinstance(spec, RunSpec))
        assert spec.terminal == Terminal(3, 4, "vt100")

    @pytest.mark.parametrize("body", [{"signal": "INT"}, {"signal": 2, "more": 1}, {"signal": 2.5}])
    async def test_what_is_no_order_is_refused(self, house: House, body: dict[str, Any]) -> None:
        assert (await house.ask("POST", "/v1/runs/run-1/signal", body)).status == 400
