"""A large cluster: how long a claim takes and how much memory the gateway has, as nodes and sessions grow.

    python -m bench.fleet FOLDER [--nodes 1000] [--steps 0 1000 2500 5000] [--number 30] [--keep FILE]

On a cluster that `make cluster` has started. kwok plays the nodes and the kubelets of the sessions' pods; the API
server, the scheduler, the agent-sandbox controller and the gateway are real. A session's objects are a claim with the
labels of the gateway, its Sandbox and its pod, made by the controller: what the gateway watches. The sessions that are
measured run on the cluster's one real node. Not included: what core keeps of a session (docs/performance.md), and links
to agents, which played pods do not have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightkube.models.core_v1 import Toleration
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod

from bench.claims import POOL, Pools, create_by_sdk, take
from bench.samples import machine_facts, percentile
from k8e.cluster.build import build_tool, default_cache
from k8e.cluster.child import list_programs
from k8e.cluster.cluster import Cluster, find_cluster
from k8e.cluster.components import KWOK
from k8e.cluster.place import Place
from k8e.engine.kubernetes.agent_sandbox import (
    SandboxTemplate,
    build_pool,
    build_sandbox_claim,
)
from k8e.engine.kubernetes.api import Api
from k8e.engine.kubernetes.gateway_key import load_key
from k8e.engine.kubernetes.names import POOL as POOL_LABEL
from k8e.engine.kubernetes.names import gateway_label
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.images import agent_image, tools_image
from tests.kubernetes.kubectl import Kubectl
from tests.kubernetes.load.gateway import Gateway

FAKE = "kwok.x-k8s.io/node"
TOGETHER = 20  # requests under way
CLAIMS = "fleet"
IDLE = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Row:
    nodes: int
    sessions: int
    claim_p50: float  # the bare one, ms
    claim_p99: float
    session_p50: float  # a session with its first command, through the gateway, ms
    session_p99: float
    memory: float  # of the gateway, resident, MiB
    cpu: float  # of it while nothing is asked, percent of one core
    api_server: float  # its memory, MiB
    controller: float

    def __str__(self) -> str:
        return (
            f"| {self.nodes:,} | {self.sessions:,} | {self.claim_p50:.0f} ({self.claim_p99:.0f}) | "
            f"{self.session_p50:.0f} ({self.session_p99:.0f}) | {self.memory:.0f} | {self.cpu:.1f} | "
            f"{self.api_server:.0f} | {self.controller:.0f} |"
        )


HEAD = (
    "| nodes | sessions' objects | bare claim, ms | session + first command, ms | gateway, MiB | its CPU, idle, % | "
    "API server, MiB | agent-sandbox, MiB |\n|---|---|---|---|---|---|---|---|"
)


# What kwok plays -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def play_nodes(cluster: Cluster, number: int, folder: Path) -> Iterator[None]:
    """So many nodes, which take only pods that say they may run there."""
    program = build_tool(KWOK, default_cache(), lambda text: print(text, file=sys.stderr)) / "kwok"
    kubectl = Kubectl(cluster, "default")
    command = [str(program), f"--kubeconfig={cluster.place.kubeconfig}", "--manage-all-nodes=false"]
    command += [f"--manage-nodes-with-annotation-selector={FAKE}=fake", "--node-lease-duration-seconds=240"]
    with (folder / "kwok.log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            for first in range(0, number, 200):
                kubectl.apply(*(describe_node(each) for each in range(first, min(first + 200, number))))
            kubectl("wait", "--for=condition=Ready", "node", f"--selector={FAKE}=fake", "--timeout=120s")
            yield
        finally:
            kubectl("delete", "node", f"--selector={FAKE}=fake", "--wait=false")
            process.terminate()


def describe_node(number: int) -> dict[str, Any]:
    size = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"fleet-{number}", "labels": {FAKE: "fake"}, "annotations": {FAKE: "fake"}},
        "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": size, "capacity": size},
    }


class Sessions:
    """The objects of sessions of a gateway, whose pods are on nodes that kwok plays."""

    def __init__(self, api: Api, gateway: str) -> None:
        self._api = api
        self._gateway = gateway
        self._number = 0

    async def prepare(self, model: str) -> None:
        """A pool with no pods ready, of the same kind as this one but for the nodes."""
        template = await self._api.get(SandboxTemplate, model)
        assert template is not None
        assert template.metadata is not None
        assert template.spec is not None
        pod = template.spec.pod_template
        template.metadata = ObjectMeta(name=CLAIMS, labels=template.metadata.labels)
        pod.metadata.labels = {**(pod.metadata.labels or {}), POOL_LABEL: CLAIMS}
        pod.spec.nodeSelector = {FAKE: "fake"}
        pod.spec.tolerations = [Toleration(key=FAKE, operator="Exists")]
        await self._api.create(template)
        await self._api.create(build_pool(CLAIMS, self._gateway, 0))

    async def grow(self, number: int) -> None:
        """Until there are so many, and all their pods run."""
        slots = asyncio.Semaphore(TOGETHER)

        async def make(each: int) -> None:
            async with slots:
                await self._api.create(build_sandbox_claim(f"f{each}", CLAIMS, self._gateway, time.time() + 86_400))

        await asyncio.gather(*(make(each) for each in range(self._number, number)))
        self._number = number
        async with asyncio.timeout(1800):
            while (running := await self._count()) < number:
                print(f"fleet: {running} of {number} pods run", file=sys.stderr, flush=True)
                await asyncio.sleep(5.0)

    async def _count(self) -> int:
        pods, _ = await self._api.list(Pod, fields="status.phase=Running")
        return sum(1 for pod in pods if pod.spec is not None and (pod.spec.nodeName or "").startswith("fleet-"))


# What is measured ----------------------------------------------------------------------------------------------------


def read_memory(pid: int) -> float:
    """Resident, in MiB."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def read_cpu(pid: int) -> float:
    """Seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_idle(pid: int) -> float:
    begin, before = time.monotonic(), read_cpu(pid)
    await asyncio.sleep(IDLE)
    return 100 * (read_cpu(pid) - before) / (time.monotonic() - begin)


async def measure(arguments: argparse.Namespace, folder: Path) -> AsyncGenerator[Row]:
    cluster = find_cluster(Place(arguments.folder.resolve()))
    if cluster is None:
        sys.exit(f"no cluster runs in {arguments.folder}: make cluster")
    for archive in (agent_image(), tools_image()):
        cluster.import_image(archive)
    async with contextlib.AsyncExitStack() as stack:
        site = stack.enter_context(open_site(cluster, volumes=False))
        # Played nodes say nothing about users of pods: with them, and without, the pods are to be of one kind.
        gateway = Gateway(site, folder / "g", requests=0.01, user_namespaces=False, more=POOL)
        pools = Pools(site)
        api = Api(site.kubectl.namespace, cluster.place.kubeconfig)
        for closing in (pools.close, api.close):
            stack.push_async_callback(closing)
        stack.push_async_callback(asyncio.to_thread, gateway.stop)
        await asyncio.to_thread(gateway.start)
        client = await stack.enter_async_context(gateway.connect())
        for _ in range(2):  # from now on the kind is kept ready
            await client.create_session("native")
        await pools.fill()
        (pool,) = await pools.list()

        async def take_row(nodes: int, sessions: int) -> Row:
            async def claim() -> float:
                await pools.fill()
                return await pools.claim(pool)

            async def create() -> float:
                await pools.fill()
                return await create_by_sdk(client, "native")

            bare, ours = await take(arguments.number, claim, create)
            programs = list_programs(cluster.place.logs)
            return Row(
                nodes,
                sessions,
                *(percentile(bare, 50), percentile(bare, 99), percentile(ours, 50), percentile(ours, 99)),
                memory=read_memory(gateway.pid),
                cpu=await measure_idle(gateway.pid),
                api_server=read_memory(programs["kube-apiserver"]),
                controller=read_memory(programs["agent-sandbox-controller"]),
            )

        yield await take_row(0, 0)
        stack.enter_context(play_nodes(cluster, arguments.nodes, folder))
        sessions = Sessions(api, gateway_label(load_key(folder / "g/s/kubernetes/gateway.pem").public))
        await sessions.prepare(pool)
        for number in arguments.steps:
            await sessions.grow(number)
            yield await take_row(arguments.nodes, number)


async def run(arguments: argparse.Namespace) -> list[Row]:
    rows = list[Row]()
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="k8e-bench-") as folder:
        async with contextlib.aclosing(measure(arguments, Path(folder))) as measured:
            async for row in measured:
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fleet", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a cluster that `make cluster` has started; stop it afterwards")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 1000, 2500, 5000])
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="a file for the rows, as JSON")
    arguments = parser.parse_args()
    facts = machine_facts()
    rows = asyncio.run(run(arguments))
    print(f"Measured on: {facts}")
    if arguments.keep:
        arguments.keep.write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
