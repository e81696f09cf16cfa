"""What goes wrong in a cluster: every failure has a cause and leaves nothing, and no gateway touches another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.core_v1 import Pod

from k8e.engine import EngineError, Mount, Runtime, SandboxSpec, Shape
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.api import Api, VersionGone
from k8e.engine.kubernetes.names import object_name
from k8e.policy import HostList
from tests.kubernetes.engine.rig import LIMITS, Site, new_name, open_engine, spec_of

SPEC = spec_of(Runtime.NATIVE)


@pytest.fixture(scope="module")
async def engine(site: Site) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site) as engine:
        yield engine


async def refuse(engine: KubernetesEngine, spec: SandboxSpec = SPEC) -> EngineError:
    """Creating it fails, and leaves nothing."""
    name = new_name()
    with pytest.raises(EngineError) as caught:
        await engine.create(name, spec)
    assert name not in await engine.list()
    return caught.value


async def eventually(question: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await question():
            await asyncio.sleep(0.05)


async def ends(engine: KubernetesEngine, name: str) -> str:
    """Waits until the sandbox is seen dead; returns the cause."""

    async def is_dead() -> bool:
        return not (await engine.observe(name)).alive

    await eventually(is_dead)
    with pytest.raises(EngineError) as caught:
        await engine.attach(name)
    return caught.value.cause


class TestNotMade:
    async def test_an_image_that_is_not_there(self, site: Site) -> None:
        async with open_engine(site, image="k8e.local/absent:1") as engine:
            error = await refuse(engine)
        assert error.control == "image"
        assert "ErrImageNeverPull" in error.cause
        assert error.hint

    async def test_an_image_that_is_no_reference(self, site: Site) -> None:
        async with open_engine(site, image="NOT A NAME", pull_policy="") as engine:
            error = await refuse(engine)
        assert "InvalidImageName" in error.cause

    async def test_more_than_any_node_has(self, site: Site) -> None:
        async with open_engine(site, deadline=3.0, requests=1.0) as engine:
            error = await refuse(engine, replace(SPEC, limits=replace(LIMITS, cpus=900.0)))
        assert error.control == "node"
        assert "Insufficient cpu" in error.cause

    async def test_a_runtime_without_its_class(self, engine: KubernetesEngine) -> None:
        error = await refuse(engine, replace(SPEC, runtime=Runtime.KATA))
        assert (error.control, "RuntimeClass kata" in error.cause, "gvisor" in error.hint) == ("kata", True, True)

    @pytest.mark.parametrize(
        ("changes", "control"),
        [
            ({"egress": HostList.parse(["example.com"])}, "egress"),
            ({"image": "k8e.local/not-listed:1"}, "image"),
            ({"shape": Shape(mounts=(Mount("/srv", "/srv", 0),))}, "mounts"),
            ({"shape": Shape(slots=("/srv",))}, "mounts"),
            ({"shares": "another"}, "shared workspace"),
        ],
    )
    async def test_what_a_pod_cannot_be(self, engine: KubernetesEngine, changes: dict[str, Any], control: str) -> None:
        error = await refuse(engine, replace(SPEC, **changes))
        assert (error.control, bool(error.hint)) == (control, True)

    async def test_a_pod_that_the_namespace_does_not_admit(self, site: Site) -> None:
        """An administrator's quota, which every pod exceeds."""
        await asyncio.to_thread(site.kubectl, "create", "quota", "none", "--hard=pods=0")
        try:
            async with open_engine(site) as engine:
                error = await refuse(engine)
        finally:
            await asyncio.to_thread(site.kubectl, "delete", "quota", "none")
        assert "exceeded quota" in error.cause

    async def test_no_api_server(self, site: Site, tmp_path: Path) -> None:
        away = tmp_path / "kubeconfig"
        away.write_text(site.kubeconfig.read_text().replace(":6443", ":1"))
        engine = KubernetesEngine(site.options, site.state / "gateway.pem", away)
        try:
            for call in (engine.create(new_name(), SPEC), engine.list(), engine.observe("one"), engine.destroy("one")):
                with pytest.raises(EngineError, match="Kubernetes API") as caught:
                    await call
                assert caught.value.hint
        finally:
            await engine.close()


class TestEnds:
    async def test_deleted_by_another(self, site: Site, engine: KubernetesEngine) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        await asyncio.to_thread(site.kubectl, "delete", f"pod/{object_name(name)}", "--wait=false")
        assert "not running" in await ends(engine, name)
        await engine.destroy(name)

    async def test_evicted(self, site: Site, engine: KubernetesEngine) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        await asyncio.to_thread(evict, site, object_name(name))
        assert "not running" in await ends(engine, name)
        await engine.destroy(name)

    async def test_its_life_is_over_while_no_gateway_runs(self, site: Site) -> None:
        name = new_name()
        engine = site.engine(life=5.0, claims=False)
        await engine.create(name, SPEC)
        await engine.close()
        wait = ("wait", "--for=jsonpath={.status.phase}=Failed", f"pod/{object_name(name)}", "--timeout=100s")
        await asyncio.to_thread(site.kubectl, *wait)
        async with open_engine(site) as follower:
            assert name in await follower.list()
            assert "DeadlineExceeded" in await ends(follower, name)

    async def test_one_without_a_volume_is_not_stopped_and_goes_on(self, engine: KubernetesEngine) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        with pytest.raises(EngineError, match="files") as caught:
            await engine.stop(name)
        assert "storage_class" in caught.value.hint
        sandbox, place = await engine.attach(name)
        assert await run_script(sandbox, place, "echo well") == (0, b"well\n", b"")
        await engine.destroy(name)

    async def test_one_that_is_set_aside_keeps_its_policy_and_is_no_sandbox_of_the_next_gateway(
        self, site: Site, engine: KubernetesEngine
    ) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        before = await asyncio.to_thread(site.pod, name)
        assert await engine.set_aside(name)
        after = await asyncio.to_thread(site.pod, name)
        assert before["metadata"]["labels"].items() <= after["metadata"]["labels"].items()
        async with open_engine(site) as follower:
            for one in (engine, follower):
                assert name not in await one.list()
                assert not (await one.observe(name)).alive
                await one.destroy(name)
        assert (await asyncio.to_thread(site.pod, name))["metadata"]["uid"] == after["metadata"]["uid"]
        await asyncio.to_thread(site.kubectl, "delete", f"pod/{object_name(name)}", "--wait=false")


class TestNeighbours:
    async def test_another_gateway_neither_sees_nor_removes_what_is_not_its_own(
        self, site: Site, engine: KubernetesEngine, tmp_path: Path
    ) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        async with open_engine(replace(site, state=tmp_path)) as other:
            assert name not in await other.list()
            assert not (await other.observe(name)).alive
            await other.destroy(name)
            with pytest.raises(EngineError, match="exists already"):
                await other.create(name, SPEC)
        sandbox, place = await engine.attach(name)
        assert await run_script(sandbox, place, "echo well") == (0, b"well\n", b"")
        await engine.destroy(name)

    async def test_a_pod_has_nothing_of_the_clusters(self, engine: KubernetesEngine) -> None:
        name = new_name()
        await engine.create(name, SPEC)
        sandbox, place = await engine.attach(name)
        script = "ls /var/run/secrets/kubernetes.io 2>/dev/null; env | grep -i kubernetes; grep Cap /proc/self/status"
        _, output, _ = await run_script(sandbox, place, script)
        assert set(output.decode().split("\n")) == {
            *(f"Cap{kind}:\t{0:016x}" for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")),
            "",
        }
        await engine.destroy(name)


async def test_a_version_that_is_forgotten_is_gone(site: Site) -> None:
    api = Api(site.options.namespace, site.kubeconfig)
    try:
        with pytest.raises(VersionGone):
            async for _ in api.watch(Pod, "1"):
                pass
    finally:
        await api.close()


def evict(site: Site, name: str) -> None:
    namespace = site.kubectl.namespace
    body = f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{name}","namespace":"{namespace}"}}}}'
    site.kubectl("create", f"--raw=/api/v1/namespaces/{namespace}/pods/{name}/eviction", "--filename=-", given=body)
