"""The bridge of `k8e sandbox-mcp` to a gateway: carries an AI agent's messages over gRPC, both ways."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, Final

import grpc

from k8e.cli.mcp.bridge import Bridge
from k8e.cli.remote.connection import explain
from k8e.cli.remote.discovery import find_target
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS

PIECE: Final = 256 << 10
AHEAD: Final = 4  # pieces that wait for the gateway; the agent waits with the next
LOOK: Final = 0.2  # seconds between two looks whether a connection has ended that takes no more


def bridge_to_gateway(profile: str, tenant: str) -> int:
    """Raises Failure."""
    return Bridge(lambda: RemoteLink(profile, tenant)).run()


class RemoteLink:
    """One call of ConnectAgent."""

    def __init__(self, profile: str, tenant: str) -> None:
        target = find_target(profile)
        self._endpoint = target.endpoint
        self._options = pb.AgentOptions(tenant_id=tenant)
        self._pieces: queue.Queue[bytes | None] = queue.Queue(AHEAD)
        self._ended = False
        self._channel = target.open_channel()
        method = METHODS["ConnectAgent"]
        start: Any = self._channel.stream_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        self._call: Any = start(self._messages())

    def _messages(self) -> Iterator[pb.ConnectAgentRequest]:
        yield pb.ConnectAgentRequest(options=self._options)
        while (piece := self._pieces.get()) is not None:
            yield pb.ConnectAgentRequest(content=piece)

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            self._put(data[start : start + PIECE])

    def end_input(self) -> None:
        self._put(None)

    def _put(self, piece: bytes | None) -> None:
        """When the bridge connects again, no thread reads yet, and only the call itself knows of its end."""
        while not self._ended and self._call.is_active():
            try:
                return self._pieces.put(piece, timeout=LOOK)
            except queue.Full:
                pass
        raise ConnectionResetError("the call has ended")

    def receive(self) -> Iterator[bytes]:
        try:
            for answer in self._call:
                yield answer.content
        except grpc.RpcError as error:
            raise explain(self._endpoint, error, harmless=False) from error
        finally:
            self._ended = True
            self._channel.close()

    def shut_down(self) -> None:
        self._call.cancel()
