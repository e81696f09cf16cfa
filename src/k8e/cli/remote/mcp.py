"""The bridge of `k8e sandbox-mcp` to a gateway: carries an AI agent's messages over gRPC, both ways."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from k8e.cli.process import read_some, write_all
from k8e.cli.remote.connection import explain, open_channel
from k8e.cli.remote.discovery import find_target
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS


def bridge_to_gateway(profile: str, tenant: str) -> int:
    """Raises Failure. The connection is never made twice: the AI agent's session ends with it."""
    target = find_target(profile)
    method = METHODS["ConnectAgent"]
    with open_channel(target.endpoint, target.roots, target.key, target.certificate) as channel:
        carrier = Carrier(pb.AgentOptions(tenant_id=tenant))
        call: Any = channel.stream_stream(method.path, method.request.SerializeToString, method.response.FromString)
        carrier.call = call(carrier.carry())
        try:
            for answer in carrier.call:
                write_all(1, answer.content)
        except grpc.RpcError as error:
            if not carrier.left.is_set():
                raise explain(target.endpoint, error) from error
    return 0


class Carrier:
    """Sends standard input to its end, and ends the call when the AI agent closes our output: answers may come until
    then."""

    def __init__(self, options: pb.AgentOptions) -> None:
        self._options = options
        self.call: Any = None
        self.left = threading.Event()

    def carry(self) -> Iterator[pb.ConnectAgentRequest]:
        yield pb.ConnectAgentRequest(options=self._options)
        while piece := read_some(0):
            yield pb.ConnectAgentRequest(content=piece)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        self.left.set()
        self.call.cancel()
