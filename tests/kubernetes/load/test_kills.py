"""kill -9 of the gateway, the helper of the node, an agent, the kubelet and controllers, while sessions of both kinds
(claims, and pods of their own) and of both runtimes are created, used and destroyed. Nothing that was confirmed is
lost, and nothing stays in the cluster.

Each part once on a day; `K8E_SOAK` kills many more times, at random."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from k8e.cluster.child import list_programs
from k8e.cluster.cluster import Cluster
from k8e.engine.kubernetes.options import NODE
from sandbox_client import NotFound, SandboxError
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.rig import Site, find_processes
from tests.kubernetes.load.gateway import Gateway
from tests.kubernetes.load.mixed import COUNT, Load, wait_for_calls
from tests.kubernetes.node.rig import Helper
from tests.kubernetes.node.test_egress import list_traces
from tests.shares import seed

SOAK: Final = bool(os.environ.get("K8E_SOAK"))
KILLS: Final = min(int(os.environ.get("K8E_KILLS", "150")), 60)  # of a soak
BETWEEN: Final = 12  # calls that succeed between two kills
WORKERS: Final = 2  # of each gateway
PARTS: Final = ("gateway", "helper", "agent", "kubelet", "agent-sandbox-controller", "kube-controller-manager")
OBJECTS: Final = ("sandboxclaims", "sandboxes", "sandboxwarmpools", "sandboxtemplates", "pods")


@dataclass(frozen=True, slots=True)
class Stage:
    site: Site
    helper: Helper
    gateways: tuple[Gateway, Gateway]
    loads: list[Load]
    chance: random.Random

    async def kill(self, part: str) -> None:
        if part == "gateway":
            gateway = self.chance.choice(self.gateways)
            await asyncio.to_thread(gateway.kill)
            await asyncio.to_thread(gateway.start)
        elif part == "helper":
            await asyncio.to_thread(self.helper.end, signal.SIGKILL)
            await asyncio.to_thread(self.helper.start)
        elif part == "agent":
            await self._kill_agent(self.chance.choice(self.loads), self.chance.choice(("native", "gvisor")))
        else:
            await asyncio.to_thread(kill_program, self.site.cluster, part)

    async def _kill_agent(self, load: Load, runtime: str) -> None:
        """Of a session that no worker uses: it ends with a reason, and its command in the background too."""
        victim = await load.make(runtime)
        run = await load.insist(lambda: load.client.start(victim.session, COUNT), victim.session)
        hosts = await load.insist(lambda: load.client.exec(victim.session, "cat /etc/hosts"), victim.session)
        await asyncio.to_thread(kill_agent, self.site, hosts.stdout.splitlines()[-1].split()[0])
        error = await find_end(load, victim.session)
        assert (error.code, bool(error.detail), bool(error.hint)) == ("session_not_found", True, True)
        with contextlib.suppress(NotFound):  # ended with its session
            assert (await load.insist(lambda: load.client.poll(run.run_id))).status == "lost"


async def find_end(load: Load, session: str) -> NotFound:
    """Uses the session until it is not there any more; returns what is said then."""
    async with asyncio.timeout(100):
        while True:
            try:
                await load.client.exec(session, "true")
            except NotFound as error:
                return error
            except SandboxError as error:
                load.judge(error)
            await asyncio.sleep(0.2)


def kill_program(cluster: Cluster, name: str) -> None:
    """Of the cluster's own; its supervisor starts it again."""
    before = list_programs(cluster.place.logs)[name]
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while list_programs(cluster.place.logs).get(name, before) == before:
        assert time.monotonic() < deadline, f"{name} is not started again"
        time.sleep(0.05)


def kill_agent(site: Site, address: str) -> None:
    """The agent of a native pod; of one with gVisor, whose processes the machine does not see, its kernel."""
    pods = json.loads(site.kubectl("get", "pods", "--output=json"))["items"]
    (uid,) = [pod["metadata"]["uid"] for pod in pods if pod["status"].get("podIP") == address]
    found = [
        pid for pid in find_processes(uid) if any(name in read_argv(pid) for name in (b"k8e-agent", b"runsc-sand"))
    ]
    assert found, address
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_argv(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def list_objects(site: Site) -> dict[str, list[str]]:
    found = {}
    for kind in OBJECTS:
        items = json.loads(site.kubectl("get", kind, "--output=json"))["items"]
        found[kind] = [each["metadata"]["name"] for each in items]
    return {kind: names for kind, names in found.items() if names}


@pytest.fixture
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        yield replace(site, options=replace(site.options, egress=NODE))


@pytest.fixture
async def stage(site: Site, tmp_path: Path) -> AsyncIterator[Stage]:
    """Two gateways, one with claims on warm pools and one with pods of its own, and one helper of the node for both."""
    helper = Helper(site, tmp_path)
    pool = "[pool]\nmin = 1\nmax = 2\n"
    gateways = (
        Gateway(site, tmp_path / "claims", egress=NODE, more=pool),
        Gateway(site, tmp_path / "pods", egress=NODE, claims=False, more="[pool]\nenabled = false\n"),
    )
    before = await asyncio.to_thread(list_traces, site.cluster)
    helper.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            loads = []
            for gateway in gateways:
                await asyncio.to_thread(gateway.start)
                client = await stack.enter_async_context(gateway.connect())
                loads.append(Load(client, gateway.folder.name))
            yield Stage(site, helper, gateways, loads, random.Random(seed("kills")))
        # What is there now would stay for ever.
        for gateway in gateways:
            await asyncio.to_thread(gateway.stop)
        await eventually_empty(site, before)
    finally:
        for gateway in gateways:
            gateway.stop()
            sys.stdout.write(f"{gateway.folder.name}:\n{gateway.log[-6000:]}\n")  # shown when a test fails
        helper.end()
        sys.stdout.write(f"helper:\n{helper.log.read_text()[-4000:]}\n")


async def eventually_empty(site: Site, traces: list[str]) -> None:
    """No object of a sandbox is left in the cluster, and no rule on its node."""
    deadline = time.monotonic() + 90
    while True:
        objects = await asyncio.to_thread(list_objects, site)
        rules = await asyncio.to_thread(list_traces, site.cluster)
        if not objects and rules == traces:
            return
        assert time.monotonic() < deadline, (objects, rules)
        await asyncio.sleep(0.5)


def choose_kills(chance: random.Random) -> list[str]:
    if SOAK:
        return [chance.choice(PARTS) for _ in range(KILLS)]
    parts = list(PARTS)
    chance.shuffle(parts)
    return parts


@pytest.mark.daily
@pytest.mark.timeout(1800 if SOAK else 600)
async def test_nothing_is_lost_and_nothing_stays(stage: Stage) -> None:
    loads = stage.loads
    async with asyncio.TaskGroup() as group:
        for load in loads:
            for number in range(WORKERS):
                group.create_task(load.work(number))
        try:
            for part in choose_kills(stage.chance):
                await wait_for_calls(loads, BETWEEN)
                await stage.kill(part)
            await wait_for_calls(loads, BETWEEN)
        finally:
            for load in loads:
                load.ended.set()

    for load in loads:
        assert len(load.kept) >= WORKERS
        for one in load.kept:
            await load.check(one)
        await compare(load)
        for each in await load.client.list_sessions():
            await load.destroy(each.session_id)
        assert not await load.client.list_sessions()
        sys.stdout.write(f"{load.name}: {load.calls} calls, refused: {load.refused}\n")


async def compare(load: Load) -> None:
    """The gateway knows the sessions that were confirmed, and no others but those whose answer was lost."""
    listed = {each.session_id for each in await load.client.list_sessions()}
    expected = {one.session for one in load.kept}
    assert expected <= listed, expected - listed
    assert listed - expected <= load.unconfirmed, listed - expected
