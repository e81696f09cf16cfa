"""The first process in the namespaces of a cluster: starts its programs, keeps them running, and ends with all of them.

    python -m k8e.cluster.boot FOLDER     started by k8e.cluster.cluster, through unshare(1)

It tells on stdout, in lines of JSON, how far it has got, and reads one line, the order, when the link is there. When
the reader goes before the cluster is ready, it ends: a start that was killed leaves no half of a cluster. When it ends,
for whatever reason, the kernel ends every process in its pid namespace, pods included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from k8e.cluster.addons import Addons
from k8e.cluster.build import Components
from k8e.cluster.cilium import Cilium, is_wanted
from k8e.cluster.control_plane import ADMINS, ControlPlane
from k8e.cluster.errors import ClusterError
from k8e.cluster.namespaces import enter_mounts, enter_network
from k8e.cluster.node import Node
from k8e.cluster.place import Addresses, Place
from k8e.cluster.secrets import Secrets
from k8e.cluster.supervisor import Supervisor
from k8e.cluster.trust.authority import Leaf


def tell(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def start(place: Place, addresses: Addresses, components: Components) -> Supervisor:
    """Starts everything; what does not depend on each other at the same time."""
    environment = {"PATH": f"{components.path}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(place.root)}
    supervisor = Supervisor(place.logs, environment)
    secrets = Secrets(place.secrets)
    secrets.write_kubeconfig(place.kubeconfig, addresses.api, Leaf("k8e:admin", (ADMINS,)))
    control_plane = ControlPlane(place, addresses, components, secrets)
    node = Node(place, addresses, components, secrets, control_plane.api)
    cilium = Cilium(place, addresses, components, secrets, control_plane.api) if is_wanted(components) else None
    addons = Addons(place, addresses, components, secrets, control_plane.api, environment)

    async def start_control_plane() -> None:
        for program in control_plane.programs():
            await supervisor.start(program)
            tell(step=f"{program.name} runs")

    async def start_containerd() -> None:
        await supervisor.start(node.containerd())
        await addons.import_pause()
        tell(step="containerd runs")

    async def start_node() -> None:
        for program in node.programs():
            await supervisor.start(program)
            tell(step=f"{program.name} runs")

    async def start_addons() -> None:
        await addons.apply(cilium.objects() if cilium is not None else ())
        await supervisor.start(addons.controller())
        tell(step="the agent-sandbox controller runs")
        await addons.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(start_containerd())
        group.create_task(start_control_plane())
    async with asyncio.TaskGroup() as group:
        group.create_task(start_node())
        group.create_task(start_addons())
    if cilium is not None:
        await supervisor.start(cilium.agent())
        tell(step="the agent of Cilium runs")
    return supervisor


def collect_orphans(supervisor: Supervisor) -> None:
    """Collects processes whose parent has ended: they are the first process's. The supervisor collects its own."""
    while True:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_pid not in supervisor.pids.values():
                os.waitpid(ended.si_pid, os.WNOHANG)
                continue
        return


async def run(place: Place, order: dict[str, Any]) -> None:
    addresses = Addresses.parse(order["network"])
    components = Components.parse(order["components"])
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    enter_network(addresses)
    supervisor = await start(place, addresses, components)
    loop.add_signal_handler(signal.SIGCHLD, collect_orphans, supervisor)
    tell(ready=True)
    await ended.wait()


def main() -> int:
    place = Place(Path(sys.argv[1]))
    tell(step="unshared")
    line = sys.stdin.readline()
    if not line:
        return 1
    order = json.loads(line)
    status = 0
    try:
        own = [place.root, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]]
        enter_mounts([*own, *map(Path, order["components"].values())])
        asyncio.run(run(place, order))
    except* ClusterError as errors:
        tell(error=errors.exceptions[0].body)  # type: ignore[union-attr]
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
