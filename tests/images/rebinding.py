"""A machine of its own (`unshare -n -m python -m tests.images.rebinding FOLDER`), on which names change their minds:
each leads to a registry on a public address when it is first asked for, and to this machine or its metadata from then
on, where a server with the same certificate waits.

Prints what came of it, as JSON: for each case the outcome, who was visited, and how often the name was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from k8e.engine import EngineError
from k8e.engine.local.images.manifest import Descriptor, digest_of
from k8e.engine.local.images.registry import Registry, make_context
from k8e.engine.reference import parse_reference
from tests.egress.internet import _make_certificates
from tests.egress.namespaces import run_ip
from tests.egress.zones import NameService, Zone

GOOD, METADATA, LOOPBACK = "45.90.31.1", "169.254.169.254", "127.0.0.1"
PROXY = (LOOPBACK, 3128)
BLOB = b'{"a": "blob"}'
MANIFEST = b'{"schemaVersion": 2}'
BLOB_DESCRIPTOR = Descriptor(media_type="", digest=digest_of(BLOB), size=len(BLOB))
visits: list[tuple[str, str, str]] = []  # address, host, path


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host = self.headers["Host"]
        visits.append((self.connection.getsockname()[0], host, self.path))
        if host == "redirecting.corp.com":
            self._send(307, b"", Location=f"https://blobs.corp.com{self.path}")
        elif host == "guarded.corp.com" and "Authorization" not in self.headers:
            self._send(401, b"", WWW_Authenticate='Bearer realm="https://tokens.corp.com/token",service="s"')
        elif host == "tokens.corp.com":
            self._send(200, b'{"token": "t"}')
        else:
            self._send(200, BLOB if "/blobs/" in self.path else MANIFEST)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        """And hangs up: the next question is another connection."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def serve(address: str, certificate: Path) -> None:
    server = http.server.ThreadingHTTPServer((address, 443), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def answer_names(names: NameService) -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((LOOPBACK, 53))

    def answer() -> None:
        while True:
            data, peer = listener.recvfrom(4096)
            listener.sendto(names.reply(data, "udp"), peer)

    threading.Thread(target=answer, daemon=True).start()


def turning(*addresses: str) -> dict[str, Any]:
    return {"turns": [[address] for address in addresses], "ttl": 0}


async def pull(registry: str, pem: str) -> list[str]:
    """A manifest and a blob, each over a connection of its own; how it went."""
    told = []
    async with Registry(parse_reference(f"{registry}/x"), None, make_context(pem), pause=0.001) as open_registry:
        for ask in (
            lambda: open_registry.manifest("latest"),
            lambda: open_registry.small_blob(BLOB_DESCRIPTOR),
        ):
            try:
                await ask()
                told.append("ok")
            except EngineError as error:
                told.append(error.reason)
    return told


def tunnel() -> None:
    """A proxy that knows names which this machine does not: all of them are the registry's."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve_one(client: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += client.recv(4096)
        visits.append(("proxy", request.split()[1].decode(), request.split()[0].decode()))
        target = socket.create_connection((GOOD, 443))
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        threading.Thread(target=copy, args=(target, client), daemon=True).start()
        copy(client, target)

    def listen() -> None:
        with socket.create_server(PROXY) as listener:
            while True:
                threading.Thread(target=serve_one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()


def furnish(folder: Path) -> None:
    os.environ.update(dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), ""))
    run_ip("link", "set", "lo", "up")
    for address in (GOOD, METADATA):
        run_ip("addr", "add", f"{address}/32", "dev", "lo")
    (folder / "resolv.conf").write_text(f"nameserver {LOOPBACK}\n")
    subprocess.run(["mount", "--bind", folder / "resolv.conf", "/etc/resolv.conf"], check=True)


async def main() -> None:
    folder = Path(sys.argv[1])
    furnish(folder)
    authority, certificate = _make_certificates(folder)
    for address in (GOOD, METADATA, LOOPBACK):
        serve(address, certificate)
    names = NameService()
    answer_names(names)
    tunnel()
    told = {}
    for case, registry, zone in CASES:
        visits.clear()
        names.questions.clear()
        names.publish(zone)
        os.environ["https_proxy"] = "http://{}:{}".format(*PROXY) if case == "proxy" else ""
        outcome = await pull(registry, authority.read_text())
        asked = sum(kind == "A" for _, kind, _ in names.questions)
        told[case] = {"outcome": outcome, "visits": sorted({address for address, _, _ in visits}), "asked": asked}
    sys.stdout.write(json.dumps(told))


STEADY = {"A": [GOOD]}
CASES: list[tuple[str, str, Zone]] = [
    ("steady", "steady.corp.com", {"steady.corp.com": STEADY}),
    ("metadata", "registry.corp.com", {"registry.corp.com": turning(GOOD, METADATA)}),
    ("loopback", "registry.corp.com", {"registry.corp.com": turning(GOOD, LOOPBACK)}),
    ("both", "registry.corp.com", {"registry.corp.com": {"A": [GOOD, METADATA]}}),
    (
        "redirect",
        "redirecting.corp.com",
        {"redirecting.corp.com": STEADY, "blobs.corp.com": turning(GOOD, METADATA)},
    ),
    ("proxy", "far-away.corp.com", {}),
    ("token", "guarded.corp.com", {"guarded.corp.com": STEADY, "tokens.corp.com": turning(GOOD, LOOPBACK)}),
]

if __name__ == "__main__":
    asyncio.run(main())
