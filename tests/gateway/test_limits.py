"""Messages at and over the limits, and messages that are none."""

from __future__ import annotations

import os
import random
import socket
import threading
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.message_limits import ARRIVING_EACH, SLOW_EACH
from k8e.doors.grpc.methods import METHODS
from tests.gateway.house import Guest, House
from tests.gateway.test_matrix import ask
from tests.shares import seed

MESSAGE = 64 << 20
CASES = int(os.environ.get("K8E_FUZZ_CASES", "400"))
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@pytest.fixture(scope="module")
def guest(house: House) -> Guest:
    return house.tenant("acme")


@pytest.fixture(scope="module")
def session(guest: Guest) -> str:
    return guest.create()


class TestSizes:
    def test_a_file_as_large_as_a_message_goes_in_and_out(self, guest: Guest, session: str) -> None:
        content = os.urandom(1 << 20) * 64
        guest.call("WriteFile", pb.WriteFileRequest(session_id=session, path="full", content=content))
        read = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, path="full"))
        assert read.content == content

    def test_one_byte_more_is_refused_by_its_name(self, guest: Guest, session: str) -> None:
        request = pb.WriteFileRequest(session_id=session, path="more", content=bytes(MESSAGE + 1))
        code, detail = guest.refused("WriteFile", request)
        assert (code, detail and detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "content")

    def test_far_more_is_refused_before_it_is_there(self, house: House, guest: Guest, session: str) -> None:
        # With a client that does not know the limit.
        credentials = grpc.ssl_channel_credentials(guest.roots, guest.key, guest.certificate)
        with grpc.secure_channel(house.endpoint, credentials, [("grpc.max_send_message_length", -1)]) as channel:
            call: Any = channel.stream_stream(METHODS["WriteFile"].path)
            request = pb.WriteFileRequest(session_id=session, path="more", content=bytes(MESSAGE + (2 << 20)))
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([request.SerializeToString()]), timeout=60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, _ = guest.refused("ReadFile", pb.ReadFileRequest(session_id=session, path="more"))
        assert code is grpc.StatusCode.NOT_FOUND

    def test_many_at_once_are_all_taken_and_do_not_fill_the_memory(
        self, house: House, guest: Guest, session: str
    ) -> None:
        size, many = 8 << 20, 30
        contents = [bytes([number]) * size for number in range(many)]
        failures: list[object] = []

        def write(number: int) -> None:
            try:
                request = pb.WriteFileRequest(session_id=session, path="many", content=contents[number])
                guest.call("WriteFile", request)
            except grpc.RpcError as error:
                failures.append(error)

        before = read_peak(house)
        threads = [threading.Thread(target=write, args=(number,)) for number in range(many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        content = guest.call("ReadFile", pb.ReadFileRequest(session_id=session, path="many")).content
        assert content in contents
        # 16 that arrive, some that are slow, 4 that are dealt with, those as bytes and as a message; all at once would
        # be twice the 30.
        assert read_peak(house) - before < (ARRIVING_EACH + SLOW_EACH + 4 * 2 + 2) * size


def read_peak(house: House) -> int:
    """The most that the daemon has had in memory."""
    with open(f"/proc/{house.machine.daemon_pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


class TestNonsense:
    """The daemon answers that it is nonsense, and goes on. `open_house` looks for tracebacks in its log."""

    @pytest.mark.parametrize("turn", range(4))
    def test_is_the_callers_mistake(self, house: House, guest: Guest, turn: int) -> None:
        source = random.Random(seed(f"gateway, {turn}"))
        unauthenticated = house.unauthenticated()
        for _ in range(CASES // 4):
            method = source.choice(sorted(METHODS))
            who = unauthenticated if source.random() < 0.1 else guest
            contents = [mangle(source, message) for message in ask(method, "sess-0000000000000000")]
            if source.random() < 0.1:
                contents = []
            code = who.send(METHODS[method].path, *contents, seconds=20)
            assert code not in OURS, (method, contents)
        assert guest.call("Status", pb.StatusRequest()).available

    @pytest.mark.parametrize("content", [b"", b"\0", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 5000])
    def test_in_any_method_is_no_error_of_ours(self, guest: Guest, content: bytes) -> None:
        paths = [method.path for method in METHODS.values()]
        paths += ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
        for path in paths:
            assert guest.send(path, content, seconds=20) not in OURS, path

    def test_that_is_not_even_tls_is_dropped(self, house: House, guest: Guest) -> None:
        host, _, port = house.endpoint.rpartition(":")
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(5000), b""):
            with socket.create_connection((host, int(port)), 30) as connection:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                try:
                    while connection.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        assert guest.call("Status", pb.StatusRequest()).available


def mangle(source: random.Random, message: Message) -> bytes:
    """A message with some of its bytes changed, cut, doubled or made up."""
    content = bytearray(message.SerializeToString())
    for _ in range(source.randrange(4)):
        at = source.randrange(len(content) + 1)
        match source.randrange(5):
            case 0 if content:
                content[at % len(content)] = source.randrange(256)
            case 1:
                del content[at : at + source.randrange(1, 9)]
            case 2:
                content[at:at] = source.randbytes(source.randrange(1, 20))
            case 3:
                content += content[: source.randrange(len(content) + 1)]
            case 4:
                content[at:at] = b"\xff" * source.randrange(1, 12)
    return bytes(content)
