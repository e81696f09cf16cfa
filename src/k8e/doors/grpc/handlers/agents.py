"""AI agents over gRPC: carries the lines of the Model Context Protocol to the MCP door and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from k8e.core.model import Caller
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.errors import GrpcRefusal, malformed
from k8e.doors.grpc.message_limits import LARGE

if TYPE_CHECKING:
    from k8e.doors.mcp.transport.stdio import ByteStream

SECONDS: Final = 30 * 86_400.0  # of one connection; its certificate ends earlier


class AgentDoor(Protocol):
    """The part of the MCP door that other doors use."""

    async def serve(self, caller: Caller, tenant: str, stream: ByteStream) -> None: ...


class CallStream:
    """The bytes of a call, as the MCP door reads and writes them."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.problem: GrpcRefusal | None = None  # why nothing more was read

    async def read_piece(self) -> bytes | None:
        try:
            message = await self._call.read_idly(pb.ConnectAgentRequest)
            if message is not None and message.WhichOneof("part") != "content":
                raise malformed("a later message has no content")
            if message is not None and len(message.content) > LARGE:
                raise malformed(f"a message has more than {LARGE} bytes")
        except GrpcRefusal as problem:
            self.problem = problem
            return None
        return None if message is None else message.content

    async def send_piece(self, data: bytes) -> None:
        await self._call.write(pb.ConnectAgentResponse(content=data))


class AgentHandlers:
    def __init__(self, agents: AgentDoor) -> None:
        self._agents = agents

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {"ConnectAgent": Handler(self._connect, SECONDS)}

    async def _connect(self, call: Call) -> None:
        first = await call.read_one(pb.ConnectAgentRequest)
        if first.WhichOneof("part") != "options":
            raise malformed("the first message has no options")
        with call.idle():
            stream = CallStream(call)
            await self._agents.serve(call.caller, first.options.tenant_id, stream)
            if stream.problem is not None:
                raise stream.problem
