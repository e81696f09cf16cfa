"""The list of checks: a decorator puts each one there under its own name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from k8e.conformance.subject import Subject

CheckFunction = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    run: CheckFunction
    needs: frozenset[str]  # of what `Subject.provides` may offer
    deadline: float  # seconds; far more than it takes, so that a hang is a failure with a name


CHECKS: list[Check] = []


def check(*, needs: str = "", deadline: float = 60.0) -> Callable[[CheckFunction], CheckFunction]:
    def register(function: CheckFunction) -> CheckFunction:
        name = getattr(function, "__name__", "").removeprefix("check_")
        if any(known.name == name for known in CHECKS):
            raise ValueError(f"two checks called {name}")
        CHECKS.append(Check(name, function, frozenset(needs.split()), deadline))
        return function

    return register


async def run_check(chosen: Check, subject: Subject) -> None:
    try:
        async with asyncio.timeout(chosen.deadline):
            await chosen.run(subject)
    except TimeoutError as exc:
        raise AssertionError(f"{chosen.name} did not finish within {chosen.deadline:.0f} s") from exc
