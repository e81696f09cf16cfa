"""The small internet, from the side of the test: wired to the machine, filled with names, and questioned."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.egress.namespaces import run_ip
from tests.egress.world import WIRE
from tests.egress.zones import Zone

UPLINK = "uplink0"
# Addresses that look public: that is decided by number. None of them is ever left to a real network.
HOST4, HOST6 = "45.90.28.2", "2a0b:4340:1::2"
GATEWAY4, GATEWAY6 = "45.90.28.1", "2a0b:4340:1::1"
NAME_SERVER = "45.90.29.53"
OTHER_NAME_SERVER = "45.90.30.53"


@dataclass(frozen=True, slots=True)
class Notes:
    questions: list[tuple[str, str, str]]
    connections: list[tuple[str, int]]
    packets: list[tuple[str, str, int]]

    @property
    def names(self) -> set[str]:
        return {name.lower() for name, _, _ in self.questions}


@dataclass(slots=True)
class Internet:
    process: subprocess.Popen[str]
    authority: Path  # certificate of the one that signed all of its servers'
    zone: Zone = field(default_factory=dict)

    def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the world has ended"
        return json.loads(line)["answer"]

    def publish(self, zone: Zone) -> None:
        """Adds to what the name server knows."""
        self.zone |= zone
        self.ask(do="zone", zone=self.zone)

    def put(self, path: str, content: bytes, kind: str) -> None:
        """A page of all of its web servers."""
        self.ask(do="file", path=path, type=kind, content=base64.b64encode(content).decode())

    def clear(self) -> None:
        self.settle()
        self.ask(do="clear")

    def settle(self) -> None:
        """Returns when all that the machine sent before is noted: a wire keeps the order."""
        marker = secrets.token_hex(8)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(marker.encode(), (NAME_SERVER, 9))
        self.ask(do="await", marker=marker)

    def notes(self) -> Notes:
        self.settle()
        answer = self.ask(do="notes")
        return Notes(*([tuple(item) for item in answer[key]] for key in ("questions", "connections", "packets")))

    def speak(self) -> None:
        self.ask(do="speak")


@contextlib.contextmanager
def small_internet() -> Iterator[Internet]:
    """For the machine in whose network namespace the caller is: its default route leads there."""
    with tempfile.TemporaryDirectory(prefix="k8e-world-") as folder:
        authority, certificate = _make_certificates(Path(folder))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.egress.world"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            _wire(pid)
            internet = Internet(process, authority)
            internet.ask(do="open", certificate=str(certificate))
            yield internet
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                _close(stream)


def _close(stream: IO[str] | None) -> None:
    with contextlib.suppress(OSError):
        if stream is not None:
            stream.close()


def _wire(world: int) -> None:
    run_ip("link", "add", UPLINK, "type", "veth", "peer", "name", WIRE, "netns", str(world))
    for address, device, inside in (
        (f"{HOST4}/24", UPLINK, None), (f"{HOST6}/64", UPLINK, None),
        (f"{GATEWAY4}/24", WIRE, world), (f"{GATEWAY6}/64", WIRE, world),
    ):  # fmt: skip
        run_ip("addr", "add", address, "dev", device, *(["nodad"] if ":" in address else []), inside=inside)
    run_ip("link", "set", UPLINK, "up")
    for device in (WIRE, "lo"):
        run_ip("link", "set", device, "up", inside=world)
    run_ip("route", "add", "default", "via", GATEWAY4)
    run_ip("-6", "route", "add", "default", "via", GATEWAY6)
    # The world has every address there is.
    run_ip("route", "add", "local", "default", "dev", "lo", "table", "main", inside=world)
    run_ip("-6", "route", "add", "local", "default", "dev", "lo", "table", "main", inside=world)


def _make_certificates(folder: Path) -> tuple[Path, Path]:
    now = datetime.datetime.now(datetime.UTC)

    def build(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = build("small internet", "small internet", root_key)
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    names = [x509.DNSName(name) for name in ("allowed.com", "*.allowed.com", "*.corp.com", "wild.com", "*.wild.com")]
    leaf = build("server", "small internet", key).add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    authority, certificate = folder / "authority.pem", folder / "server.pem"
    authority.write_bytes(root.sign(root_key, hashes.SHA256()).public_bytes(pem))
    certificate.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + leaf.sign(root_key, hashes.SHA256()).public_bytes(pem)
    )
    return authority, certificate
