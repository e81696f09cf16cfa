"""Checks that every place for variables of persistent sessions passes: each gets a function that opens it anew. The
sessions s1 and s2 are on record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from k8e.core.store.environments import Environments

Open = Callable[[], Awaitable[Environments]]
Check = Callable[[Open], Awaitable[None]]

ENV: Final = ((b"A", b"1"), (b"B", b"x=y\n\xff"), (b"EMPTY", b""))


async def check_next_life(open_place: Open) -> None:
    place = await open_place()
    assert await place.recall("s1") == ()
    await place.keep("s1", ENV)
    await place.keep("s2", ENV[:1])
    place = await open_place()
    assert await place.recall("s1") == ENV
    assert await place.recall("s2") == ENV[:1]


async def check_later_ones_replace(open_place: Open) -> None:
    place = await open_place()
    await place.keep("s1", ENV)
    await place.keep("s1", ((b"C", b"3"),))
    assert await place.recall("s1") == ((b"C", b"3"),)
    assert await (await open_place()).recall("s1") == ((b"C", b"3"),)


async def check_forgotten(open_place: Open) -> None:
    place = await open_place()
    await place.keep("s1", ENV)
    await place.keep("s2", ENV)
    await place.forget("s1")
    await place.forget("s1")
    assert await place.recall("s1") == ()
    assert await (await open_place()).recall("s2") == ENV
    await place.keep("s1", ENV[:1])
    assert await place.recall("s1") == ENV[:1]


async def check_largest(open_place: Open) -> None:
    place = await open_place()
    large = tuple((b"N%d" % number, b"x" * 500) for number in range(64))  # 32 KiB
    await place.keep("s1", large)
    assert await (await open_place()).recall("s1") == large


async def check_those_of_sessions_stay(open_place: Open) -> None:
    place = await open_place()
    await place.keep("s1", ENV)
    place = await open_place()
    await place.forget_others({"s1", "s2"})
    assert await place.recall("s1") == ENV
    assert not place.damages.take()


CHECKS: Final[list[Check]] = [
    check_next_life,
    check_later_ones_replace,
    check_forgotten,
    check_largest,
    check_those_of_sessions_stay,
]
