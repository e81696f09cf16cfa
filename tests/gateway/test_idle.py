"""Idle calls, whose next message may come hours later: they delay no other call, and are counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.message_limits import IDLE_EACH
from k8e.doors.grpc.methods import METHODS
from tests.gateway.house import House


def test_commands_that_wait_for_their_input_keep_no_other_out(house: House) -> None:
    guest = house.tenant("idle")
    session = guest.create()
    over = threading.Event()
    method = METHODS["ExecInteractive"]

    def send() -> Iterator[pb.ExecInput]:
        yield pb.ExecInput(start=pb.ExecRequest(session_id=session, command="cat", timeout=300))
        over.wait()

    make: Any = guest.channel.stream_stream(method.path, method.request.SerializeToString, method.response.FromString)
    held = [make(send()) for _ in range(IDLE_EACH)]
    try:
        for call in held:
            assert next(iter(call)).HasField("started")
        assert guest.call("Status", pb.StatusRequest(), seconds=30).available
        assert guest.run(session, "echo hi").stdout == b"hi\n"
        request = pb.ExecInput(start=pb.ExecRequest(session_id=session, command="cat"))
        _, detail = guest.refused("ExecInteractive", request)
        assert detail is not None
        assert (detail.code, detail.retry_after > 0) == ("too_many_streams", True)
        assert house.tenant("other").call("Status", pb.StatusRequest(), seconds=30).available
    finally:
        over.set()
        for call in held:
            call.cancel()
