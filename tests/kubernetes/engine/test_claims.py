"""Sandboxes that are claims on warm pools of agent-sandbox: the cluster has them ready, they end at their time without
a gateway, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from k8e.engine import EngineError, Runtime, SandboxSpec
from k8e.engine.conformance.subject import run_script
from k8e.engine.kubernetes import KubernetesEngine
from k8e.engine.kubernetes.names import object_name
from tests.kubernetes.engine.rig import LIMITS, Site, new_name, open_engine, spec_of

SPEC = spec_of(Runtime.NATIVE)
KINDS = ("sandboxclaims", "sandboxes", "sandboxwarmpools", "sandboxtemplates", "pods")


@pytest.fixture
async def engine(site: Site) -> AsyncIterator[KubernetesEngine]:
    async with open_engine(site) as engine:
        yield engine
        for name in await engine.list():
            await engine.destroy(name)
        await engine.keep_ready({})


async def eventually(question: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(100):
        while not await question():
            await asyncio.sleep(0.05)


async def find(site: Site, kind: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(await asyncio.to_thread(site.kubectl, "get", kind, "--output=json"))[
        "items"
    ]
    return items


async def name_all(site: Site, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in await find(site, kind)}


async def fill(engine: KubernetesEngine, spec: SandboxSpec, number: int = 1) -> None:
    async def is_full() -> bool:
        return await engine.keep_ready({spec: number}) == {spec: number}

    await eventually(is_full)


async def pod_of(site: Site, name: str) -> dict[str, Any]:
    claim = await asyncio.to_thread(site.kubectl.get, f"sandboxclaim/{object_name(name)}")
    return await asyncio.to_thread(site.kubectl.get, f"pod/{claim['status']['sandbox']['name']}")


async def says_well(engine: KubernetesEngine, name: str) -> bool:
    sandbox, place = await engine.attach(name)
    return await run_script(sandbox, place, "echo well") == (0, b"well\n", b"")


@pytest.mark.parametrize("runtime", [Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: runtime.value)
async def test_a_sandbox_takes_a_pod_that_is_ready(site: Site, engine: KubernetesEngine, runtime: Runtime) -> None:
    spec = spec_of(runtime)
    await fill(engine, spec)
    warm = await name_all(site, "pods")
    assert warm
    assert not await engine.list()  # it is no sandbox yet
    name = new_name()
    await engine.create(name, spec)
    assert (await pod_of(site, name))["metadata"]["name"] in warm
    assert await says_well(engine, name)
    again = site.engine()
    try:
        assert await again.list() == [name]
        assert await says_well(again, name)
    finally:
        await again.close()
    await engine.destroy(name)
    assert not await engine.list()
    assert not await name_all(site, "sandboxclaims")


async def test_without_one_that_is_ready_it_is_made(site: Site, engine: KubernetesEngine) -> None:
    name = new_name()
    await engine.create(name, SPEC)
    assert await says_well(engine, name)
    with pytest.raises(EngineError, match="exists already"):
        await engine.create(name, SPEC)
    assert await says_well(engine, name)
    await engine.destroy(name)


async def test_what_is_not_wanted_any_more_is_gone(site: Site, engine: KubernetesEngine) -> None:
    """Pools of an earlier gateway, too; one with a sandbox that was taken from it stays as long as that."""
    other = replace(SPEC, limits=replace(LIMITS, memory=256 << 20))
    await fill(engine, SPEC)
    await engine.keep_ready({SPEC: 1, other: 1})
    assert len(await name_all(site, "sandboxtemplates")) == 2  # limits cannot be changed on a pod that runs
    name = new_name()
    await engine.create(name, SPEC)
    follower = site.engine()
    try:
        await follower.keep_ready({})
        assert await says_well(follower, name)
        assert len(await name_all(site, "sandboxwarmpools")) == 1
        await follower.destroy(name)
        await follower.keep_ready({})
    finally:
        await follower.close()

    async def is_empty() -> bool:
        return not any([await name_all(site, kind) for kind in KINDS])

    await eventually(is_empty)


async def test_its_time_is_over_while_no_gateway_runs(site: Site) -> None:
    engine, name = site.engine(), new_name()
    await engine.create(name, replace(SPEC, life=8.0))
    pod = (await pod_of(site, name))["metadata"]["name"]
    await engine.close()

    async def is_gone() -> bool:
        return not await name_all(site, "sandboxclaims") and pod not in await name_all(site, "pods")

    await eventually(is_gone)
    async with open_engine(site) as follower:
        assert not await follower.list()
        assert not (await follower.observe(name)).alive
        with pytest.raises(EngineError, match="not running"):
            await follower.attach(name)
        await follower.keep_ready({})


async def test_it_is_prolonged(site: Site, engine: KubernetesEngine) -> None:
    name = new_name()
    await engine.create(name, replace(SPEC, life=300.0))

    async def read_end() -> str:
        claim = await asyncio.to_thread(site.kubectl.get, f"sandboxclaim/{object_name(name)}")
        return str(claim["spec"]["lifecycle"]["shutdownTime"])

    before = await read_end()
    await engine.prolong(name, 900.0)
    assert await read_end() > before
    assert await says_well(engine, name)
    await engine.prolong("never-was", 900.0)


@pytest.mark.parametrize("warm", [False, True])
async def test_a_pod_that_replaces_its_own_is_not_taken_for_it(
    site: Site, engine: KubernetesEngine, *, warm: bool
) -> None:
    """The controller makes another one for the claim, with nothing of the session in it."""
    if warm:
        await fill(engine, SPEC)
    name = new_name()
    await engine.create(name, SPEC)
    before = await pod_of(site, name)
    await asyncio.to_thread(site.kubectl, "delete", f"pod/{before['metadata']['name']}", "--wait=false")

    async def is_replaced() -> bool:
        return any(
            each["metadata"]["uid"] != before["metadata"]["uid"] and each["status"]["phase"] == "Running"
            for each in await find(site, "pods")
            if each["metadata"]["name"] == before["metadata"]["name"]
        )

    await eventually(is_replaced)
    assert not (await engine.observe(name)).alive
    with pytest.raises(EngineError, match="not running"):
        await engine.attach(name)
    assert name in await engine.list()
    await engine.destroy(name)
    assert before["metadata"]["name"] not in await name_all(site, "pods")


async def test_one_that_is_set_aside_belongs_to_no_gateway(site: Site, engine: KubernetesEngine) -> None:
    name = new_name()
    await engine.create(name, SPEC)
    kept = await engine.set_aside(name)
    assert kept == f"sandboxclaim/{site.kubectl.namespace}/{object_name(name)}"
    assert name not in await engine.list()
    assert not (await engine.observe(name)).alive
    await asyncio.to_thread(site.kubectl, "delete", f"sandboxclaim/{object_name(name)}", "--cascade=foreground")


async def test_a_pool_that_was_deleted_is_made_again(site: Site, engine: KubernetesEngine) -> None:
    await fill(engine, SPEC)
    (pool,) = await name_all(site, "sandboxwarmpools")
    await asyncio.to_thread(site.kubectl, "delete", f"sandboxwarmpool/{pool}", f"sandboxtemplate/{pool}")
    with pytest.raises(EngineError, match="warm pool"):
        await engine.create(new_name(), SPEC)
    name = new_name()
    await engine.create(name, SPEC)
    assert await says_well(engine, name)
