"""Clients who send more than there is room for, at every door of a daemon at once: its memory stays as it is."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from k8e.cli.remote.connection import read_detail
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from tests.gateway.house import Guest, House, open_house

MIB = 1 << 20
SIZE = 60 * MIB
CLIENTS = 8
EACH = 66 * MIB


def read_peak(house: House) -> int:
    """The most memory that the daemon ever had, in bytes."""
    status = Path(f"/proc/{house.machine.daemon_pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def stall(house: House, session: str, over: threading.Event) -> bytes:
    """All of a body but its last byte, as far as it is taken. What the daemon says to it until all is over."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(0.2)
        client.connect(str(house.machine.folder / "r" / "k8e.sock"))
        head = f"PUT /v1/sessions/{session}/files?path=f HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/octet-stream\r\nContent-Length: {SIZE}\r\n\r\n"
        rest = memoryview(head.encode() + b"x" * (SIZE - 1))
        with contextlib.suppress(ConnectionError):
            while rest and not over.is_set():
                with contextlib.suppress(TimeoutError):
                    rest = rest[client.send(rest) :]
        answer = b""
        while not over.is_set() or b"too_many_bytes" in answer:
            with contextlib.suppress(TimeoutError, ConnectionError):
                piece = client.recv(1 << 16)
                answer += piece
                if not piece:
                    break
        return answer


def feed(guest: Guest, session: str) -> tuple[grpc.StatusCode, str]:
    """A command whose input comes in one piece that is far too large."""
    method = METHODS["ExecInteractive"]

    def send() -> Iterator[pb.ExecInput]:
        yield pb.ExecInput(start=pb.ExecRequest(session_id=session, command="cat > /dev/null", timeout=50))
        yield pb.ExecInput(stdin=b"x" * SIZE)

    make: Any = guest.channel.stream_stream(method.path, method.request.SerializeToString, method.response.FromString)
    call = make(send(), timeout=60)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        detail = read_detail(error)
        return call.code(), detail.code if detail else ""
    return call.code(), ""


def test_floods_of_bytes_fill_no_memory_and_keep_no_other_out() -> None:
    with open_house(f"[quotas]\nrequest_bytes = {EACH}\n") as house:
        flood, other = house.tenant("flood"), house.tenant("other")
        session, quiet = flood.create(), other.create()
        _, made = house.ask("POST", "/v1/sessions", {})
        over = threading.Event()
        before = read_peak(house)
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            stalled = [pool.submit(stall, house, made["session_id"], over) for _ in range(CLIENTS)]
            fed = [pool.submit(feed, flood, session) for _ in range(CLIENTS)]
            try:
                number = 0
                while not all(each.done() for each in fed) or not any(each.done() for each in stalled):
                    assert other.run(quiet, f"echo {number}").stdout == f"{number}\n".encode()
                    number += 1
            finally:
                over.set()
            ended = [each.result() for each in fed]
            answers = [answer for each in stalled if (answer := each.result())]
        assert {code for code, _ in ended} <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
        assert (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_bytes") in ended
        assert answers
        assert all(b" 429 " in answer and b"too_many_bytes" in answer for answer in answers)
        # Two payers' shares, each of them in some copies for a moment; what was sent is a gigabyte.
        assert read_peak(house) - before < 7 * EACH < 2 * CLIENTS * SIZE
        assert number > 20
