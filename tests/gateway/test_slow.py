"""Clients whose messages take long to come, be it the line or be it on purpose: they keep nobody out for long."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from k8e.cli.remote import contact
from k8e.core.keys import Keys
from k8e.core.model import Caller
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.calls import SLOW_EACH, Call, Calls, Handler, Inbox
from k8e.doors.grpc.gateway import Credentials, Router
from k8e.doors.grpc.methods import METHODS
from k8e.identity.authority import make_request
from tests.doors.stand_in import StandIn
from tests.gateway.house import Guest, House

ARRIVING = 16  # of one payer at once
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Uploader:
    """Says where a file goes, and sends its content when told to."""

    def __init__(self, guest: Guest, session: str, number: int) -> None:
        self.path = f"file-{number}"
        self._session = session
        self._go_on = threading.Event()
        self._content = b""
        method = METHODS["UploadFile"]
        make: Any = guest.channel.stream_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        self.call = make.future(self._send(), timeout=300)

    def _send(self) -> Iterator[pb.UploadFileRequest]:
        yield pb.UploadFileRequest(header=pb.UploadHeader(session_id=self._session, path=self.path))
        self._go_on.wait()
        if self._content:
            yield pb.UploadFileRequest(content=self._content)

    def finish(self, content: bytes) -> None:
        self._content = content
        self._go_on.set()

    def end(self) -> None:
        self.call.cancel()
        self._go_on.set()


def test_stalled_uploads_keep_nobody_out_and_those_that_go_on_are_finished(house: House) -> None:
    guest = house.tenant("slow")
    session = guest.create()
    stalled = [Uploader(guest, session, number) for number in range(ARRIVING)]
    try:
        # Once they have all arrived, the same tenant's next call waits behind them: for seconds, not for half an hour.
        assert guest.call("Status", pb.StatusRequest(), seconds=60).available
        assert house.tenant("quick").call("Status", pb.StatusRequest(), seconds=60).available
        refused = [one for one in stalled if one.call.done()]
        kept = [one for one in stalled if one not in refused]
        while len(kept) > SLOW_EACH:  # they end one after the other
            assert guest.call("Status", pb.StatusRequest()).available
            kept = [one for one in stalled if not one.call.done()]
        assert len(kept) == SLOW_EACH
        for one in stalled:
            if one not in kept:
                assert one.call.code() is EXHAUSTED
                detail = contact.read_detail(one.call.exception())
                assert detail is not None
                assert (detail.code, detail.retry_after > 0, bool(detail.hint)) == ("too_many_slow", True, True)
        for one in kept:
            one.finish(b"in the end\n")
        assert [one.call.result(60).bytes for one in kept] == [len(b"in the end\n")] * SLOW_EACH
        read = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, path=kept[0].path))
        assert read.content == b"in the end\n"
        # A refused one has left nothing.
        lost = next(one for one in stalled if one not in kept)
        code, _ = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path=lost.path))
        assert code is grpc.StatusCode.NOT_FOUND
    finally:
        for one in stalled:
            one.end()


def test_strangers_who_say_nothing_do_not_keep_others_from_logging_in(house: House) -> None:
    nobody = house.nobody()
    method = METHODS["Login"]
    over = threading.Event()

    def send() -> Iterator[pb.LoginRequest]:
        over.wait()
        yield from ()

    make: Any = nobody.channel.stream_stream(method.path, method.request.SerializeToString, method.response.FromString)
    silent = [make(send(), timeout=300) for _ in range(2 * ARRIVING)]
    try:
        assert house.tenant("latecomer").call("Status", pb.StatusRequest()).available
    finally:
        over.set()
        for call in silent:
            call.cancel()


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Our way of serving calls, where little time is much."""
    keys = Keys(tmp_path / "identity")
    authority, _ = await keys.open()

    async def take(call: Call) -> None:
        while await call.read(pb.UploadFileRequest, 0.2) is not None:
            pass
        await call.write(pb.UploadFileResponse(bytes=1))

    server = grpc.aio.server()
    calls = Calls(StandIn(), keys, Inbox(prompt=0.05))
    server.add_generic_rpc_handlers((Router(calls, {"/t/Take": Handler(take)}),))
    port = server.add_secure_port("127.0.0.1:0", Credentials(authority, ["127.0.0.1"]).make())
    await server.start()
    key, request = make_request()
    issued = await keys.login_local(Caller(0), request)
    credentials = grpc.ssl_channel_credentials(authority.certificate, key, issued.certificate.encode())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        yield channel
    await server.stop(0)


async def test_a_message_that_does_not_come_ends_its_call(channel: grpc.aio.Channel) -> None:
    for _ in range(2 * SLOW_EACH):  # each gives its place back
        call: Any = channel.stream_stream("/t/Take")()
        await call.write(b"")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        detail = contact.read_detail(ended.value)
        assert detail is not None
        assert (ended.value.code(), detail.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "message_stalled")
    call = channel.stream_stream("/t/Take")()
    await call.write(b"")
    await call.done_writing()
    assert pb.UploadFileResponse.FromString(await call.read()).bytes == 1
