"""Debian's own registry on the loopback, and what tests put in front of it and into it."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.x509.oid import NameOID

from k8e.engine.local.system.tool import find_tool
from tests.images.builder import Built, digest_of

USER, PASSWORD = "alice", "secret"
HTPASSWD = f"{USER}:$2y$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n"
DEADLINE = 30.0


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Authority:
    """A certificate that signs itself, and its key."""

    folder: Path
    names: tuple[str, ...] = ("localhost",)
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in self.names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.cert_file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        self.key_file.write_bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    @property
    def cert_file(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key_file(self) -> Path:
        return self.folder / "key.pem"

    @property
    def pem(self) -> str:
        return self.cert_file.read_text()

    def sign_token(self, claims: dict[str, Any]) -> str:
        """A JWT as the registry takes them, with the certificate inside."""
        chain = base64.b64encode(self.certificate.public_bytes(serialization.Encoding.DER)).decode()
        head = {"typ": "JWT", "alg": "ES256", "x5c": [chain]}
        text = ".".join(_encode(json.dumps(part).encode()) for part in (head, claims))
        first, second = utils.decode_dss_signature(self.key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{_encode(first.to_bytes(32, 'big') + second.to_bytes(32, 'big'))}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class RealRegistry:
    host: str  # with its port
    origin: str
    authorization: str = ""
    context: ssl.SSLContext | None = None
    trusted: str = ""  # the certificate of who signed its own, PEM

    def push(self, repository: str, image: Built, tag: str = "latest") -> str:
        """The name under which it can be pulled."""
        for digest, blob in image.blobs.items():
            begun = self._call("POST", f"/v2/{repository}/blobs/uploads/")
            place = begun.headers["Location"]
            place += ("&" if "?" in place else "?") + urllib.parse.urlencode({"digest": digest})
            self._call("PUT", place, blob, "application/octet-stream")
        manifests = [blob for blob in image.blobs.values() if b'"schemaVersion"' in blob and b'"manifests"' not in blob]
        for blob in manifests:
            self._call("PUT", f"/v2/{repository}/manifests/{digest_of(blob)}", blob, json.loads(blob)["mediaType"])
        self._call("PUT", f"/v2/{repository}/manifests/{tag}", image.manifest, image.media_type)
        return f"{self.host}/{repository}:{tag}"

    def _call(self, method: str, place: str, body: bytes = b"", media_type: str = "") -> Any:
        url = urllib.parse.urljoin(self.origin, place)
        headers = {"Authorization": self.authorization} if self.authorization else {}
        if media_type:
            headers["Content-Type"] = media_type
        request = urllib.request.Request(url, data=body or None, method=method, headers=headers)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.context:
            handlers.append(urllib.request.HTTPSHandler(context=self.context))
        with urllib.request.build_opener(*handlers).open(request, timeout=DEADLINE) as response:
            return response


@contextlib.contextmanager
def run_registry(
    folder: Path, *, htpasswd: bool = False, tls: Authority | None = None, tokens: TokenService | None = None
) -> Iterator[RealRegistry]:
    program = find_tool("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    authorization = ""
    if htpasswd:
        (folder / "htpasswd").write_text(HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
        authorization = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    if tokens:
        settings["auth"] = {
            "token": {
                "realm": tokens.realm,
                "service": "test-registry",
                "issuer": "test-issuer",
                "rootcertbundle": str(tokens.authority.cert_file),
            }
        }
        authorization = f"Bearer {tokens.grant('*', ['pull', 'push'])}"
    if tls:
        settings["http"]["tls"] = {"certificate": str(tls.cert_file), "key": str(tls.key_file)}
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log, env={})
    try:
        _wait_for_port(port, process, folder / "log")
        context = ssl.create_default_context(cafile=str(tls.cert_file)) if tls else None
        name = f"localhost:{port}"
        origin = f"{'https' if tls else 'http'}://{name}"
        yield RealRegistry(name, origin, authorization, context, tls.pem if tls else "")
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(ConnectionError), contextlib.closing(socket.create_connection(("127.0.0.1", port))):
            return
        time.sleep(0.01)


@dataclass
class TokenService:
    """Gives tokens: for `public/` to every caller, for the rest to callers with the password or the identity token."""

    authority: Authority
    realm: str = ""
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, Authorization, parameters

    def grant(self, repository: str, actions: list[str]) -> str:
        now = int(time.time())
        # The registry compares names exactly; for pushing, all that tests push to are listed.
        names = ["public/demo", "private/demo"] if repository == "*" else [repository]
        access = [{"type": "repository", "name": name, "actions": actions} for name in names]
        claims = {"iss": "test-issuer", "aud": "test-registry", "sub": "", "jti": f"{now}", "access": access}
        return self.authority.sign_token({**claims, "iat": now, "nbf": now - 60, "exp": now + 600})

    def answer(self, method: str, authorization: str, values: dict[str, str]) -> tuple[int, bytes]:
        self.asked.append((method, authorization, values))
        repository = values.get("scope", "").split(":")[1]
        known = authorization == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        known |= values.get("refresh_token") == "identity"
        if not (known or repository.startswith("public/")):
            return 401, b"{}"
        key = "access_token" if method == "POST" else "token"
        return 200, json.dumps({key: self.grant(repository, ["pull"])}).encode()


Handle = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def serve_http(handle: Handle) -> Iterator[str]:
    """A server of our own on the loopback; its host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            handle(self)

        do_POST = do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def run_tokens(folder: Path) -> Iterator[TokenService]:
    folder.mkdir(parents=True, exist_ok=True)
    service = TokenService(Authority(folder))

    def handle(handler: http.server.BaseHTTPRequestHandler) -> None:
        text = handler.path.partition("?")[2]
        if handler.command == "POST":
            text = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
        status, body = service.answer(
            handler.command, handler.headers.get("Authorization", ""), dict(urllib.parse.parse_qsl(text))
        )
        reply(handler, status, body)

    with serve_http(handle) as host:
        service.realm = f"http://{host}/token"
        yield service


class Shears:
    """Stands before a registry and cuts answers about blobs short. Counts what passes of them."""

    def __init__(self, target: RealRegistry, cut_after: int, cuts: int) -> None:
        self._target = target
        self._cut_after = cut_after
        self.cuts = cuts
        self.passed = 0
        self.ranges: list[str] = []

    def __call__(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        kept = ("Authorization", "Accept", "Range")
        headers = {name: handler.headers[name] for name in kept if handler.headers[name]}
        request = urllib.request.Request(self._target.origin + handler.path, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=DEADLINE) as response:
                self._pass_on(handler, response)
        except urllib.error.HTTPError as error:
            reply(handler, error.code, error.read())

    def _pass_on(self, handler: http.server.BaseHTTPRequestHandler, response: Any) -> None:
        body = response.read()
        handler.send_response(response.status)
        for name in ("Content-Type", "Content-Range"):
            if response.headers[name]:
                handler.send_header(name, response.headers[name])
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if "/blobs/" not in handler.path or len(body) < 100_000:
            handler.wfile.write(body)
            return
        self.ranges.append(handler.headers["Range"] or "")
        if self.cuts:
            self.cuts -= 1
            body = body[: self._cut_after]
            handler.close_connection = True
        self.passed += len(body)
        handler.wfile.write(body)
        handler.wfile.flush()
