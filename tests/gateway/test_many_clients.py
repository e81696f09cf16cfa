"""Two hundred clients at once, each with a connection of their own: nothing is lost, nothing is mixed up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from tests.gateway.house import ALONE, Guest, House, open_house

CLIENTS = 200
ROUNDS = int(os.environ.get("K8E_ROUNDS", "2"))  # make soak: more
TENANTS = 10


class Visitor:
    """One of them: what it hears is its own, or the test fails."""

    def __init__(self, number: int, tenant: Guest, session: str) -> None:
        self.token = f"{session}-{number}"
        self.session = session
        self.answers = 0
        credentials = grpc.ssl_channel_credentials(tenant.roots, tenant.key, tenant.certificate)
        self._channel = grpc.aio.secure_channel(tenant.endpoint, credentials, list(ALONE))

    async def visit(self) -> None:
        async with self._channel:
            for number in range(ROUNDS):
                await self.execute(f"{self.token}-{number}")
                await self.keep_a_file(f"{self.token}-{number}")
                await self.stream(f"{self.token}-{number}")
                await self.miss(number)

    async def call(self, name: str, message: Any) -> Any:
        method = METHODS[name]
        call = self._channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        answer = await call(message, timeout=120)
        self.answers += 1
        return answer

    async def execute(self, token: str) -> None:
        run = await self.call("Exec", pb.ExecRequest(session_id=self.session, argv=[b"echo", token.encode()]))
        assert (run.stdout, run.exit_code, run.session_id) == (f"{token}\n".encode(), 0, self.session)

    async def keep_a_file(self, token: str) -> None:
        content = token.encode() * 100
        path = f"files/{self.token}"
        await self.call("WriteFile", pb.WriteFileRequest(session_id=self.session, path=path, content=content))
        read = await self.call("ReadFile", pb.ReadFileRequest(session_id=self.session, path=path))
        assert read.content == content

    async def stream(self, token: str) -> None:
        method = METHODS["ExecInteractive"]
        call: Any = self._channel.stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )

        async def inputs() -> AsyncIterator[pb.ExecInput]:
            yield pb.ExecInput(start=pb.ExecRequest(session_id=self.session, argv=[b"cat"], timeout=100))
            for _ in range(3):
                yield pb.ExecInput(stdin=token.encode())

        output, ended = b"", False
        async for frame in call(inputs(), timeout=120):
            output += frame.output.data
            ended = ended or frame.HasField("result")
        assert (output, ended) == (token.encode() * 3, True)
        self.answers += 1

    async def miss(self, number: int) -> None:
        wanted = f"missing-{self.token}-{number}"[-63:].lstrip("-")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.call("GetSession", pb.GetSessionRequest(session_id=wanted))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert wanted in (error.value.details() or "")
        self.answers += 1


async def test_two_hundred_clients_at_once(house: House) -> None:
    tenants = [house.tenant(f"tenant{number}") for number in range(TENANTS)]
    sessions = [tenant.create() for tenant in tenants]
    visitors = [Visitor(number, tenants[number % TENANTS], sessions[number % TENANTS]) for number in range(CLIENTS)]
    await asyncio.gather(*(visitor.visit() for visitor in visitors))
    assert sum(visitor.answers for visitor in visitors) == CLIENTS * ROUNDS * 5


async def test_a_flood_of_one_tenant_does_not_keep_out_another() -> None:
    """A tenant that has reached its limit is told so; another one is served meanwhile."""
    with open_house("[quotas]\nconcurrent_runs = 8\nsessions = 2\n") as house:
        flood, other = house.tenant("flood"), house.tenant("other")
        session, quiet = flood.create(), other.create()
        calls = [flood.begin("Exec", pb.ExecRequest(session_id=session, command="sleep 2")) for _ in range(100)]
        for number in range(20):
            assert other.run(quiet, f"echo {number}").stdout == f"{number}\n".encode()
        codes: dict[str, int] = {}
        for call in calls:
            try:
                next(call)
                codes["OK"] = codes.get("OK", 0) + 1
            except grpc.RpcError as error:
                codes[error.code().name] = codes.get(error.code().name, 0) + 1
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert codes["OK"] >= 8
        flood.create()
        code, detail = flood.refused("CreateSession", pb.CreateSessionRequest())
        assert detail is not None
        assert (code, detail.code, detail.retry_after > 0) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too_many_sessions",
            True,
        )
        other.create()
