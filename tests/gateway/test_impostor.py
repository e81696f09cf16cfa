"""A server that is not the gateway hears nothing but a handshake."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.identity.api_key import ApiKey
from k8e.identity.authority import Authority
from tests.cli.machine import Done, Machine


class Impostor:
    """A TLS server that lets every client in and records all bytes, on the wire and after decryption."""

    def __init__(self, chain: Path, *, plain: bool = False) -> None:
        self.wire = b""
        self.told = b""
        self._plain = plain
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(chain)
        self._context.set_alpn_protocols(["h2"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.visits = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.visits += 1
            with connection:
                connection.settimeout(2)
                with contextlib.suppress(OSError):
                    self._listen(connection)

    def _listen(self, connection: socket.socket) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = self._context.wrap_bio(incoming, outgoing, server_side=True)
        shaken = False
        while content := connection.recv(65_536):
            self.wire += content
            if self._plain:
                continue
            incoming.write(content)
            try:
                if not shaken:
                    session.do_handshake()
                    shaken = True
                self.told += session.read(65_536)
            except ssl.SSLWantReadError:
                pass
            connection.sendall(outgoing.read())

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextlib.contextmanager
def pretend(folder: Path, key: bytes, chain: bytes, *, plain: bool = False) -> Iterator[Impostor]:
    path = folder / "impostor.pem"
    path.write_bytes(key + chain)
    impostor = Impostor(path, plain=plain)
    try:
        yield impostor
    finally:
        impostor.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Authority:
    """The one that the key is for."""
    return Authority.open(tmp_path / "gateway", time.time())


@pytest.fixture
def key(gateway: Authority) -> ApiKey:
    return ApiKey.generate(gateway.fingerprint)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "home").mkdir()
    return Machine(tmp_path, tmp_path / "home")


def knock(machine: Machine, impostor: Impostor, key: ApiKey, how: str) -> Done:
    if how == "connect":
        return machine.k8e("connect", impostor.endpoint, stdin=key.text.encode())
    return machine.run(
        "cat /etc/secret", env={"K8E_SANDBOX_ENDPOINT": impostor.endpoint, "K8E_SANDBOX_APIKEY": key.text}
    )


def assert_nothing_was_told(impostor: Impostor, key: ApiKey) -> None:
    assert impostor.visits >= 1
    assert impostor.told == b""
    for secret in (key.secret, key.secret.hex().encode(), key.text.encode(), b"cat /etc/secret", b"k8e_"):
        assert secret not in impostor.wire


@pytest.mark.parametrize("how", ["connect", "run"])
def test_another_ca_is_refused(tmp_path: Path, machine: Machine, key: ApiKey, how: str) -> None:
    other = Authority.open(tmp_path / "other", time.time()).issue_server(["127.0.0.1"], time.time())
    with pretend(tmp_path, other.key, other.chain) as impostor:
        done = knock(machine, impostor, key, how)
    assert (done.code, done.json["code"]) == (1, "wrong_gateway")
    assert_nothing_was_told(impostor, key)


@pytest.mark.parametrize("how", ["connect", "run"])
def test_the_right_ca_behind_somebody_elses_certificate_is_refused(
    tmp_path: Path, machine: Machine, gateway: Authority, key: ApiKey, how: str
) -> None:
    """The CA's certificate is public: showing it proves nothing."""
    other = Authority.open(tmp_path / "other", time.time()).issue_server(["127.0.0.1"], time.time())
    leaf = other.chain.partition(b"-----END CERTIFICATE-----\n")[0] + b"-----END CERTIFICATE-----\n"
    with pretend(tmp_path, other.key, leaf + gateway.certificate) as impostor:
        done = knock(machine, impostor, key, how)
    assert (done.code, done.json["code"]) == (2, "unreachable")
    assert_nothing_was_told(impostor, key)


def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, machine: Machine, gateway: Authority, key: ApiKey
) -> None:
    elsewhere = gateway.issue_server(["elsewhere.example"], time.time())
    with pretend(tmp_path, elsewhere.key, elsewhere.chain) as impostor:
        done = knock(machine, impostor, key, "run")
    assert (done.code, done.json["code"]) == (2, "unreachable")
    assert_nothing_was_told(impostor, key)


def test_a_server_without_tls_hears_a_greeting_and_no_more(
    tmp_path: Path, machine: Machine, gateway: Authority, key: ApiKey
) -> None:
    plain = gateway.issue_server(["127.0.0.1"], time.time())
    with pretend(tmp_path, plain.key, plain.chain, plain=True) as impostor:
        done = knock(machine, impostor, key, "connect")
    assert (done.code, done.json["code"]) == (2, "unreachable")
    assert_nothing_was_told(impostor, key)


def test_a_gateway_that_is_not_there_is_said_to_be_so(machine: Machine, key: ApiKey) -> None:
    for environment in ({}, {"K8E_SANDBOX_APIKEY": key.text}):
        done = machine.run("true", env={"K8E_SANDBOX_ENDPOINT": "127.0.0.1:1", **environment})
        assert (done.code, done.json["code"]) == (2, "unreachable")
