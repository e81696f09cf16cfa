"""Lists of hosts on a real cluster: applied by the helper of the node, on runc and gVisor pods, with an internet that
has every address."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from k8e.cluster.cluster import Cluster
from k8e.engine import EngineError, Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine, egress
from k8e.engine.kubernetes.names import object_name
from k8e.engine.kubernetes.options import NODE
from k8e.policy import NOTHING, HostList
from tests.egress.internet import Internet
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of
from tests.kubernetes.kubectl import make_pod
from tests.kubernetes.node.rig import Helper, internet_behind, run_on_node

ALLOWED, OTHER, STRANGE = "45.90.31.1", "45.90.31.2", "45.90.31.9"
LISTED = HostList.parse(["allowed.com"])
BOTH = HostList.parse(["allowed.com", "other.com"])
# Names and ports in, words out: whether the page came, or which error.
REACH = """
import json, socket, sys
def reach(host, port):
    try:
        with socket.create_connection((host, int(port)), 8) as connection:
            connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return "reached" if connection.recv(100) else "closed"
    except OSError as error:
        return type(error).__name__
print(json.dumps([reach(*each.rsplit(":", 1)) for each in sys.argv[1:]]))
"""
HOLD = """
import socket
with socket.create_connection(("other.com", 80), 8) as connection:
    connection.sendall(b"GET /silent HTTP/1.0\\r\\n\\r\\n")
    print(connection.recv(1000).decode().split()[-1], flush=True)
    try:
        print(len(connection.recv(1000)))
    except OSError as error:
        print(type(error).__name__)
"""
RUNTIMES = [Runtime.NATIVE, Runtime.GVISOR]


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        yield replace(site, options=replace(site.options, egress=NODE))


@pytest.fixture(scope="module")
def internet(cluster: Cluster) -> Iterator[Internet]:
    with internet_behind(cluster) as internet:
        internet.publish({"allowed.com": {"A": [ALLOWED]}, "other.com": {"A": [OTHER]}})
        yield internet


def list_traces(cluster: Cluster) -> list[str]:
    """Routing rules, and addresses that the node answers for."""
    found = run_on_node(cluster, "ip", "rule", "list") + run_on_node(cluster, "ip", "neigh", "show", "proxy")
    return sorted(line for line in found.splitlines() if "prohibit" in line or "proxy" in line)


@pytest.fixture(scope="module")
def helper(site: Site, internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    site.engine()  # has made its key
    helper = Helper(site, tmp_path_factory.mktemp("helper"))
    before = list_traces(site.cluster)
    helper.start()
    try:
        yield helper
        site.kubectl("wait", "--for=delete", "pod", "--all", "--timeout=90s")
        deadline = time.monotonic() + 60
        while list_traces(site.cluster) != before and time.monotonic() < deadline:  # the last pod's rules
            time.sleep(0.1)
    finally:
        helper.end()
        sys.stdout.write(helper.log.read_text()[-4000:])  # shown when a test fails


@pytest.fixture(scope="module", params=[False, True], ids=["pods", "claims"])
async def engine(request: pytest.FixtureRequest, site: Site, helper: Helper) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site, claims=request.param) as engine:
        yield engine
        await engine.keep_ready({})


@pytest.fixture(scope="module", params=RUNTIMES, ids=lambda runtime: str(runtime.value))
async def sandbox(request: pytest.FixtureRequest, engine: KubernetesEngine) -> AsyncIterator[str]:
    name = new_name()
    await engine.create(name, replace(spec_of(request.param), egress=LISTED))
    yield name
    await engine.destroy(name)


async def reach(engine: KubernetesEngine, name: str, *targets: str) -> list[str]:
    sandbox, place = await engine.attach(name)
    code, output, errors = await run_script(sandbox, place, f"python3 -c '{REACH}' {' '.join(targets)}")
    assert code == 0, errors
    found: list[str] = json.loads(output)
    return found


async def told(engine: KubernetesEngine, name: str) -> set[tuple[str, str, str]]:
    found = await engine.observe(name)
    assert not found.refusals_unknown
    return {(each.host, each.address, each.reason) for each in found.refusals}


class TestInForce:
    async def test_what_is_listed_and_nothing_else(
        self, engine: KubernetesEngine, sandbox: str, internet: Internet, site: Site
    ) -> None:
        node = str(site.cluster.addresses.node)
        await engine.observe(sandbox)
        results = await reach(
            engine,
            sandbox,
            *(
                "allowed.com:80",
                "other.com:80",
                f"{STRANGE}:80",
                "allowed.com:22",
                f"{node}:10250",
                "169.254.169.254:80",
            ),
        )
        assert results == ["reached", "gaierror", *["ConnectionRefusedError"] * 4]
        assert await told(engine, sandbox) == {
            ("other.com", "", "name_not_listed"),
            ("", STRANGE, "address_not_listed"),
            ("allowed.com", ALLOWED, "port_not_listed"),
            ("", node, "machine"),
            ("", "169.254.169.254", "metadata"),
        }
        assert await told(engine, sandbox) == set()

    async def test_another_pod_of_the_node(self, engine: KubernetesEngine, sandbox: str, site: Site) -> None:
        """On the same bridge, where packets between pods meet no rules for routing."""
        pod = make_pod("neighbour", "native", "echo hello >/files/index.html; httpd -f -p 8080 -h /files")
        pod["spec"]["securityContext"] = {
            "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}
        }  # fmt: skip
        pod["spec"]["containers"][0]["securityContext"] = {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip

        def start() -> Any:
            site.kubectl.apply(pod)
            site.kubectl("wait", "--for=condition=Ready", "pod/neighbour", "--timeout=60s")
            return site.kubectl.get("pod/neighbour")["status"]["podIP"]

        address = await asyncio.to_thread(start)
        try:
            assert await reach(engine, sandbox, f"{address}:8080") == ["ConnectionRefusedError"]
            assert ("", address, "address_not_listed") in await told(engine, sandbox)
        finally:
            await asyncio.to_thread(site.kubectl, "delete", "pod/neighbour", "--now")

    async def test_a_list_that_changes(self, engine: KubernetesEngine, sandbox: str) -> None:
        await engine.set_egress(sandbox, BOTH)
        assert await reach(engine, sandbox, "other.com:80") == ["reached"]
        link, place = await engine.attach(sandbox)
        held = asyncio.create_task(run_script(link, place, f"python3 -c '{HOLD}' | tee /tmp/held"))
        async with asyncio.timeout(30):
            while (await run_script(link, place, "cat /tmp/held"))[1] != b"open\n":
                await asyncio.sleep(0.05)
        await engine.set_egress(sandbox, LISTED)
        assert (await held)[1] == b"open\nConnectionResetError\n"
        assert await reach(engine, sandbox, "other.com:80", f"{OTHER}:80", "allowed.com:80") == [
            *("gaierror", "ConnectionRefusedError", "reached")
        ]

    async def test_a_table_that_was_deleted(self, engine: KubernetesEngine, sandbox: str, cluster: Cluster) -> None:
        """Nothing opens meanwhile, and it is made again."""
        tables = await asyncio.to_thread(run_on_node, cluster, "nft", "list", "tables", "inet")
        (table,) = [line.split()[-1] for line in tables.splitlines() if "k8e_" in line]
        await asyncio.to_thread(run_on_node, cluster, "nft", "delete", "table", "inet", table)
        assert (await reach(engine, sandbox, f"{STRANGE}:80"))[0] != "reached"
        async with asyncio.timeout(30):
            while await reach(engine, sandbox, "allowed.com:80") != ["reached"]:
                await asyncio.sleep(0.1)
        assert await reach(engine, sandbox, f"{STRANGE}:80") == ["ConnectionRefusedError"]


class TestHostile:
    async def test_a_neighbours_agent_and_programs_are_refused_also_when_they_are_listed(
        self, engine: KubernetesEngine, sandbox: str
    ) -> None:
        """Ports 10539 of its agent and 8080 of a program in it."""
        victim = new_name()
        await engine.create(victim, spec_of(Runtime.NATIVE))
        link, place = await engine.attach(victim)
        serving = asyncio.create_task(run_script(link, place, "exec python3 -m http.server 8080"))
        try:
            address = await engine.find_address(victim)
            targets = [f"{address}:10539", f"{address}:8080"]
            await engine.set_egress(sandbox, HostList.parse(["allowed.com", *targets]))
            await engine.observe(sandbox)
            assert await reach(engine, sandbox, *targets) == ["ConnectionRefusedError"] * 2
            assert await told(engine, sandbox) == {("", address, "other_sandbox")}
            assert (await run_script(link, place, "echo well"))[1] == b"well\n"
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            await engine.set_egress(sandbox, LISTED)
            await engine.destroy(victim)

    async def test_the_control_plane_is_refused_also_when_it_is_listed(
        self, engine: KubernetesEngine, sandbox: str, site: Site
    ) -> None:
        """The API server, the kubelet and the helper: addresses of the node."""
        node = str(site.cluster.addresses.node)
        targets = [f"{node}:{port}" for port in (6443, 10250, 10541)]
        await engine.set_egress(sandbox, HostList.parse(["allowed.com", *targets]))
        try:
            assert await reach(engine, sandbox, *targets) == ["ConnectionRefusedError"] * 3
        finally:
            await engine.set_egress(sandbox, LISTED)


class TestHelperGone:
    async def test_nothing_opens_and_the_next_one_goes_on(
        self, engine: KubernetesEngine, sandbox: str, helper: Helper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert await reach(engine, sandbox, "allowed.com:80") == ["reached"]
        await asyncio.to_thread(helper.end, signal.SIGKILL)
        try:
            assert await reach(engine, sandbox, f"{ALLOWED}:80", f"{OTHER}:80", f"{STRANGE}:80") == [
                *("reached", "ConnectionRefusedError", "ConnectionRefusedError")
            ]
            assert "does not answer" in (await engine.observe(sandbox)).refusals_unknown
            monkeypatch.setattr(egress, "_PATIENCE", 2.0)
            with pytest.raises(EngineError, match="has not applied"):
                await engine.set_egress(sandbox, BOTH)
            with pytest.raises(EngineError, match="has not applied"):
                await engine.create(new_name(), replace(spec_of(Runtime.NATIVE), egress=NOTHING))
        finally:
            await asyncio.to_thread(helper.start)
        monkeypatch.undo()
        await engine.set_egress(sandbox, LISTED)
        assert ("", STRANGE, "address_not_listed") in await told(engine, sandbox)
        assert await reach(engine, sandbox, "allowed.com:80", "other.com:80") == ["reached", "gaierror"]
        await engine.set_egress(sandbox, BOTH)
        assert await reach(engine, sandbox, "other.com:80") == ["reached"]
        await engine.set_egress(sandbox, LISTED)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2])
async def test_killed_while_a_sandbox_is_made(
    engine: KubernetesEngine, helper: Helper, site: Site, delay: float
) -> None:
    """The next helper does again what was half done; the sandbox is handed out by then and not before."""
    name = new_name()
    making = asyncio.create_task(engine.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED)))
    wait = ("wait", "--for=jsonpath={.status.podIP}", f"pod/{object_name(name)}", "--timeout=60s")
    await asyncio.to_thread(site.kubectl, *("wait", "--for=create", wait[2], wait[3]))
    await asyncio.to_thread(site.kubectl, *wait)
    await asyncio.sleep(delay)
    await asyncio.to_thread(helper.end, signal.SIGKILL)
    await asyncio.to_thread(helper.start)
    await making
    async with asyncio.timeout(60):
        while True:  # names are answered when the next one is there; nothing else opens
            first, strange = await reach(engine, name, "allowed.com:80", f"{STRANGE}:80")
            assert strange == "ConnectionRefusedError"
            if first == "reached":
                break
    await engine.destroy(name)


async def test_a_warm_pod_has_an_empty_list_until_it_is_claimed(site: Site, helper: Helper) -> None:
    spec, name = spec_of(Runtime.NATIVE), new_name()
    async with open_engine(site) as engine:
        async with asyncio.timeout(60):
            while await engine.keep_ready({spec: 1}) != {spec: 1}:
                await asyncio.sleep(0.1)
        await engine.create(name, replace(spec, egress=LISTED))
        assert "NotFound" in await asyncio.to_thread(site.kubectl.refused, "get", f"pod/{object_name(name)}")
        assert await reach(engine, name, "allowed.com:80", "other.com:80", f"{STRANGE}:80") == [
            *("reached", "gaierror", "ConnectionRefusedError")
        ]
        await engine.destroy(name)
        await engine.keep_ready({})


async def test_nothing_is_left(engine: KubernetesEngine, cluster: Cluster) -> None:
    before = await asyncio.to_thread(list_traces, cluster)
    name = new_name()
    await engine.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
    assert len(await asyncio.to_thread(list_traces, cluster)) == len(before) + 2
    await engine.destroy(name)
    async with asyncio.timeout(30):
        while await asyncio.to_thread(list_traces, cluster) != before:
            await asyncio.sleep(0.1)
