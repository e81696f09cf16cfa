"""A gateway of a test, as a process that can be killed and started again, with an API key for the SDK."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sandbox_client import AsyncSandboxClient
from tests.kubernetes.engine.images import AGENT, TOOLS
from tests.kubernetes.engine.rig import Site

K8E = Path(sys.executable).with_name("k8e")
LIMITS = '[limits]\nmemory = "256m"\ndisk = "64m"\n'


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


class Gateway:
    def __init__(self, site: Site, folder: Path, *, egress: str = "open", more: str, **options: Any) -> None:
        """`more`: further sections of the settings; `options`: of [kubernetes]."""
        folder.mkdir()
        self.folder = folder
        self.port = find_port()
        values = {
            "namespace": site.kubectl.namespace,
            "kubeconfig": str(site.kubeconfig),
            "image": TOOLS,
            "agent_image": AGENT,
            "egress": egress,
            "native": "native",
            "pull_policy": "Never",
            "requests": 0.02,
            **options,
        }
        lines = ["[kubernetes]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        lines += [f'[gateway]\nlisten = "127.0.0.1:{self.port}"', LIMITS, more]
        config = folder / "k8e.toml"
        config.write_text("\n".join(lines))
        config.chmod(0o600)
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "K8E_STATE_DIR": str(folder / "s"),
            "K8E_RUN_DIR": str(folder / "r"),
            "K8E_CONFIG": str(config),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._key = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Returns when it serves. It listens at its socket when it has recovered what an earlier one left."""
        (self.folder / "r/k8e.sock").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([K8E, "server", "--engine", "kubernetes"], env=self._env, stderr=log)
        deadline = time.monotonic() + 120
        while not (self.folder / "r/k8e.sock").exists() or not self._listens():
            assert self._process.poll() is None, self.log[-4000:]
            assert time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.05)
        self._key = self._key or self._make_key()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(100)

    def connect(self) -> AsyncSandboxClient:
        return AsyncSandboxClient(f"127.0.0.1:{self.port}", api_key=self._key)

    def _make_key(self) -> str:
        command = [str(K8E), "sandbox-apikey", "create", "load", "--tenant", "load"]
        done = subprocess.run(command, env=self._env, capture_output=True, timeout=60)
        assert done.returncode == 0, done
        return str(json.loads(done.stdout)["key"])

    def _listens(self) -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False
