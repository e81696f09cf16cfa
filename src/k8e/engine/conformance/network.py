"""The list of hosts is in force from before the first process on and changed without a gap; refusals are told once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from k8e.engine import Refusal
from k8e.engine.conformance.subject import Subject, check, comes_true, equal, holds
from k8e.policy import NOTHING, HostList

# Of no network: reserved for documentation.
FIRST, SECOND = "192.0.2.71", "198.51.100.72"
FIRST_LIST, SECOND_LIST = HostList.parse([FIRST]), HostList.parse([SECOND])


@check()
async def check_a_list_is_in_force_when_it_is_created(subject: Subject) -> None:
    async with subject.made(egress=FIRST_LIST) as name:
        holds("what is on the list", await subject.in_force(name, FIRST))
        holds("nothing else", not await subject.in_force(name, SECOND))


@check()
async def check_a_list_is_in_force_before_the_first_process(subject: Subject) -> None:
    name = subject.new_name()
    creating = asyncio.create_task(subject.engine.create(name, replace(subject.spec, egress=FIRST_LIST)))
    try:
        while not creating.done() and not (await subject.engine.observe(name)).alive:
            await asyncio.wait({creating}, timeout=0.001)
        if creating.done():
            await creating  # it failed, or was quicker
        holds("the list, when the first process is seen", await subject.in_force(name, FIRST))
        await creating
    finally:
        await asyncio.wait({creating})
        await subject.engine.destroy(name)


@check()
async def check_nothing_is_reachable_that_nothing_was_said_of(subject: Subject) -> None:
    async with subject.made(egress=NOTHING) as name:
        holds("nothing is in force", not await subject.in_force(name, FIRST))


@check()
async def check_a_changed_list_is_in_force_when_it_returns(subject: Subject) -> None:
    async with subject.made(egress=FIRST_LIST) as name:
        await subject.engine.set_egress(name, SECOND_LIST)
        holds("the new list", await subject.in_force(name, SECOND))
        holds("not the old one", not await subject.in_force(name, FIRST))
        await subject.engine.set_egress(name, NOTHING)
        holds("none", not await subject.in_force(name, SECOND))


@check()
async def check_a_list_is_one_sandboxes_own(subject: Subject) -> None:
    async with subject.made(egress=FIRST_LIST) as one, subject.made(egress=SECOND_LIST) as other:
        holds("the first's", await subject.in_force(one, FIRST))
        holds("not the other's", not await subject.in_force(one, SECOND))
        await subject.engine.set_egress(one, NOTHING)
        holds("the other's stays", await subject.in_force(other, SECOND))


@check()
async def check_the_next_daemon_leaves_a_list_in_force_and_can_change_it(subject: Subject) -> None:
    async with subject.made(egress=FIRST_LIST) as name:
        await subject.engine.close()
        holds("without a daemon", await subject.in_force(name, FIRST))
        follower = subject.again()
        try:
            await follower.set_egress(name, SECOND_LIST)
            holds("the new list", await subject.in_force(name, SECOND))
            holds("not the old one", not await subject.in_force(name, FIRST))
        finally:
            await follower.close()


@check()
async def check_one_that_is_started_has_the_list_that_it_is_started_with(subject: Subject) -> None:
    async with subject.made(egress=FIRST_LIST) as name:
        await subject.engine.stop(name)
        await subject.engine.start(name, replace(subject.spec, egress=SECOND_LIST))
        holds("the new list", await subject.in_force(name, SECOND))
        holds("not the old one", not await subject.in_force(name, FIRST))


@check()
async def check_refusals_are_told_once_and_to_whom_they_belong(subject: Subject) -> None:
    async with subject.made() as name, subject.made() as other:
        equal("of one that asked for nothing", (await subject.engine.observe(name)).refusals, ())
        await subject.have_refused(name)
        told: list[Refusal] = []

        async def is_told() -> bool:
            told.extend((await subject.engine.observe(name)).refusals)
            return bool(told)

        await comes_true("the refusal is told", is_told)
        holds("it says what was asked for, why not, and when", all(one.reason and one.at for one in told))
        equal("told again", (await subject.engine.observe(name)).refusals, ())
        equal("told to another", (await subject.engine.observe(other)).refusals, ())


@check(needs="kill")
async def check_refusals_of_one_that_died_are_told(subject: Subject) -> None:
    assert subject.kill is not None
    async with subject.made() as name:
        await subject.have_refused(name)
        await subject.kill(name)

        async def is_dead_and_told() -> bool:
            seen = await subject.engine.observe(name)
            told.extend(seen.refusals)
            return not seen.alive and bool(told)

        told: list[Refusal] = []
        await comes_true("it is dead, and the refusal is told", is_dead_and_told)


@check()
async def check_there_is_a_usual_list(subject: Subject) -> None:
    usual = await subject.engine.default_egress()
    equal("asked again", await subject.engine.default_egress(), usual)
