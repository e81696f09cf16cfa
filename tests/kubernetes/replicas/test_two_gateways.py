"""Two gateways of one cluster, as a person runs them: each serves every session, and one of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.engine.images import AGENT, TOOLS
from tests.kubernetes.engine.rig import Site

K8E = Path(sys.executable).with_name("k8e")


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


class Gateway:
    def __init__(self, site: Site, folder: Path, *, mcp: bool = False) -> None:
        """`mcp`: it serves MCP over HTTP, too."""
        folder.mkdir()
        self.folder = folder
        self.port, self.peers, self.mcp = find_port(), find_port(), find_port() if mcp else 0
        values = {
            "namespace": site.kubectl.namespace,
            "kubeconfig": str(site.kubeconfig),
            "image": TOOLS,
            "agent_image": AGENT,
            "egress": "open",
            "native": "native",
            "pull_policy": "Never",
            "key_secret": f"{site.kubectl.namespace}/k8e-gateway",
            "peers": f"127.0.0.1:{self.peers}",
            "storage_class": site.options.storage_class,
            **({"mcp_peers": f"127.0.0.1:{find_port()}"} if mcp else {}),
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        listen = f'[gateway]\nlisten = "127.0.0.1:{self.port}"'
        if mcp:
            listen += f'\nmcp = "127.0.0.1:{self.mcp}"'
        config = folder / "k8e.toml"
        config.write_text("\n".join(["[kubernetes]", *lines, "requests = 0.1", listen, "[pool]\nenabled = false"]))
        config.chmod(0o600)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "K8E_STATE_DIR": str(folder / "s"),
            "K8E_RUN_DIR": str(folder / "r"),
            "K8E_CONFIG": str(config),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.folder / "r/k8e.sock").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([K8E, "server", "--engine", "kubernetes"], env=self.env, stderr=log)

    def wait_until_open(self) -> None:
        """It accepts connections from its first moment on, whether or not there is a leader."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < deadline, self.read_log()
            time.sleep(0.05)

    def read_log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def leads(self) -> bool:
        return (self.folder / "r/k8e.sock").exists()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def call(self, *words: str, key: str = "", seconds: float = 120) -> subprocess.CompletedProcess[bytes]:
        """With a key: through this gateway's port; without: at its socket."""
        env = {
            **self.env,
            **({"K8E_SANDBOX_ENDPOINT": f"127.0.0.1:{self.port}", "K8E_SANDBOX_APIKEY": key} if key else {}),
        }
        return subprocess.run([K8E, *words], env=env, capture_output=True, timeout=seconds)

    def ask(self, *words: str, key: str = "") -> Any:
        done = self.call(*words, key=key)
        assert done.returncode == 0, (done, self.read_log()[-3000:])
        return json.loads(done.stdout)


def wait_for_leader(*gateways: Gateway) -> tuple[Gateway, Gateway]:
    """The leader and the other one."""
    deadline = time.monotonic() + 60
    while True:
        leaders = [each for each in gateways if each.leads]
        if leaders:
            (leader,) = leaders
            return leader, next(each for each in gateways if each is not leader)
        assert time.monotonic() < deadline, [each.read_log() for each in gateways]
        time.sleep(0.05)


@pytest.fixture
def gateways(site: Site, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    pair = (Gateway(site, tmp_path / "a"), Gateway(site, tmp_path / "b"))
    try:
        for each in pair:
            each.start()
        for each in pair:
            each.wait_until_open()
        yield wait_for_leader(*pair)
    finally:
        for each in pair:
            each.stop()


def test_killing_the_leader_loses_no_session_and_no_background_command(
    site: Site, gateways: tuple[Gateway, Gateway]
) -> None:
    leader, other = gateways
    key = leader.ask("sandbox-apikey", "create", "ci", "--tenant", "ci")["key"]
    session = other.ask("sandbox", "create", "--runtime", "native", key=key)["session_id"]
    run = ("sandbox", "run", "--session-id", session)
    assert leader.ask(*run, "echo kept > note; echo done", key=key)["stdout"] == "done\n"
    assert other.ask(*run, "cat note", key=key)["stdout"] == "kept\n"
    code = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i; sleep 1; done; echo end"
    background = other.ask(*run, "--background", code, key=key)["run_id"]
    shown = site.kubectl("get", "sandboxrecords")
    assert (session in shown, "active" in shown) == (True, True)

    # Mid-stream: a client at each port has a command under way.
    streams = [
        subprocess.Popen(
            [K8E, *run, "--raw", "echo begun; sleep 100"],
            env={**each.env, "K8E_SANDBOX_ENDPOINT": f"127.0.0.1:{each.port}", "K8E_SANDBOX_APIKEY": key},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for each in gateways
    ]
    for stream in streams:
        assert stream.stdout is not None
        assert stream.stdout.readline() == b"begun\n"
    leader.kill()
    for stream in streams:
        _, errors = stream.communicate(timeout=60)
        assert stream.returncode not in (0, None), errors

    # The next call, at once.
    done = other.ask(*run, "cat note; pgrep -f 'sleep 100' || echo alone", key=key)
    assert done["stdout"] == "kept\nalone\n"
    assert other.leads
    deadline = time.monotonic() + 60
    while (poll := other.ask("sandbox", "poll", background, key=key))["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (poll["exit_code"], poll["stdout"].split()) == (0, [*map(str, range(1, 13)), "end"])

    # The killed one comes back, as the other one, and serves all the same.
    leader.start()
    leader.wait_until_open()
    assert leader.ask(*run, "cat note", key=key)["stdout"] == "kept\n"
    assert not leader.leads
    leader.ask("sandbox", "destroy", session, key=key)
    other.ask("sandbox-apikey", "delete", "ci")
    refused = leader.call("sandbox", "sessions", key=key)
    assert (refused.returncode != 0, b"key_re" in refused.stderr + refused.stdout) == (True, True), refused
    assert site.kubectl("get", "pods", "--output=name") == ""


def test_a_leader_that_is_stopped_hands_over_at_once(gateways: tuple[Gateway, Gateway]) -> None:
    leader, other = gateways
    key = leader.ask("sandbox-apikey", "create", "ci2", "--tenant", "ci2")["key"]
    session = other.ask("sandbox", "create", "--runtime", "native", key=key)["session_id"]
    failures: list[bytes] = []
    ended = threading.Event()

    def keep_calling() -> None:
        while not ended.is_set():
            done = other.call("sandbox", "run", "--session-id", session, "true", key=key)
            if done.returncode != 0:
                failures.append(done.stderr + done.stdout)

    caller = threading.Thread(target=keep_calling)
    caller.start()
    leader.stop()
    wait_for_leader(other, leader)
    ended.set()
    caller.join()
    assert len(failures) <= 1, failures  # the call that was under way
    other.ask("sandbox", "destroy", session, key=key)
    with contextlib.suppress(OSError):
        assert "lease_lost" not in other.read_log()
