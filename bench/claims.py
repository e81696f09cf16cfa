"""Sandboxes on a cluster that `make cluster` has started, beside what Kubernetes takes for the same.

    python -m bench.claims FOLDER [--number 30] [--runtimes native gvisor] [--keep FILE]

- a sandbox of a warm pool with its first command, by the engine alone and through the gateway and the SDK, beside the
  bare claim on the same pool: a SandboxClaim that is created and watched until it is Ready;
- the same beside `kubectl run`, `wait` and `exec`, which is how a person would do it;
- a command in a session, through the gateway, beside `kubectl exec`.

All are taken in turn, in one run; the pool is full before each claim.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from lightkube.resources.core_v1 import Pod

from bench.samples import Measure, machine_facts, render
from k8e.cluster.cluster import find_cluster
from k8e.cluster.place import Place
from k8e.engine import Limits, Runtime, SandboxSpec
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.agent_sandbox import WARM, SandboxClaim, SandboxWarmPool, build_sandbox_claim, read_condition
from k8e.engine.kubernetes.api import Api
from k8e.engine.kubernetes.names import AGENT_KEY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sdk" / "python"))

from sandbox_client import AsyncSandboxClient
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.images import TOOLS, agent_image, tools_image
from tests.kubernetes.engine.rig import Site, open_engine
from tests.kubernetes.load.gateway import Gateway

GOAL = 1.3  # times the bare claim
READY = 2  # pods in a pool before one is claimed
SETTLED = 1.0  # seconds after that: the controller and the kubelet have done their work
LIMITS = Limits(memory=256 << 20, disk=64 << 20)
POOL = f"[pool]\nmin = {READY}\nmax = {READY}\n"

Action = Callable[[], Awaitable[float]]  # milliseconds


async def take(count: int, *actions: Action) -> list[tuple[float, ...]]:
    """In turn, so that a noisy moment hits all alike. The first round does not count."""
    rounds = [[await action() for action in actions] for _ in range(count + 1)]
    return [tuple(column) for column in zip(*rounds[1:], strict=True)]


class Pools:
    """The warm pools of a namespace, and bare claims on them."""

    def __init__(self, site: Site) -> None:
        self._api = Api(site.kubectl.namespace, site.cluster.place.kubeconfig)

    async def close(self) -> None:
        await self._api.close()

    async def find(self, before: set[str]) -> str:
        """The one that was not there before."""
        (name,) = await self.list() - before
        return name

    async def list(self) -> set[str]:
        pools, _ = await self._api.list(SandboxWarmPool)
        return {pool.metadata.name or "" for pool in pools if pool.metadata is not None}

    async def fill(self) -> None:
        """Waits until pods are ready and greeted; the gateway has the pools filled again."""
        async with asyncio.timeout(300):
            while len([pod for pod in (await self._api.list(Pod))[0] if _is_ready(pod)]) < READY:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLED)

    async def claim(self, pool: str) -> float:
        """The time until a bare claim is Ready, by the same requests as the engine's."""
        name = f"bare-{secrets.token_hex(4)}"
        claim = build_sandbox_claim(name, pool, "bench", time.time() + 600)
        _, version = await self._api.list(SandboxClaim, fields="metadata.name=none")
        begin, taken = list[float](), 0.0

        async def create() -> None:
            await asyncio.sleep(0.05)  # until the watch is open
            begin.append(time.perf_counter())
            await self._api.create(claim)

        creating = asyncio.create_task(create())
        async with contextlib.aclosing(self._api.watch(SandboxClaim, version)) as events:
            async for _, one in events:
                condition = read_condition(one)
                if one.metadata and one.metadata.name == f"k8e-{name}" and condition and condition.status == "True":
                    taken = time.perf_counter() - begin[0]
                    break
        await creating
        assert one.metadata is not None
        await self._api.delete(SandboxClaim, one.metadata.name or "", one.metadata.uid or "", foreground=True)
        return 1000 * taken


def _is_ready(pod: Pod) -> bool:
    meta = pod.metadata
    return meta is not None and WARM in (meta.labels or {}) and AGENT_KEY in (meta.annotations or {})


# The engine alone ----------------------------------------------------------------------------------------------------


async def measure_engine(site: Site, runtime: str, count: int) -> AsyncIterator[Measure]:
    spec, pools = SandboxSpec(Runtime(runtime), limits=LIMITS), Pools(site)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pools.close)
        engine = await stack.enter_async_context(open_engine(site))
        stack.push_async_callback(engine.keep_ready, {})
        before = await pools.list()

        async def fill() -> None:
            while (await engine.keep_ready({spec: READY}) or {}).get(spec, 0) < READY:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLED)

        await fill()
        pool = await pools.find(before)

        async def claim() -> float:
            await fill()
            return await pools.claim(pool)

        async def create() -> float:
            await fill()
            return await create_and_run(engine, spec)

        bare, ours = await take(count, claim, create)
        yield Measure(f"{runtime}: claim + first command, the engine", "ms", ours, "the bare claim", bare)


async def create_and_run(engine: KubernetesEngine, spec: SandboxSpec) -> float:
    name = f"b{secrets.token_hex(4)}"
    begin = time.perf_counter()
    await engine.create(name, spec)
    sandbox, place = await engine.attach(name)
    assert (await run_script(sandbox, place, "true"))[0] == 0
    taken = time.perf_counter() - begin
    await engine.destroy(name)
    return 1000 * taken


# The gateway ---------------------------------------------------------------------------------------------------------


async def measure_gateway(site: Site, folder: Path, runtime: str, count: int) -> AsyncIterator[Measure]:
    gateway, pools = Gateway(site, folder / runtime, more=POOL), Pools(site)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pools.close)
        stack.push_async_callback(asyncio.to_thread, gateway.stop)
        await asyncio.to_thread(gateway.start)
        client = await stack.enter_async_context(gateway.connect())
        before = await pools.list()
        session = ""
        for _ in range(2):  # from now on the kind is kept ready
            session = await client.create_session(runtime)
            stack.push_async_callback(client.destroy_session, session)
        await pools.fill()
        pool = await pools.find(before)

        async def claim() -> float:
            await pools.fill()
            return await pools.claim(pool)

        async def create() -> float:
            await pools.fill()
            return await create_by_sdk(client, runtime)

        async def by_kubectl() -> float:
            return await asyncio.to_thread(run_by_kubectl, site, runtime)

        bare, ours, people = await take(count, claim, create, by_kubectl)
        name = f"{runtime}: claim + first command, gateway and SDK"
        yield Measure(name, "ms", ours, "the bare claim", bare)
        yield Measure(name, "ms", ours, "kubectl run + wait + exec", people)

        pod = f"exec-{runtime}"
        await asyncio.to_thread(start_pod, site, pod, runtime)
        stack.push_async_callback(asyncio.to_thread, site.kubectl, "delete", f"pod/{pod}", "--wait=false", "--now")

        async def execute() -> float:
            begin = time.perf_counter()
            assert (await client.exec(session, ["/usr/bin/true"])).exit_code == 0
            return 1000 * (time.perf_counter() - begin)

        async def execute_by_kubectl() -> float:
            begin = time.perf_counter()
            await asyncio.to_thread(site.kubectl, "exec", pod, "--", "true")
            return 1000 * (time.perf_counter() - begin)

        ours, theirs = await take(count, execute, execute_by_kubectl)
        yield Measure(f"{runtime}: exec true, gateway and SDK", "ms", ours, "kubectl exec", theirs)


async def create_by_sdk(client: AsyncSandboxClient, runtime: str) -> float:
    begin = time.perf_counter()
    session = await client.create_session(runtime)
    assert (await client.exec(session, ["/usr/bin/true"])).exit_code == 0
    taken = time.perf_counter() - begin
    await client.destroy_session(session)
    return 1000 * taken


def run_by_kubectl(site: Site, runtime: str) -> float:
    name = f"run-{secrets.token_hex(4)}"
    begin = time.perf_counter()
    start_pod(site, name, runtime)
    site.kubectl("exec", name, "--", "true")
    taken = time.perf_counter() - begin
    site.kubectl("delete", f"pod/{name}", "--now")
    return 1000 * taken


def start_pod(site: Site, name: str, runtime: str) -> None:
    container = {"name": name, "image": TOOLS, "imagePullPolicy": "Never", "command": ["sleep", "100000"]}
    overrides = json.dumps({"spec": {"runtimeClassName": runtime, "containers": [container]}})
    site.kubectl("run", name, f"--image={TOOLS}", f"--overrides={overrides}")
    site.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s")


# -------------------------------------------------------------------------------------------------------------------


async def measure(arguments: argparse.Namespace) -> Sequence[Measure]:
    cluster = find_cluster(Place(arguments.folder.resolve()))
    if cluster is None:
        sys.exit(f"no cluster runs in {arguments.folder}: make cluster")
    for archive in (agent_image(), tools_image()):
        cluster.import_image(archive)
    found = list[Measure]()
    with tempfile.TemporaryDirectory(prefix="k8e-bench-") as folder, open_site(cluster, volumes=False) as site:
        site.kubectl("label", "namespace", site.kubectl.namespace, "pod-security.kubernetes.io/enforce-")
        for runtime in arguments.runtimes:
            for measures in (
                measure_engine(site, runtime, arguments.number),
                measure_gateway(site, Path(folder), runtime, arguments.number),
            ):
                async for one in measures:
                    print(render({}, [one]).splitlines()[2], flush=True)
                    found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.claims", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a cluster that `make cluster` has started")
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--runtimes", nargs="+", default=["native", "gvisor"])
    parser.add_argument("--keep", type=Path, help="a file for all samples, as JSON")
    arguments = parser.parse_args()
    facts = machine_facts()
    try:
        measures = asyncio.run(measure(arguments))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}: {error.stderr}")
    print(render(facts | {"load after": machine_facts()["load"], "goal": f"{GOAL} times the bare claim"}, measures))
    if arguments.keep:
        arguments.keep.write_text(json.dumps({"facts": facts, "measures": [each.as_dict() for each in measures]}))


if __name__ == "__main__":
    main()
