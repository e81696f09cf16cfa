"""Clients whose messages arrive slowly, because of the line or on purpose: they do not keep others out for long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from k8e.cli.remote.connection import read_detail
from k8e.core.access.keys import Keys
from k8e.core.model import Caller
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.dispatcher import Dispatcher
from k8e.doors.grpc.message_limits import ARRIVING_ALL, ARRIVING_EACH, SLOW_EACH, MessageLimits
from k8e.doors.grpc.methods import METHODS
from k8e.doors.grpc.server import Router, ServerCredentials
from k8e.identity.authority import make_request
from tests.doors.stand_in import StandIn
from tests.gateway.house import Guest, House


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


def test_stalled_uploads_keep_no_other_out_and_are_finished_when_they_go_on(house: House) -> None:
    guest = house.tenant("slow")
    session = guest.create()
    stalled = [Uploader(guest, session, number) for number in range(ARRIVING_EACH)]
    try:
        # Once they have all begun, the same tenant's next call waits behind them: for seconds, not for half an hour.
        assert guest.call("Status", pb.StatusRequest(), seconds=60).available
        assert house.tenant("quick").call("Status", pb.StatusRequest(), seconds=60).available
        assert not any(one.call.done() for one in stalled)
        for one in stalled:
            one.finish(b"in the end\n")
        assert [one.call.result(60).bytes for one in stalled] == [len(b"in the end\n")] * ARRIVING_EACH
        read = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, path=stalled[-1].path))
        assert read.content == b"in the end\n"
    finally:
        for one in stalled:
            one.end()


def test_unauthenticated_callers_who_send_nothing_do_not_keep_others_from_logging_in(house: House) -> None:
    unauthenticated = house.unauthenticated()
    method = METHODS["Login"]
    over = threading.Event()

    def send() -> Iterator[pb.LoginRequest]:
        over.wait()
        yield from ()

    make: Any = unauthenticated.channel.stream_stream(
        method.path, method.request.SerializeToString, method.response.FromString
    )
    silent = [make(send(), timeout=300) for _ in range(ARRIVING_EACH + SLOW_EACH - 1)]
    try:
        assert house.tenant("latecomer").call("Status", pb.StatusRequest()).available
    finally:
        over.set()
        for call in silent:
            call.cancel()


class Post:
    """Our way of serving calls, where little time is much, and callers of any user id."""

    def __init__(self, keys: Keys, patience: float) -> None:
        self._keys = keys
        self._patience = patience
        self._channels: list[grpc.aio.Channel] = []
        self.port = 0

    async def take(self, call: Call) -> None:
        while await call.read(pb.UploadFileRequest, self._patience) is not None:
            pass
        await call.write(pb.UploadFileResponse(bytes=1))

    async def meet(self, uid: int) -> grpc.aio.Channel:
        authority, _ = await self._keys.open()
        key, request = make_request()
        issued = await self._keys.login_local(Caller(uid), request)
        credentials = grpc.ssl_channel_credentials(authority.certificate, key, issued.certificate.encode())
        channel = grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials)
        self._channels.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def open_post(folder: Path, patience: float) -> AsyncIterator[Post]:
    keys = Keys(folder / "identity")
    authority, _ = await keys.open()
    post = Post(keys, patience)
    server = grpc.aio.server()
    calls = Dispatcher(StandIn(), keys, MessageLimits(prompt=0.05))
    server.add_generic_rpc_handlers((Router(calls, {"/t/Take": Handler(post.take)}),))
    post.port = server.add_secure_port("127.0.0.1:0", ServerCredentials(authority, ["127.0.0.1"]).make())
    await server.start()
    try:
        yield post
    finally:
        await post.close()
        await server.stop(0)


async def begin(channel: grpc.aio.Channel) -> Any:
    """A call that has more to say."""
    call: Any = channel.stream_stream("/t/Take")()
    await call.write(b"")
    return call


async def read_end(call: Any) -> tuple[grpc.StatusCode, pb.ErrorDetail]:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    detail = read_detail(ended.value)
    assert detail is not None
    assert detail.hint
    return ended.value.code(), detail


async def test_a_message_that_does_not_come_ends_its_call(tmp_path: Path) -> None:
    async with open_post(tmp_path, 0.2) as post:
        channel = await post.meet(0)
        # As slow messages, and in turns that no other payer wants; each is given back.
        for _ in range(2):
            for call in [await begin(channel) for _ in range(SLOW_EACH + 3)]:
                code, detail = await read_end(call)
                assert (code, detail.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "message_stalled")
        call = await begin(channel)
        await call.done_writing()
        assert pb.UploadFileResponse.FromString(await call.read()).bytes == 1


async def test_who_holds_a_turn_for_nothing_goes_when_somebody_else_wants_it(tmp_path: Path) -> None:
    hostile = range(1000, 1000 + ARRIVING_ALL // ARRIVING_EACH)
    async with open_post(tmp_path, 600.0) as post:
        held = []
        for uid in hostile:
            channel = await post.meet(uid)
            held += [await begin(channel) for _ in range(ARRIVING_EACH + SLOW_EACH)]
        channel = await post.meet(2000)
        for _ in range(3):
            call = await begin(channel)
            await call.done_writing()
            async with asyncio.timeout(60):
                assert pb.UploadFileResponse.FromString(await call.read()).bytes == 1
        ended = [call for call in held if call.done()]
        assert 1 <= len(ended) < len(held)
        code, detail = await read_end(ended[0])
        assert (code, detail.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_slow")
        assert detail.retry_after > 0
        for call in held:
            call.cancel()
