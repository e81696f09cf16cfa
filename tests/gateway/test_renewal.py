"""The gateway's certificate is renewed while its clients go on."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from k8e.cli.remote.connection import split_endpoint
from k8e.core.access.keys import Keys
from k8e.core.model import Caller, RunSpec
from k8e.doors.addresses import list_names
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from k8e.doors.grpc.server import GrpcServer, ServerCredentials
from k8e.doors.mcp.endpoint import McpEndpoint
from k8e.identity.authority import SERVER_LIFE, Authority, make_request
from tests.core.rig import Rig, open_rig, remove_sandboxes
from tests.gateway.house import ALONE

ROOT = Caller(0)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as rig:
        yield rig
    await remove_sandboxes(tmp_path)


@pytest.fixture
async def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "identity")


@pytest.fixture
async def gateway(rig: Rig, keys: Keys) -> AsyncIterator[GrpcServer]:
    gateway = GrpcServer(rig.service, keys, McpEndpoint(rig.service, keys), rig.folder)
    await gateway.open("127.0.0.1:0", [])
    yield gateway
    await gateway.close(5)


def read_serial(endpoint: str) -> int:
    host, port = split_endpoint(endpoint)
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, port)).encode()).serial_number


async def test_under_load_no_client_notices(rig: Rig, keys: Keys, gateway: GrpcServer) -> None:
    session = await rig.create(ROOT)
    private, request = make_request()
    issued = await keys.login_local(ROOT, request)
    credentials = grpc.ssl_channel_credentials(issued.authority.encode(), private, issued.certificate.encode())
    method = METHODS["Exec"]
    answered = 0
    over = asyncio.Event()

    def open_channel() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(gateway.endpoint, credentials, list(ALONE))

    async def run(channel: grpc.aio.Channel, token: str) -> None:
        nonlocal answered
        call = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        answer: Any = await call(pb.ExecRequest(session_id=session, argv=[b"echo", token.encode()]), timeout=60)
        assert answer.stdout == f"{token}\n".encode()
        answered += 1

    async def stay(number: int) -> None:
        """One connection for all calls."""
        async with open_channel() as channel:
            while not over.is_set():
                await run(channel, f"stays-{number}-{answered}")

    async def come_and_go(number: int) -> None:
        """A handshake for every call."""
        while not over.is_set():
            async with open_channel() as channel:
                await run(channel, f"comes-{number}-{answered}")

    tasks = [asyncio.create_task(work(number)) for work in (stay, come_and_go) for number in range(4)]
    serials = [await asyncio.to_thread(read_serial, gateway.endpoint)]
    assert gateway.credentials is not None
    for _ in range(3):
        before = answered
        gateway.credentials.renew()
        serials.append(await asyncio.to_thread(read_serial, gateway.endpoint))
        while answered < before + 20 and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*tasks)
    assert len(set(serials)) == len(serials)
    await rig.service.runs.run(ROOT, RunSpec(session, "true"))


def test_it_happens_when_a_third_of_its_life_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = ServerCredentials(Authority.open(tmp_path, time.time()), ["localhost"])
    assert credentials._fetch() is None
    began = time.time()
    monkeypatch.setattr(time, "time", lambda: began + SERVER_LIFE * 0.7)
    assert credentials._fetch() is not None
    assert credentials._fetch() is None


def test_its_names_are_those_that_clients_use() -> None:
    assert list_names("10.1.2.3", ["box.example"])[:4] == ["box.example", "localhost", "127.0.0.1", "::1"]
    assert "10.1.2.3" in list_names("10.1.2.3", [])
    assert not {"0.0.0.0", "::"} & {*list_names("0.0.0.0", []), *list_names("::", [])}


async def test_a_port_that_is_taken_is_no_reason_to_die(rig: Rig, keys: Keys, gateway: GrpcServer) -> None:
    from k8e.core.errors import Fault
    from k8e.doors.grpc.gateway import Gateway
    from k8e.settings import GatewaySettings

    settings = GatewaySettings(listen=gateway.endpoint)
    (rig.folder / "second").mkdir()
    opening = Gateway(rig.service, keys, settings, McpEndpoint(rig.service, keys), rig.folder / "second")
    await opening.attempt()
    assert "cannot listen" in opening.problem
    with pytest.raises(Fault) as refused:
        await opening.endpoint()
    assert (refused.value.code, "taken" in refused.value.hint) == ("gateway_closed", True)
    await gateway.close(0)
    assert await opening.endpoint() == gateway.endpoint
    await opening.close(0)
