"""How many sandboxes of which kind are worth having ready: arithmetic over what was asked for and when. Pure.

A kind that was asked for twice within the last hour (the usual one: once) has at least `min` ready, and as many more
as were asked for within the last half minute or so. A kind that is not asked for any more fades, first to `min`, then
to none: a machine that is not used keeps nothing ready.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from k8e.engine import PLAIN, Limits, Runtime, SandboxSpec, Shape

HALF_LIFE: Final = 30.0  # a burst of forty is one of twenty after this many seconds
MEMORY: Final = 3600.0  # a kind that was not asked for since is forgotten; as long as a session lives unused
KINDS: Final = 8  # remembered at once: callers choose limits freely
FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 60.0


@dataclass(frozen=True, slots=True)
class Template:
    """A kind: what interchangeable sandboxes have in common. All limits are in it: inside gVisor programs see them as
    the machine's size, and `/run` and `/dev/shm` are sized by them, so they cannot be changed afterwards."""

    runtime: Runtime
    image: str = "host"
    limits: Limits = field(default_factory=Limits)
    shape: Shape = PLAIN  # without mounts: instead of those it has slots

    @property
    def spec(self) -> SandboxSpec:
        """With an empty list of hosts."""
        return SandboxSpec(self.runtime, self.image, self.limits, shape=self.shape)


@dataclass(slots=True)
class _Asked:
    at: float  # last
    recent: float = 0.0  # decays; as of then
    count: int = 0
    usual: bool = False

    def recent_at(self, now: float) -> float:
        return self.recent * math.exp2((self.at - now) / HALF_LIFE)


class Demand:
    """Times are of the monotonic clock."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._asked: dict[Template, _Asked] = {}  # the last one asked for comes last
        self._reserved: dict[str, tuple[Template, int]] = {}

    def keep(self, template: Template) -> None:
        """This kind has its minimum ready even if no caller asks for it."""
        self.reserve("", template, self._minimum)

    def reserve(self, name: str, template: Template, number: int) -> None:
        """That many of this kind are ready from now on, under that name; with 0 the reservation is forgotten."""
        self._reserved.pop(name, None)
        if number:
            self._reserved[name] = template, number

    @property
    def reserved(self) -> Mapping[str, tuple[Template, int]]:
        return self._reserved

    def note(self, template: Template, now: float, *, usual: bool) -> None:
        """A caller asked for one; `usual`: by asking for nothing special."""
        asked = self._asked.pop(template, None) or _Asked(now)
        asked.recent = asked.recent_at(now) + 1
        asked.count += 1
        asked.at = now
        asked.usual |= usual
        self._asked[template] = asked
        if len(self._asked) > KINDS:
            del self._asked[next(iter(self._asked))]

    def forget_images(self, left: Collection[str]) -> None:
        """No caller can ask any more for what is made of any other image."""
        for template in [each for each in self._asked if each.image not in left]:
            del self._asked[template]
        for name in [name for name, (template, _) in self._reserved.items() if template.image not in left]:
            del self._reserved[name]

    def resume(self, template: Template, now: float) -> None:
        """One was found ready that an earlier daemon saw a need for."""
        self.note(template, now, usual=True)

    def targets(self, now: float) -> Mapping[Template, int]:
        """How many to have ready, the kind last asked for first; not more than the maximum in all. Reservations are in
        it as far as the maximum goes."""
        for template in [each for each, asked in self._asked.items() if now - asked.at >= MEMORY]:
            del self._asked[template]
        wanted = {template: self._want(asked, now) for template, asked in reversed(self._asked.items())}
        # Reservations come before what is guessed from earlier requests.
        said: dict[Template, int] = {}
        left = self._maximum
        for template, number in self._reserved.values():
            said[template] = said.get(template, 0) + min(number, left)
            left -= min(number, left)
        for template, number in wanted.items():
            more = min(max(0, number - said.get(template, 0)), left)
            wanted[template] = said.pop(template, 0) + more
            left -= more
        return {**wanted, **said}

    def _want(self, asked: _Asked, now: float) -> int:
        if asked.count < 2 and not asked.usual:
            return 0  # it may never be asked for again
        return max(self._minimum, round(asked.recent_at(now)))


@dataclass(frozen=True, slots=True)
class _Failure:
    delay: float
    until: float
    cause: str


class Retries:
    """When a kind that could not be made is tried again: later and later. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._failures: dict[Template, _Failure] = {}

    def fail(self, kind: Template, cause: object, now: float) -> float:
        """Returns after how many seconds the kind may be tried again."""
        last = self._failures.get(kind)
        delay = min(last.delay * 2, LAST_RETRY) if last else FIRST_RETRY
        self._failures[kind] = _Failure(delay, now + delay, str(cause))
        return delay

    def forget(self, kind: Template) -> None:
        """It can be made, or a caller asks for it anew."""
        self._failures.pop(kind, None)

    def keep(self, kinds: Container[Template]) -> None:
        """Forgets all others."""
        self._failures = {kind: failure for kind, failure in self._failures.items() if kind in kinds}

    def may_try(self, kind: Template, now: float) -> bool:
        failure = self._failures.get(kind)
        return failure is None or failure.until <= now

    def cause(self, kind: Template) -> str:
        failure = self._failures.get(kind)
        return failure.cause if failure else ""
