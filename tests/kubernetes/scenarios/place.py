"""A machine whose daemon makes sandboxes on the cluster, and its users: through the gateway with a key, or at the
socket."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli.machine import K8E, Machine, make_folder
from tests.kubernetes.engine.images import AGENT, TOOLS
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.replicas.test_two_gateways import find_port
from tests.scenarios.user import User

RUNTIME = "gvisor"  # the strongest of the cluster, and so the usual one


@dataclass
class Place:
    machine: Machine
    endpoint: str
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        socket = self.machine.folder / "r/k8e.sock"
        socket.unlink(missing_ok=True)  # of one that was killed
        with (self.machine.folder / "log").open("ab") as log:
            words = [str(K8E), "server", "--engine", "kubernetes"]
            self.process = subprocess.Popen(words, env=self.machine.env, stderr=log, cwd=self.machine.folder)
        deadline = time.monotonic() + 60
        while not socket.exists():  # without a client: root's would start a daemon of its own
            assert self.process.poll() is None, self.read_log()
            assert time.monotonic() < deadline, self.read_log()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(90)
            self.process = None

    def read_log(self) -> str:
        return (self.machine.folder / "log").read_text()


@contextlib.contextmanager
def open_place(site: Site, host: str = "127.0.0.1") -> Iterator[Place]:
    with make_folder() as folder:
        options = site.options
        values = {
            "namespace": site.kubectl.namespace,
            "kubeconfig": str(site.kubeconfig),
            "image": TOOLS,
            "agent_image": AGENT,
            "egress": options.egress,
            "native": "native",
            "pull_policy": "Never",
            "storage_class": options.storage_class,
        }
        endpoint = f"{host}:{find_port()}"
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        sections = ["[kubernetes]", *lines, "requests = 0.02", "[pool]", "enabled = false"]
        (folder / "k8e.toml").write_text("\n".join([*sections, "[gateway]", f'listen = "{endpoint}"', ""]))
        (folder / "k8e.toml").chmod(0o600)
        place = Place(Machine(folder, folder), endpoint)
        place.start()
        try:
            yield place
        finally:
            if place.process is None:
                place.start()
            for session in place.machine.live_sessions():
                place.machine.k8e("sandbox", "destroy", session)
            place.end()


@dataclass
class ClusterUser(User):
    place: Place | None = None

    def kill_the_daemon(self) -> None:
        assert self.place is not None
        self.place.end(signal.SIGKILL)

    def bring_the_daemon_back(self) -> None:
        assert self.place is not None
        if self.place.process is None:
            self.place.start()

    def go_through_the_gateway(self, name: str) -> None:
        key = self.k8e("sandbox-apikey", "create", name, "--scope", "admin").json["key"]
        assert self.place is not None
        self.overrides |= {"K8E_SANDBOX_ENDPOINT": self.place.endpoint, "K8E_SANDBOX_APIKEY": key}


@contextlib.contextmanager
def in_environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_user(place: Place, home: Path) -> ClusterUser:
    return ClusterUser(place.machine.folder, home, runtime=RUNTIME, place=place)
