"""Both SDKs with an API key, a profile, a gateway that is not the right one, and none at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sandbox_client
from sandbox_client import SandboxClient
from tests.cli.machine import Machine

FOLDER = Path(__file__).resolve().parent.parent.parent / "sdk" / "typescript"


@pytest.fixture(scope="module")
def endpoint(machine: Machine) -> str:
    from sandbox_client._login import login_local

    return login_local(str(machine.folder / "r" / "k8e.sock")).endpoint


@pytest.fixture
def key(machine: Machine) -> Iterator[str]:
    made = machine.k8e("sandbox-apikey", "create", "sdk").json
    yield made["key"]
    machine.k8e("sandbox-apikey", "delete", "sdk")


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on another machine: nothing of the daemon is there."""
    monkeypatch.setenv("K8E_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("K8E_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.usefixtures("far_away")
def test_a_key_opens_its_gateway_and_is_worth_nothing_once_it_is_revoked(
    machine: Machine, endpoint: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SandboxClient(endpoint, api_key=key) as client:
        assert client.status().name == "sdk"
        assert client.run("echo hi").stdout == "hi\n"
        machine.k8e("sandbox-apikey", "delete", "sdk")
        with pytest.raises(sandbox_client.Unauthenticated) as caught:
            client.status()
        assert caught.value.code == "key_revoked"
        client._session = ""
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", endpoint)
    monkeypatch.setenv("K8E_SANDBOX_APIKEY", key)
    with SandboxClient() as again, pytest.raises(sandbox_client.Unauthenticated):
        again.status()


@pytest.mark.usefixtures("far_away")
def test_a_profile_that_the_command_line_made_is_used(
    machine: Machine, endpoint: str, key: str, tmp_path: Path
) -> None:
    env = {"HOME": str(tmp_path), "K8E_RUN_DIR": str(tmp_path / "run"), "K8E_SANDBOX_APIKEY": key}
    done = machine.k8e("connect", endpoint, "--name", "far", env=env)
    assert done.code == 0, done
    with SandboxClient(profile="far") as client:
        assert client.status().name == "sdk"
    with (
        SandboxClient(profile="near") as client,
        pytest.raises(sandbox_client.InvalidArgument, match=r"profiles\.yaml"),
    ):
        client.status()


@pytest.mark.usefixtures("far_away")
def test_who_brings_nothing_is_told_what_is_missing(
    machine: Machine, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(machine.folder / "s" / "identity" / "ca.crt"))
    with SandboxClient(endpoint) as client, pytest.raises(sandbox_client.Unauthenticated) as caught:
        client.status()
    assert caught.value.code == "not_logged_in"
    assert caught.value.hint


@contextlib.contextmanager
def impostor(folder: Path) -> Iterator[tuple[str, list[bytes]]]:
    """A TLS server with a certificate of its own, and everything that anybody told it."""
    from k8e.identity.authority import Authority

    issued = Authority.open(folder / "impostor", 1_700_000_000).issue_server(["localhost", "127.0.0.1"], 4_000_000_000)
    (folder / "pair.pem").write_bytes(issued.key + issued.chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pair.pem")
    context.set_alpn_protocols(["h2"])
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with (
                    connection,
                    contextlib.suppress(OSError),
                    context.wrap_socket(connection, server_side=True) as secure,
                ):
                    while data := secure.recv(4096):
                        heard.append(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.usefixtures("far_away")
def test_a_gateway_that_is_not_the_keys_own_hears_nothing(key: str, tmp_path: Path) -> None:
    with impostor(tmp_path) as (address, heard):
        with SandboxClient(address, api_key=key) as client, pytest.raises(sandbox_client.ServerNotTrusted):
            client.run("echo secret")
        assert heard == []


@pytest.mark.usefixtures("far_away")
def test_where_nothing_answers_it_is_said(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with SandboxClient(address, api_key=key) as client, pytest.raises(sandbox_client.Unavailable) as caught:
        client.status()
    assert caught.value.code == "unreachable"


@pytest.mark.parametrize("text", ["", "k8e_", "k8e_AAAA", "nothing", "k8e_" + "A" * 102, "k8e_é"])
def test_what_is_no_key_is_said_before_anything_is_asked(text: str) -> None:
    from sandbox_client._login import ApiKey

    with pytest.raises(sandbox_client.InvalidArgument, match="whole key"):
        ApiKey.parse(text)


@pytest.mark.parametrize("text", ["a b", "http://x", "x:99999999", "user@x:1", "[::1", "x/y"])
def test_what_is_no_endpoint_is_said(text: str) -> None:
    with SandboxClient(text) as client, pytest.raises(sandbox_client.InvalidArgument) as caught:
        client.status()
    assert caught.value.field == "endpoint"


PROGRAM = """
import { SandboxClient } from "k8e-sandbox-client";
const client = new SandboxClient({ endpoint: process.argv[1], apiKey: process.argv[2] });
try {
  console.log((await client.run("echo hi")).stdout.trim(), (await client.status()).name);
} catch (error) {
  console.log(error.name, error.code);
} finally {
  await client.close();
}
"""


def run_node(tmp_path: Path, *words: str) -> str:
    (tmp_path / "node_modules").mkdir(exist_ok=True)
    link = tmp_path / "node_modules" / "k8e-sandbox-client"
    if not link.is_symlink():
        link.symlink_to(FOLDER)
    command: Any = ["node", "--input-type=module", "-e", PROGRAM, *words]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
@pytest.mark.usefixtures("far_away", "built")
def test_the_typescript_client_with_a_key_and_with_an_impostor(endpoint: str, key: str, tmp_path: Path) -> None:
    assert run_node(tmp_path, endpoint, key) == "hi sdk"
    assert run_node(tmp_path, endpoint, key[:-1]) == "InvalidArgument bad_apikey"
    with impostor(tmp_path) as (address, heard):
        assert run_node(tmp_path, address, key) == "ServerNotTrusted wrong_gateway"
        assert heard == []
