"""A pod of the same node, which is no sandbox and which nothing holds back, attacks the ports of its neighbours: a
sandbox's agent, the helper of the node, the gateway. Each goes on serving who may ask, and tells the pod nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8e.cluster.cluster import Cluster
from k8e.engine import Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.node_channel import HELPER_PORT, ChannelBroken, dial
from k8e.engine.kubernetes.options import NODE
from k8e.link.errors import LinkError
from k8e.link.noise import GatewayKey, PodDialer
from k8e.policy import HostList
from tests.egress.internet import Internet
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.images import TOOLS
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of
from tests.kubernetes.node.rig import Helper, internet_behind
from tests.kubernetes.node.test_egress import ALLOWED, OTHER, STRANGE, reach, told
from tests.kubernetes.scenarios.place import Place, open_place

AGENT_PORT = 10539
# Fills the port with connections that say nothing, or too little, or nonsense; says when it has begun, and at its end
# how many bytes came back that are more than an answer to a handshake.
ATTACK = r"""
import os, select, socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
noise = (
    b"", b"\0", b"\x20\0", b"\x20\0" + bytes(32), b"\x20\0" + os.urandom(32), b"\xff\xff" + os.urandom(70000),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + os.urandom(508), b"\x16\x03\x01\xff\xff", os.urandom(4096),
    b"\x20\0" + os.urandom(32) + b"\x10\0" + os.urandom(16) * 3,
)
held, most, begun, made = [], 0, False, 0
until = time.monotonic() + seconds
while time.monotonic() < until:
    for each in noise:
        try:
            connection = socket.create_connection((host, port), 2)
        except OSError:
            continue
        made += 1
        try:
            connection.sendall(each)
            connection.setblocking(False)
        except OSError:
            pass
        held.append(connection)
    if not begun:
        print("begun", flush=True)
        begun = True
    readable, _, _ = select.select(held, [], [], 0.01)
    for connection in readable:
        try:
            got = len(connection.recv(65536))
        except OSError:
            got = 0
        most = max(most, got)
        if not got:
            connection.close()
            held.remove(connection)
    while len(held) > 400:
        held.pop(0).close()
print(made, most, flush=True)
"""


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        yield replace(site, options=replace(site.options, egress=NODE))


@pytest.fixture(scope="module")
def internet(cluster: Cluster) -> Iterator[Internet]:
    with internet_behind(cluster) as internet:
        internet.publish({"allowed.com": {"A": [ALLOWED]}, "other.com": {"A": [OTHER]}})
        yield internet


@pytest.fixture(scope="module")
def helper(site: Site, internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    site.engine()  # has made its key
    helper = Helper(site, tmp_path_factory.mktemp("helper"))
    helper.start()
    try:
        yield helper
        site.kubectl("wait", "--for=delete", "pod", "--all", "--timeout=90s")
    finally:
        helper.end()


@pytest.fixture(scope="module")
def attacker(site: Site) -> Iterator[str]:
    """The pod's name."""
    container = {
        "name": "main",
        "image": TOOLS,
        "imagePullPolicy": "Never",
        "command": ["/usr/bin/sleep", "100000"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": security, "terminationGracePeriodSeconds": 0}
    spec["automountServiceAccountToken"] = False
    site.kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "attacker"}, "spec": spec})
    site.kubectl("wait", "--for=condition=Ready", "pod/attacker", "--timeout=60s")
    yield "attacker"
    site.kubectl("delete", "pod/attacker", "--now")


@pytest.fixture(scope="module")
async def engine(site: Site, helper: Helper) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site, claims=False) as engine:
        yield engine


@pytest.fixture(scope="module", params=[Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: str(runtime.value))
async def sandbox(request: pytest.FixtureRequest, engine: KubernetesEngine) -> AsyncIterator[str]:
    name = new_name()
    await engine.create(name, replace(spec_of(request.param), egress=HostList.parse(["allowed.com"])))
    yield name
    await engine.destroy(name)


class Attack:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def wait(self, most: int) -> None:
        """It has made many connections, and no answer was longer than this."""
        assert self._process.stdout is not None
        made, longest = map(int, self._process.stdout.readline().split())
        assert made > 100
        assert longest <= most


@contextlib.contextmanager
def attacking(site: Site, pod: str, host: str, port: int, seconds: float = 8) -> Iterator[Attack]:
    command = [str(site.cluster.components.program("kubectl")), f"--kubeconfig={site.cluster.place.kubeconfig}"]
    command += [f"--namespace={site.kubectl.namespace}", "exec", pod, "--", "/usr/bin/python3", "-c", ATTACK]
    with subprocess.Popen([*command, host, str(port), str(seconds)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            yield Attack(process)
        finally:
            process.kill()


async def test_the_agents_port(site: Site, engine: KubernetesEngine, sandbox: str, attacker: str) -> None:
    link, place = await engine.attach(sandbox)
    before = (await run_script(link, place, "echo $$ > mark; cat mark"))[1]
    address = await engine.find_address(sandbox)
    with attacking(site, attacker, address, AGENT_PORT) as attack:
        for _ in range(20):
            assert (await run_script(link, place, "cat mark"))[1] == before
        # A gateway that starts now shakes hands while the port is full.
        async with asyncio.timeout(60):
            async with contextlib.AsyncExitStack() as stack:
                other = site.engine(claims=False)
                stack.push_async_callback(other.close)
                again, _ = await other.attach(sandbox)
                assert (await run_script(again, place, "cat mark"))[1] == before
        await asyncio.to_thread(attack.wait, 2 + 96)  # the answer to a first message, which anybody gets
    link, place = await engine.attach(sandbox)
    assert (await run_script(link, place, "ls"))[1] == b"mark\n"


async def test_a_gateway_with_another_key_is_nobody_to_an_agent(
    site: Site, engine: KubernetesEngine, sandbox: str
) -> None:
    """Though it knows the pod's address, UID and public key."""
    pod = await asyncio.to_thread(site.pod, sandbox)
    uid, known = pod["metadata"]["uid"], bytes.fromhex(pod["metadata"]["annotations"]["k8e.dev/agent-key"])
    thief = PodDialer(pod["status"]["podIP"], AGENT_PORT, uid=uid, key=GatewayKey.generate(), pinned=known)
    with pytest.raises((LinkError, OSError)):
        async with asyncio.timeout(30):
            stream = await thief()
            stream.socket.close()
    link, place = await engine.attach(sandbox)
    assert (await run_script(link, place, "echo well"))[1] == b"well\n"


async def test_the_helpers_port(site: Site, engine: KubernetesEngine, sandbox: str, attacker: str) -> None:
    node = str(site.cluster.addresses.node)
    await engine.observe(sandbox)
    with attacking(site, attacker, node, HELPER_PORT) as attack:
        assert await reach(engine, sandbox, "allowed.com:80", f"{STRANGE}:80") == ["reached", "ConnectionRefusedError"]
        assert await told(engine, sandbox) == {("", STRANGE, "address_not_listed")}
        await engine.set_egress(sandbox, HostList.parse(["allowed.com", "other.com"]))
        assert await reach(engine, sandbox, "other.com:80") == ["reached"]
        await engine.set_egress(sandbox, HostList.parse(["allowed.com"]))
        # A gateway that has not asked before.
        other = site.engine(claims=False)
        try:
            async with asyncio.timeout(60):
                while (await other.observe(sandbox)).refusals_unknown:
                    await asyncio.sleep(0.2)
        finally:
            await other.close()
        await asyncio.to_thread(attack.wait, 2 + 96)
    assert await reach(engine, sandbox, "allowed.com:80") == ["reached"]


async def test_a_gateway_that_the_helper_does_not_know_learns_nothing(site: Site, sandbox: str) -> None:
    pod = await asyncio.to_thread(site.pod, sandbox)
    (condition,) = [each for each in pod["status"]["conditions"] if each["type"] == "k8e.dev/egress-in-force"]
    assert condition["status"] == "True"
    with pytest.raises((ChannelBroken, OSError)):
        async with asyncio.timeout(30):
            channel = await dial(str(site.cluster.addresses.node), HELPER_PORT, GatewayKey.generate(), bytes(32))
            await channel.send({"refusals": pod["metadata"]["uid"]})
            await channel.receive(4096)


@pytest.fixture(scope="module")
def gateway(site: Site, helper: Helper) -> Iterator[Place]:
    """Where pods reach it."""
    with open_place(site, host=str(site.cluster.addresses.machine)) as place:
        yield place


def test_the_gateways_port(site: Site, gateway: Place, attacker: str, tmp_path: Path) -> None:
    key = gateway.machine.k8e("sandbox-apikey", "create", "victim", "--tenant", "victim").json["key"]
    env = {"K8E_SANDBOX_ENDPOINT": gateway.endpoint, "K8E_SANDBOX_APIKEY": key, "HOME": str(tmp_path)}

    def ask(*words: str) -> Any:
        done = gateway.machine.k8e("sandbox", *words, env=env)
        assert done.code == 0, done
        return json.loads(done.stdout)

    session = ask("create", "--runtime", "native")["session_id"]
    host, _, port = gateway.endpoint.rpartition(":")
    with attacking(site, attacker, host, int(port), 15) as attack:
        for _ in range(3):
            assert ask("run", "--session-id", session, "echo well")["stdout"] == "well\n"
        attack.wait(16384)  # TLS' own: alerts, and the certificate, which is public
    ask("destroy", session)
