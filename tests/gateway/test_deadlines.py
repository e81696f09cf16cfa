"""No call lasts for ever, whatever the client says or does not say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from k8e.cli.remote.connection import read_detail
from k8e.core.access.keys import Keys
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.dispatcher import Dispatcher
from k8e.doors.grpc.server import Router, ServerCredentials
from k8e.identity.authority import make_request
from tests.doors.stand_in import StandIn
from tests.gateway.house import House


class Door:
    """Our way of serving calls, with methods of the test's own."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended: list[str] = []

    async def wait(self, call: Call) -> None:
        await call.read_one(pb.StatusRequest)
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("wait")

    async def last(self, call: Call) -> None:
        await call.read_one(pb.StatusRequest)
        call.allow(0.1)
        await asyncio.Event().wait()

    async def fail(self, call: Call) -> None:
        await call.read_one(pb.StatusRequest)
        raise ZeroDivisionError("a secret cause")

    async def refuse(self, call: Call) -> None:
        raise Fault(Kind.EXHAUSTED, "too_many_things", "too many", hint="wait", retry_after=2.5)


@pytest.fixture
async def door() -> Door:
    return Door()


@pytest.fixture
async def channel(tmp_path: Path, door: Door) -> AsyncIterator[grpc.aio.Channel]:
    keys = Keys(tmp_path / "identity")
    authority, _ = await keys.open()
    table = {
        "/t/Wait": Handler(door.wait, 0.2),
        "/t/Stay": Handler(door.wait, 600),
        "/t/Last": Handler(door.last, 60),
        "/t/Fail": Handler(door.fail),
        "/t/Refuse": Handler(door.refuse),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Router(Dispatcher(StandIn(), keys), table),))
    port = server.add_secure_port("127.0.0.1:0", ServerCredentials(authority, ["127.0.0.1"]).make())
    await server.start()
    key, request = make_request()
    issued = await keys.login_local(Caller(0), request)
    credentials = grpc.ssl_channel_credentials(authority.certificate, key, issued.certificate.encode())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        yield channel
    await server.stop(0)


async def fail(channel: grpc.aio.Channel, path: str, seconds: float | None = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        call: Any = channel.unary_unary(path)
        await call(b"", timeout=seconds)
    detail = read_detail(error.value)
    assert "secret" not in str(error.value)
    return error.value.code(), detail.code if detail else ""


async def test_a_call_without_a_deadline_gets_one(channel: grpc.aio.Channel, door: Door) -> None:
    assert await fail(channel, "/t/Wait") == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
    assert door.ended == ["wait"]


async def test_a_handler_knows_better_how_long_it_takes(channel: grpc.aio.Channel) -> None:
    assert await fail(channel, "/t/Last") == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")


async def test_a_clients_own_deadline_ends_the_work_too(channel: grpc.aio.Channel, door: Door) -> None:
    while not door.begun:  # on a busy machine the deadline may come before the call
        assert await fail(channel, "/t/Stay", 0.5) == (grpc.StatusCode.DEADLINE_EXCEEDED, "")
    while len(door.ended) < door.begun:
        await asyncio.sleep(0.01)


async def test_an_error_of_ours_says_nothing_about_its_cause(channel: grpc.aio.Channel) -> None:
    assert await fail(channel, "/t/Fail") == (grpc.StatusCode.INTERNAL, "internal")


async def test_a_refusal_comes_before_the_message_is_read(channel: grpc.aio.Channel) -> None:
    assert await fail(channel, "/t/Refuse") == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_things")


def test_a_call_ends_with_the_certificate_that_it_was_made_with(house: House) -> None:
    guest = house.guest(house.make_key("fleeting", ttl=2.0))
    session = guest.create()
    waiting = guest.begin("ExecStream", pb.ExecRequest(session_id=session, command="sleep 68", timeout=60))
    assert next(waiting).HasField("started")
    with pytest.raises(grpc.RpcError) as ended:
        next(waiting)
    detail = read_detail(ended.value)
    assert (ended.value.code(), detail and detail.code) == (
        grpc.StatusCode.UNAUTHENTICATED,
        "certificate_expired",
    )
