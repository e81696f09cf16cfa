"""Which part of a long list of the same kind (deaths at every step, conformance checks on a second engine of the same
kernel, programs on parked interpreters) a run takes, and which numbers its chance begins with.

A list is cut into as many parts as there are days in a round; a run takes the part of its day, so that two runs of one
day agree and a round has everything. `K8E_SHARE=3/4` chooses another cut and part, `1/1` takes everything. What is new
or changed is taken on every day (changes.py). `K8E_SEED` chooses the numbers. Both are printed at the head of a run and
set by the first process of it, for those that it starts."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

ROUND = 6  # days


@dataclass(frozen=True, slots=True)
class Share:
    part: int  # from 0 on
    parts: int

    @classmethod
    def parse(cls, text: str) -> Share:
        match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"K8E_SHARE is {text!r}; it is a part and how many there are, such as 3/4")
        return cls(int(match[1]) - 1, int(match[2]))

    @classmethod
    def of_day(cls, day: int) -> Share:
        return cls(day % ROUND, ROUND)

    def __str__(self) -> str:
        return f"{self.part + 1}/{self.parts}"

    def has(self, number: int, *, times: int = 1, turn: int = 0) -> bool:
        """Whether it has what stands at this place of a list. `times` as much of it as others have, for what is cheap
        or matters most; `turn` parts later, so that two lists of the same things have different ones on one day."""
        width = max(1, times * self.parts // ROUND) if times > 1 else 1
        return (number - self.part - turn) % self.parts < width


def settle(environment: MutableMapping[str, str]) -> None:
    """Chooses what was not chosen."""
    environment.setdefault("K8E_SHARE", "1/1" if environment.get("K8E_SOAK") else str(Share.of_day(today())))
    environment.setdefault("K8E_SEED", str(random.SystemRandom().randrange(1 << 32)))


def today() -> int:
    return int(time.time() // 86400)


def current_share() -> Share:
    return Share.parse(os.environ["K8E_SHARE"])


def choose(
    items: Sequence[T], *, times: int = 1, turn: int = 0, always: Callable[[T], bool] = lambda _: False
) -> list[T]:
    """The part of this run, and what is always taken."""
    share = current_share()
    return [item for number, item in enumerate(items) if share.has(number, times=times, turn=turn) or always(item)]


def seed(name: str) -> int:
    """For one place that plays with chance: other numbers than the next place has, the same ones for one K8E_SEED."""
    return random.Random(f"{os.environ['K8E_SEED']} {name}").randrange(1 << 32)
