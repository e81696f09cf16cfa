"""`k8e server --engine kubernetes` as a person runs it: the same commands as on one machine, with a daemon that is
killed in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.engine.images import AGENT, TOOLS
from tests.kubernetes.engine.rig import Site

K8E = Path(sys.executable).with_name("k8e")


class Home:
    """A daemon with directories of its own."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        config = folder / "k8e.toml"
        config.write_text(settings)
        config.chmod(0o600)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "K8E_STATE_DIR": str(folder / "s"),
            "K8E_RUN_DIR": str(folder / "r"),
            "K8E_CONFIG": str(config),
        }

    @contextlib.contextmanager
    def serve(self) -> Iterator[subprocess.Popen[bytes]]:
        (self.folder / "r/k8e.sock").unlink(missing_ok=True)  # of one that was killed
        log = (self.folder / "log").open("ab")
        with log, subprocess.Popen([K8E, "server", "--engine", "kubernetes"], env=self.env, stderr=log) as daemon:
            try:
                self._wait(daemon)
                yield daemon
            finally:
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(60)

    def _wait(self, daemon: subprocess.Popen[bytes]) -> None:
        """Without a client: where there is no socket, root's would start a daemon of its own."""
        deadline = time.monotonic() + 60
        while not (self.folder / "r/k8e.sock").exists():
            assert daemon.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def call(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([K8E, *words], env=self.env, capture_output=True, timeout=120)

    def ask(self, *words: str) -> dict[str, Any]:
        done = self.call(*words)
        assert done.returncode == 0, (done, (self.folder / "log").read_text()[-2000:])
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def refuse(self, *words: str) -> dict[str, Any]:
        done = self.call(*words)
        assert done.returncode != 0, done
        answer: dict[str, Any] = json.loads(done.stderr or done.stdout)
        return answer


def describe(site: Site, **more: str) -> str:
    values = {
        "namespace": site.kubectl.namespace,
        "kubeconfig": str(site.kubeconfig),
        "image": TOOLS,
        "agent_image": AGENT,
        "egress": "open",
        "native": "native",
        "pull_policy": "Never",
        **more,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value]
    return "\n".join(["[kubernetes]", *lines, "requests = 0.1", '[gateway]\nlisten = ""', "[pool]\nenabled = false"])


@pytest.fixture
def home(site: Site, tmp_path: Path) -> Home:
    return Home(tmp_path, describe(site))


def test_a_session_lives_through_a_killed_daemon(home: Home, site: Site) -> None:
    with home.serve() as daemon:
        sessions = {runtime: home.ask("sandbox", "create", "--runtime", runtime) for runtime in ("native", "gvisor")}
        for runtime, session in sessions.items():
            identity = str(session["session_id"])
            code = f"import os; open('note', 'w').write('{runtime}'); print(6 * 7, os.uname().release)"
            done = home.ask("sandbox", "run", "--session-id", identity, "--lang", "python", code)
            assert (done["exit_code"], done["stdout"].split()[0]) == (0, "42")
            assert ("gvisor" in done["stdout"]) == (runtime == "gvisor")
        daemon.kill()
    with home.serve():
        for runtime, session in sessions.items():
            identity = str(session["session_id"])
            done = home.ask("sandbox", "run", "--session-id", identity, "--lang", "bash", "cat note")
            assert done["stdout"] == runtime
            home.ask("sandbox", "destroy", identity)
        assert site.kubectl("get", "pods", "--output=name") == ""


def test_what_cannot_be_had_is_refused_with_the_reason(home: Home) -> None:
    with home.serve():
        for words, expected in (
            (("sandbox", "create", "--allowed-hosts", "example.com"), "list of hosts"),
            (("sandbox", "create", "--runtime", "kata"), "RuntimeClass kata"),
            (("image", "pull", "alpine"), "pull images by themselves"),
        ):
            body = home.refuse(*words)
            assert expected in body["detail"]
            assert body["hint"]


def test_a_state_directory_is_one_engines(home: Home) -> None:
    with home.serve():
        pass
    body = home.refuse("server")
    assert (body["code"], "are on Kubernetes" in body["error"]) == ("engine_unusable", True)
    assert "are on Kubernetes" in home.refuse("sandbox", "sessions")["error"]
    (home.folder / "s/kubernetes/gateway.pem").unlink()
    body = home.refuse("server", "--engine", "kubernetes")
    assert (body["code"], "are on this machine" in body["error"]) == ("engine_unusable", True)


@pytest.mark.parametrize("key", ["image", "agent_image", "egress"])
def test_without_its_settings_it_does_not_start(site: Site, tmp_path: Path, key: str) -> None:
    home = Home(tmp_path, describe(site, **{key: ""}))
    body = home.refuse("server", "--engine", "kubernetes")
    assert (body["code"], f"[kubernetes] {key}" in body["error"]) == ("engine_unusable", True)
