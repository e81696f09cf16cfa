"""Questions to an API server: what is not there, or not yet, is no and never an error."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from k8e.cluster.api import Api
from k8e.cluster.secrets import Secrets
from k8e.cluster.trust.authority import Leaf

OBJECTS: dict[str, Any] = {
    "/none": {"kind": "Node"},
    "/null": {"status": None},
    "/nulls": {"status": {"conditions": None}},
    "/false": {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
    "/true": {"status": {"conditions": [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}]}},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in OBJECTS else 404)
        self.end_headers()
        self.wfile.write(json.dumps(OBJECTS.get(self.path)).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


@pytest.fixture
def server(secrets: Secrets) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(secrets.certificate))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(secrets.issue("server", Leaf("server", hosts=("127.0.0.1",))))
    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        found.socket = context.wrap_socket(found.socket, server_side=True)
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"https://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


async def test_an_object_has_a_condition_when_it_says_so(secrets: Secrets, server: str) -> None:
    api = Api(server, secrets.certificate, secrets.issue("client", Leaf("me")))
    found = {path: await api.has_condition(path, "Ready")() for path in (*OBJECTS, "/missing")}
    assert [path for path, answer in found.items() if answer] == ["/true"]
    assert await api.is_served("/none")()
    assert not await api.is_served("/missing")()


async def test_a_server_that_is_not_there_serves_nothing(secrets: Secrets) -> None:
    api = Api("https://127.0.0.1:1", secrets.certificate, secrets.issue("client", Leaf("me")))
    assert await api.get("/readyz") is None
    assert not await api.has_condition("/true", "Ready")()
