"""The lease on a real API server: one leads, and another one takes over."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest

from k8e.engine.kubernetes.api import Api
from k8e.replicas.leadership import Leadership, LeaseLost, LeaseWatch
from k8e.replicas.lease import lease_name
from tests.kubernetes.engine.rig import Site


@pytest.fixture
def gateway() -> str:
    return secrets.token_hex(8)


class Contender:
    def __init__(self, site: Site, gateway: str, identity: str) -> None:
        self.api = Api(site.kubectl.namespace, site.kubeconfig)
        self.watch = LeaseWatch(self.api, gateway)
        self.lost = asyncio.Event()
        loop = asyncio.get_running_loop()

        def lose() -> None:
            loop.call_soon_threadsafe(self.lost.set)

        self.leadership = Leadership(self.api, gateway, identity, self.watch, lose)

    async def die(self) -> None:
        """Without a word, as a process that is killed."""
        assert self.leadership._renewing is not None
        self.leadership._renewing.cancel()
        self.leadership._ended.set()
        await self.watch.close()


@contextlib.asynccontextmanager
async def contend(site: Site, gateway: str, identity: str) -> AsyncIterator[Contender]:
    contender = Contender(site, gateway, identity)
    contender.watch.open()
    try:
        yield contender
    finally:
        await contender.leadership.release()
        await contender.watch.close()
        await contender.api.close()


async def test_one_of_many_leads_and_is_known_to_all(site: Site, gateway: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        all_of_them = [await stack.enter_async_context(contend(site, gateway, f"r{number}")) for number in range(4)]
        races = [asyncio.create_task(each.leadership.acquire()) for each in all_of_them]
        await asyncio.wait(races, return_when=asyncio.FIRST_COMPLETED)
        ((leader, race),) = [(one, race) for one, race in zip(all_of_them, races, strict=True) if race.done()]
        assert race.result() == 1
        leader.leadership.guard()
        await leader.leadership.publish("10.0.0.1:50052")
        for each in all_of_them:
            assert await each.watch.leader() == "10.0.0.1:50052"
            if each is not leader:
                with pytest.raises(LeaseLost):
                    each.leadership.guard()
        seen = {leader.watch.sight}
        while len(seen) < 4:  # it is renewed, which takes longer than its life
            await leader.watch.wait(60)
            seen.add(leader.watch.sight)
        assert [other.done() for other in races].count(True) == 1
        for other in races:
            other.cancel()


async def test_a_lease_that_is_released_is_taken_at_once(site: Site, gateway: str) -> None:
    async with contend(site, gateway, "a") as first, contend(site, gateway, "b") as second:
        await first.leadership.acquire()
        await first.leadership.publish("10.0.0.1:50052")
        waiting = asyncio.create_task(second.leadership.acquire())
        await first.leadership.release()
        assert await waiting == 2
        assert second.watch.sight is not None
        assert second.watch.sight.address == ""  # it does not serve yet
        with pytest.raises(LeaseLost):
            first.leadership.guard()


async def test_the_lease_of_one_that_died_is_taken_after_its_life(site: Site, gateway: str) -> None:
    async with contend(site, gateway, "a") as first, contend(site, gateway, "b") as second:
        await first.leadership.acquire()
        await first.die()
        assert await second.leadership.acquire() == 2
        with pytest.raises(LeaseLost):  # its own time was over before
            first.leadership.guard()
        first.leadership._sight = None


async def test_a_leader_whose_lease_is_anothers_is_ended(site: Site, gateway: str) -> None:
    async with contend(site, gateway, "a") as first:
        await first.leadership.acquire()
        patch = '{"spec": {"holderIdentity": "b", "leaseTransitions": 9}}'
        site.kubectl("patch", f"lease/{lease_name(gateway)}", "--type=merge", "--patch", patch)
        async with asyncio.timeout(30):
            await first.lost.wait()
        first.leadership._sight = None


async def test_a_leader_that_cannot_renew_is_ended(site: Site, gateway: str) -> None:
    async with contend(site, gateway, "a") as first:
        await first.leadership.acquire()
        assert first.leadership._renewing is not None
        first.leadership._renewing.cancel()
        async with asyncio.timeout(30):
            await first.lost.wait()
        with pytest.raises(LeaseLost):
            first.leadership.guard()
