"""Lists of hosts by CiliumNetworkPolicy, applied by a real agent of Cilium, on runc and gVisor pods, with an internet
that has every address."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from k8e.engine import EngineError, Runtime
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.cilium import egress
from k8e.engine.kubernetes.cilium.objects import policy_name
from k8e.engine.kubernetes.egress_objects import digest_list
from k8e.engine.kubernetes.names import policy_name as base_name
from k8e.policy import NOTHING, HostList
from tests.egress.internet import Internet
from tests.kubernetes.cilium.rig import agent_held, find_agent, list_policies, reach, set_audit_mode
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of
from tests.kubernetes.kubectl import Kubectl

OTHER, STRANGE = "45.90.31.2", "45.90.31.9"
LISTED = HostList.parse(["allowed.com"])
SECOND = HostList.parse(["other.com"])
RUNTIMES = [Runtime.NATIVE, Runtime.GVISOR]
DROPPED = "TimeoutError"
HOLD = """
import socket
with socket.create_connection(("allowed.com", 80), 8) as connection:
    connection.sendall(b"GET /ticks HTTP/1.0\\r\\n\\r\\n")
    connection.settimeout(8)
    try:
        connection.recv(1000)
        print("held", flush=True)
        while connection.recv(1000):
            pass
        print("closed")
    except OSError as error:
        print(type(error).__name__)
"""

pytestmark = pytest.mark.usefixtures("internet")


@pytest.fixture(scope="module", params=[False, True], ids=["pods", "claims"])
async def engine(request: pytest.FixtureRequest, site: Site) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site, claims=request.param) as engine:
        yield engine
        await engine.keep_ready({})


@pytest.fixture(scope="module", params=RUNTIMES, ids=lambda runtime: str(runtime.value))
async def sandbox(request: pytest.FixtureRequest, engine: KubernetesEngine) -> AsyncIterator[str]:
    name = new_name()
    await engine.create(name, replace(spec_of(request.param), egress=LISTED))
    yield name
    await engine.destroy(name)


@pytest.fixture
async def own(site: Site) -> AsyncIterator[KubernetesEngine]:
    """For one test, with pods of its own."""
    async with open_engine(site, claims=False, deadline=180.0) as engine:
        yield engine


class TestInForce:
    async def test_what_is_listed_and_nothing_else(self, engine: KubernetesEngine, sandbox: str, site: Site) -> None:
        node = str(site.cluster.addresses.node)
        others = (f"{OTHER}:80", f"{STRANGE}:80", "allowed.com:22", f"{node}:10250", f"{node}:6443")
        results = await reach(
            engine, sandbox, "allowed.com:80", "other.com:80", *others, "169.254.169.254:80", "10.99.0.1:80"
        )
        assert results == ["reached", "gaierror", *[DROPPED] * 7]

    async def test_two_lists_at_once(self, engine: KubernetesEngine, sandbox: str) -> None:
        second = new_name()
        await engine.create(second, replace(spec_of(Runtime.NATIVE), egress=SECOND))
        try:
            assert await reach(engine, second, "other.com:80", "allowed.com:80") == ["reached", "gaierror"]
            assert await reach(engine, sandbox, "allowed.com:80", "other.com:80") == ["reached", "gaierror"]
            # Which is known on this node by now, and not on this list.
            assert await reach(engine, sandbox, f"{OTHER}:80") == [DROPPED]
        finally:
            await engine.destroy(second)

    async def test_a_sandbox_does_not_reach_its_neighbour(self, engine: KubernetesEngine, sandbox: str) -> None:
        other = new_name()
        await engine.create(other, spec_of(Runtime.NATIVE))
        try:
            address = await engine.find_address(other)
            assert await reach(engine, sandbox, f"{address}:10539") == [DROPPED]
        finally:
            await engine.destroy(other)

    async def test_the_list_changes_live_and_cuts(self, engine: KubernetesEngine, sandbox: str) -> None:
        link, place = await engine.attach(sandbox)
        holding = asyncio.create_task(run_script(link, place, f"python3 -c '{HOLD}' | tee /tmp/held"))
        async with asyncio.timeout(60):
            while (await run_script(link, place, "cat /tmp/held"))[1] != b"held\n":
                await asyncio.sleep(0.05)
        await engine.set_egress(sandbox, SECOND)
        results = await reach(engine, sandbox, "other.com:80", "allowed.com:80", "45.90.31.1:80")
        assert results == ["reached", "gaierror", DROPPED]
        _, output, _ = await holding
        assert output.decode().split() == ["held", DROPPED]
        await engine.set_egress(sandbox, NOTHING)
        assert await reach(engine, sandbox, "other.com:80", f"{OTHER}:80") == ["gaierror", DROPPED]
        await engine.set_egress(sandbox, LISTED)
        assert await reach(engine, sandbox, "allowed.com:80", f"{OTHER}:80") == ["reached", DROPPED]


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: str(runtime.value))
async def test_an_empty_list_opens_nothing(own: KubernetesEngine, runtime: Runtime) -> None:
    name = new_name()
    await own.create(name, spec_of(runtime))
    assert await reach(own, name, "allowed.com:80", "45.90.31.1:80", f"{STRANGE}:53") == ["gaierror", *[DROPPED] * 2]


async def test_what_a_name_answers_opens_no_private_address(own: KubernetesEngine) -> None:
    name = new_name()
    hosts = HostList.parse(["private.com", "metadata.com", "allowed.com"])
    await own.create(name, replace(spec_of(Runtime.NATIVE), egress=hosts))
    targets = ("private.com:80", "metadata.com:80", "10.99.0.1:80", "allowed.com:80")
    assert await reach(own, name, *targets) == [*[DROPPED] * 3, "reached"]
    await own.set_egress(name, hosts.plus(HostList.parse(["10.99.0.0/24"])))
    assert await reach(own, name, *targets) == ["reached", DROPPED, "reached", "reached"]


async def test_wildcards_ports_and_blocks(own: KubernetesEngine) -> None:
    name = new_name()
    hosts = HostList.parse(["*.example.org:8080", "45.90.32.0/24:22"])
    await own.create(name, replace(spec_of(Runtime.NATIVE), egress=hosts))
    deep = "deep.below.example.org"
    targets = (f"{deep}:8080", f"{deep}:80", "example.org:8080", "45.90.32.7:22", "45.90.32.7:80", "45.90.33.7:22")
    assert await reach(own, name, *targets) == ["reached", DROPPED, "gaierror", "reached", DROPPED, DROPPED]


async def test_everything_is_what_is_public(own: KubernetesEngine, site: Site) -> None:
    name = new_name()
    await own.create(name, replace(spec_of(Runtime.NATIVE), egress=HostList.parse(["*"])))
    node = str(site.cluster.addresses.node)
    targets = ("allowed.com:80", f"{STRANGE}:7000", "private.com:80", "169.254.169.254:80", f"{node}:6443")
    assert await reach(own, name, *targets) == ["reached", "reached", *[DROPPED] * 3]


async def test_questions_reach_no_other_name_server(own: KubernetesEngine, internet: Internet) -> None:
    """One that answers for a listed name as it likes would open whatever it likes."""
    name = new_name()
    await own.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
    assert await reach(own, name, "45.90.30.53:53") == [DROPPED]
    assert await reach(own, name, "allowed.com:80") == ["reached"]


class TestAgent:
    async def test_while_it_hangs_nothing_opens_and_nothing_is_promised(
        self, own: KubernetesEngine, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = new_name()
        await own.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
        assert await reach(own, name, "allowed.com:80") == ["reached"]
        monkeypatch.setattr(egress, "_PATIENCE", 8.0)
        with agent_held(site.cluster):
            targets = ("45.90.31.1:80", f"{OTHER}:80", f"{STRANGE}:80")
            assert await reach(own, name, *targets) == ["reached", DROPPED, DROPPED]
            with pytest.raises(EngineError, match="Cilium has not applied the list") as caught:
                await own.set_egress(name, SECOND)
            assert "Cilium's agent" in caught.value.hint
        monkeypatch.undo()
        # The old list again, whatever the agent has seen of the new one.
        await own.set_egress(name, HostList.parse(["allowed.com", "example.org"]))
        assert await reach(own, name, "allowed.com:80", f"{OTHER}:80") == ["reached", DROPPED]

    async def test_killed_it_comes_back_to_the_same_lists(self, own: KubernetesEngine, site: Site) -> None:
        name, later = new_name(), new_name()
        await own.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
        before = find_agent(site.cluster)
        os.kill(before, signal.SIGKILL)
        assert await reach(own, name, f"{OTHER}:80", f"{STRANGE}:80") == [DROPPED, DROPPED]
        # Made when the agent, which the supervisor starts again, answers.
        await own.create(later, replace(spec_of(Runtime.NATIVE), egress=SECOND))
        assert find_agent(site.cluster) != before
        assert await reach(own, name, "allowed.com:80", f"{OTHER}:80") == ["reached", DROPPED]
        assert await reach(own, later, "other.com:80", "allowed.com:80") == ["reached", "gaierror"]

    async def test_policies_that_are_not_enforced_are_noticed(self, own: KubernetesEngine, site: Site) -> None:
        set_audit_mode(site.cluster, on=True)
        try:
            with pytest.raises(EngineError, match="policies are not enforced here") as caught:
                await own.create(new_name(), spec_of(Runtime.NATIVE))
            assert "enable-policy" in caught.value.hint
        finally:
            set_audit_mode(site.cluster, on=False)
        assert site.kubectl("get", "pods", "--output=name") == ""


class TestPolicies:
    async def test_one_for_each_list_as_long_as_some_sandbox_has_it(self, own: KubernetesEngine, site: Site) -> None:
        base = base_name(own.gateway)
        first, second = (policy_name(own.gateway, digest_list(hosts)) for hosts in (LISTED, SECOND))
        one, same, other = new_name(), new_name(), new_name()
        for name, hosts in ((one, LISTED), (same, LISTED), (other, SECOND)):
            await own.create(name, replace(spec_of(Runtime.NATIVE), egress=hosts))
        assert list_policies(site) == {base, first, second}
        await own.destroy(one)
        assert list_policies(site) == {base, first, second}
        assert await reach(own, same, "allowed.com:80") == ["reached"]
        await own.set_egress(same, SECOND)
        assert list_policies(site) == {base, second}
        await own.destroy(other)
        assert list_policies(site) == {base, second}
        assert await reach(own, same, "other.com:80") == ["reached"]
        await own.destroy(same)
        assert list_policies(site) == {base}

    async def test_a_gateway_that_was_killed_leaves_none(self, site: Site, kubectl: Kubectl) -> None:
        """Neither of a sandbox whose pod has ended since, nor of one that it had not made yet."""
        dead = site.engine(claims=False)
        name = new_name()
        await dead.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
        async with dead._egress.prepare(SECOND):  # the policy, and no pod
            await dead.close()
        site.kubectl("delete", "pods", "--all", "--wait=true")
        base = base_name(dead.gateway)
        left = {policy_name(dead.gateway, digest_list(hosts)) for hosts in (LISTED, SECOND)}
        assert list_policies(site) == {base, *left}
        async with open_engine(site, claims=False) as engine:
            await engine.create(name, spec_of(Runtime.NATIVE))
            assert list_policies(site) == {base, policy_name(dead.gateway, digest_list(NOTHING))}
            await engine.destroy(name)
        assert list_policies(site) == {base}

    async def test_one_that_was_deleted_closes_and_is_made_again(self, own: KubernetesEngine, site: Site) -> None:
        name, other = new_name(), new_name()
        await own.create(name, replace(spec_of(Runtime.NATIVE), egress=LISTED))
        site.kubectl("delete", "ciliumnetworkpolicy", policy_name(own.gateway, digest_list(LISTED)))
        await own.create(other, replace(spec_of(Runtime.NATIVE), egress=LISTED))
        assert await reach(own, name, "allowed.com:80") == ["reached"]
        assert await reach(own, other, "allowed.com:80", f"{STRANGE}:80") == ["reached", DROPPED]

    async def test_those_of_another_setting_are_named(self, own: KubernetesEngine, site: Site) -> None:
        policy = base_name(own.gateway)
        spec = {"podSelector": {}, "policyTypes": ["Ingress"]}
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
        site.kubectl.apply({**kind, "metadata": {"name": policy}, "spec": spec})
        try:
            with pytest.raises(EngineError, match=f"the NetworkPolicy {policy} is left") as caught:
                await own.create(new_name(), spec_of(Runtime.NATIVE))
            assert "kubectl" in caught.value.hint
        finally:
            site.kubectl("delete", "networkpolicy", policy)
