"""The sandbox gateway of a server: the daemon with the Kubernetes engine, on this cluster, under the same supervisor.
Each server has one. The one that holds the Lease leads and has the sessions, whose records are objects of the cluster;
the others pass connections on to it, and one of them takes its place when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from k8e.cluster.api import becomes_true
from k8e.cluster.errors import StartFailed
from k8e.cluster.member.addons.agent_sandbox import SERVED
from k8e.cluster.member.control_plane import ControlPlane
from k8e.cluster.member.gateways import peers
from k8e.cluster.member.gateways.objects import KEY_SECRET, RECORDS, USER
from k8e.cluster.member.gateways.settings import merge_settings, read_settings, write_toml
from k8e.cluster.member.images import NodeImages
from k8e.cluster.member.layout import SANDBOXES, Layout
from k8e.cluster.member.node import accepts
from k8e.cluster.supervisor import Program, Supervisor
from k8e.cluster.trust.authority import Leaf
from k8e.cluster.trust.leaves import describe_kubeconfig, name_file, write_file

PORT: Final = 50051
PROGRAM: Final = "gateway"
_SETTINGS: Final = Path("/etc/k8e/k8e.toml")

log = logging.getLogger("k8e.cluster")


class Gateway:
    def __init__(
        self, layout: Layout, control_plane: ControlPlane, images: NodeImages, address: str, program: Sequence[str]
    ) -> None:
        self._layout = layout
        self._images = images
        self._api = control_plane.api
        self._address = address
        self._program = program
        self._names = {control_plane.node, address}
        self.certificate = control_plane.leaves.write("gateway/client", control_plane.authorities["client"], Leaf(USER))
        kubeconfig = describe_kubeconfig(
            control_plane.url, control_plane.authorities["server"].certificate, name_file(self.certificate)
        )
        self._kubeconfig = write_file(layout.tls / "gateway" / "kubeconfig", kubeconfig)
        self._settings = layout.server / "gateway.toml"

    async def program(self) -> Program:
        """When the cluster knows the kinds of the records and the claims: a gateway asks for both at its start."""
        for path in (RECORDS, SERVED):
            if not await becomes_true(self._api.is_served(path), 60.0):
                text, hint = f"the cluster does not serve {path}", "the logs of all components are in /var/lib/k8e/logs"
                raise StartFailed("cluster_not_set_up", text, hint=hint)
        self._names.update(await peers.find_names(self._api) or ())
        await asyncio.to_thread(self._write_settings)
        environment = {
            "K8E_STATE_DIR": str(self._layout.state),
            "K8E_RUN_DIR": str(self._layout.run),
            "K8E_CONFIG": str(self._settings),
        }
        argv = [*self._program, "server", "--engine", "kubernetes"]
        reads = (self._settings, self._kubeconfig)
        return Program(PROGRAM, argv, self._serves, 120.0, self._lives, reads=reads, environment=environment)

    async def keep_names(self, supervisor: Supervisor) -> None:
        """Starts the gateway again whenever there is a server that its certificate does not name: clients of that
        server would refuse it. Until it is cancelled."""
        while True:
            await asyncio.sleep(5.0)
            found = set(await peers.find_names(self._api) or ())
            if found <= self._names:
                continue
            log.info("the gateway is started again, for clients of %s", ", ".join(sorted(found - self._names)))
            self._names |= found
            await asyncio.to_thread(self._write_settings)
            if (pid := supervisor.pids.get(PROGRAM)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _write_settings(self) -> None:
        content = write_toml(merge_settings(read_settings(_SETTINGS), self._describe_settings()))
        write_file(self._settings, content.encode())

    def _describe_settings(self) -> dict[str, dict[str, Any]]:
        return {
            "kubernetes": {
                "namespace": SANDBOXES,
                "kubeconfig": str(self._kubeconfig),
                "image": self._images.sandbox,
                "agent_image": self._images.agent,
                "egress": "node",
                "native": "native",
                "pull_policy": "IfNotPresent",
                "key_secret": KEY_SECRET,
                "peers": f"{self._address}:{peers.PORT}",
            },
            "gateway": {"listen": f"0.0.0.0:{PORT}", "names": sorted(self._names)},
        }

    async def _serves(self) -> bool:
        """Whether clients of this server are answered: by the gateway that leads, which may be another one's."""
        if not await accepts("127.0.0.1", PORT) or not await self._lives():
            return False
        host, _, port = (await peers.find_leader(self._api)).rpartition(":")
        return bool(host) and await accepts(host, int(port))

    async def _lives(self) -> bool:
        """Asks at the unix socket, which is the leader's alone; any other passes connections on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                try:
                    reader, writer = await asyncio.open_unix_connection(str(self._layout.run / "k8e.sock"))
                except OSError:  # not there, or of a leader that was killed
                    return await accepts("127.0.0.1", PORT)
                with contextlib.suppress(OSError):
                    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    line = await reader.readline()
                    writer.close()
                    return b" 200 " in line
        return False


def refuse_sessions(layout: Layout) -> None:
    """Sessions of a daemon of this machine alone, whose records are in this file, would be lost."""
    if (layout.state / "k8e.db").exists():
        hint = "`k8e uninstall`, or move /var/lib/k8e away; or --disable-sandbox-matrix"
        raise StartFailed("machine_in_use", "this machine has sandboxes of its own daemon", hint=hint)
