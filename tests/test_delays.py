"""Timers of one delay: each fires once, in its time, unless it is taken back before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from k8e.delays import Delays


async def until_fired(delays: Delays) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    delays.add(lambda: done.set_result(None))
    await done


async def test_fire_in_the_order_in_which_they_were_set_and_not_too_early() -> None:
    loop = asyncio.get_running_loop()
    delays, fired, began = Delays(0.02), [], loop.time()
    for name in "abc":
        delays.add(lambda name=name: fired.append((name, loop.time())))  # type: ignore[misc]
    await until_fired(delays)
    assert [name for name, _ in fired] == ["a", "b", "c"]
    assert all(at - began >= 0.02 for _, at in fired)
    assert not delays


async def test_what_was_taken_back_is_not_called_also_by_one_that_fires_at_the_same_time() -> None:
    delays, fired = Delays(0.01), []
    numbers: list[int] = []

    def take_back() -> None:
        for number in numbers:
            delays.remove(number)

    delays.add(take_back)
    numbers += [delays.add(lambda: fired.append("taken back")) for _ in range(3)]
    await until_fired(delays)
    assert fired == []
    delays.remove(numbers[0])  # fine twice


async def test_one_that_is_set_while_another_waits_has_the_whole_delay() -> None:
    loop = asyncio.get_running_loop()
    delays = Delays(0.03)
    first = asyncio.create_task(until_fired(delays))
    await asyncio.sleep(0.02)
    began = loop.time()
    await until_fired(delays)
    assert loop.time() - began >= 0.03
    assert first.done()


async def test_a_callback_that_fails_keeps_no_other_from_being_called() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    delays = Delays(0.01)

    def fail() -> None:
        raise RuntimeError("on purpose")

    delays.add(fail)
    await until_fired(delays)
    assert [str(each) for each in failures] == ["on purpose"]


async def test_has_one_timer_of_the_loop_for_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, made = asyncio.get_running_loop(), []
    real = loop.call_at

    def count(when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        made.append(when)
        return real(when, callback)

    monkeypatch.setattr(loop, "call_at", count)
    delays = Delays(60)
    for number in [delays.add(lambda: None) for _ in range(1000)]:
        delays.remove(number)
    assert len(made) == 1
