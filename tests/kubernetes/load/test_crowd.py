"""A sandbox of a warm pool, one that is made for its claim, and a hundred at once, through the gateway: each is one
session's own, works, and is gone when it was destroyed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from k8e.cluster.cluster import Cluster
from sandbox_client import AsyncSandboxClient, Conflict, NotFound, OutcomeUnknown
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.load.gateway import Gateway

CROWD: Final = 100
WARM: Final = 8
DEADLINE: Final = 420.0  # two cores start a hundred pods
QUOTAS: Final = f"[quotas]\nsessions = {2 * CROWD}\n"


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        yield site


@pytest.fixture
async def gateway(site: Site, tmp_path: Path) -> AsyncIterator[Gateway]:
    more = f"[pool]\nmin = 1\nmax = {WARM}\n{QUOTAS}"
    gateway = Gateway(site, tmp_path / "g", deadline=f"{DEADLINE:g}s", requests=0.01, more=more)
    try:
        await asyncio.to_thread(gateway.start)
        yield gateway
    finally:
        await asyncio.to_thread(gateway.stop)
        sys.stdout.write(gateway.log[-6000:])  # shown when a test fails


def list_pods(site: Site) -> dict[str, dict[str, Any]]:
    items = json.loads(site.kubectl("get", "pods", "--output=json"))["items"]
    return {each["metadata"]["name"]: each for each in items}


def list_claims(site: Site) -> dict[str, str]:
    """The pods of all claims, by their names."""
    items = json.loads(site.kubectl("get", "sandboxclaims", "--output=json"))["items"]
    return {each["metadata"]["name"]: each.get("status", {}).get("sandbox", {}).get("name", "") for each in items}


async def find_warm(site: Site, number: int = 1) -> set[str]:
    """Pods that are ready and greeted, and no claim's."""
    deadline = time.monotonic() + 120
    while True:
        pods, claimed = await asyncio.gather(asyncio.to_thread(list_pods, site), asyncio.to_thread(list_claims, site))
        found = {
            name
            for name, pod in pods.items()
            if "k8e.dev/agent-key" in pod["metadata"].get("annotations", {}) and name not in claimed.values()
        }
        if len(found) >= number:
            return found
        assert time.monotonic() < deadline, pods
        await asyncio.sleep(0.2)


async def name_pod(site: Site, client: AsyncSandboxClient, session: str) -> str:
    """All pods have one host name; each has its own address."""
    address = await find_address(client, session)
    pods = await asyncio.to_thread(list_pods, site)
    (name,) = [name for name, pod in pods.items() if pod["status"].get("podIP") == address]
    return name


async def find_address(client: AsyncSandboxClient, session: str) -> str:
    done = await client.exec(session, "cat /etc/hosts", timeout=60)
    assert done.exit_code == 0, done
    return done.stdout.splitlines()[-1].split()[0]


async def is_active(client: AsyncSandboxClient, session: str) -> bool:
    with contextlib.suppress(NotFound):
        while (phase := (await client.get_session(session)).phase) == "creating":
            await asyncio.sleep(0.2)
        return phase == "active"
    return False


@pytest.mark.daily
@pytest.mark.parametrize("runtime", ["native", "gvisor"])
async def test_a_warm_one_is_claimed_and_a_cold_one_is_made(site: Site, gateway: Gateway, runtime: str) -> None:
    async with gateway.connect() as client:
        # Two sessions of a kind say that the kind is wanted.
        cold = [await client.create_session(runtime) for _ in range(2)]
        await find_warm(site)
        # The pool may have a second one by now, and any of them is claimed.
        warm = set(await asyncio.to_thread(list_pods, site)) - {await name_pod(site, client, each) for each in cold}
        session = await client.create_session(runtime)
        assert await name_pod(site, client, session) in warm
        kernel = await client.exec(session, "uname -r")
        assert ("gvisor" in kernel.stdout) == (runtime == "gvisor")
        claims = await asyncio.to_thread(list_claims, site)
        assert await name_pod(site, client, session) in claims.values()
        for each in (*cold, session):
            await client.destroy_session(each)
        assert not await asyncio.to_thread(list_claims, site)


@pytest.mark.timeout(1200)
async def test_a_hundred_at_once(site: Site, gateway: Gateway) -> None:
    async with gateway.connect() as client:

        async def create(number: int) -> tuple[str, str]:
            session = f"crowd-{number}"
            async with asyncio.timeout(2 * DEADLINE):
                while True:
                    try:
                        await client.create_session("native", memory=64 << 20, session_id=session)
                        break
                    except (OutcomeUnknown, Conflict):  # the SDK waits for three minutes
                        if await is_active(client, session):
                            break
            await client.write_file(session, "note", str(number))
            return session, await find_address(client, session)

        async def read(session: str) -> str:
            return await client.read_file(session, "note")

        made = dict(await asyncio.gather(*(create(number) for number in range(CROWD))))
        assert len(set(made.values())) == CROWD  # a pod for each
        pods = await asyncio.to_thread(list_pods, site)
        claims = await asyncio.to_thread(list_claims, site)
        assert {pods[name]["status"]["podIP"] for name in claims.values()} == set(made.values())
        notes = await asyncio.gather(*(read(f"crowd-{number}") for number in range(CROWD)))
        assert notes == [str(number) for number in range(CROWD)]
        await asyncio.gather(*(client.destroy_session(session) for session in made))
        assert not await client.list_sessions()
        assert not await asyncio.to_thread(list_claims, site)
        assert not set(claims.values()) & set(await asyncio.to_thread(list_pods, site))
