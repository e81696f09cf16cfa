"""When a kind of sandbox that could not be made is tried again: later and later, until it can be made. Pure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from k8e.core.pool.demand import Template

FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    delay: float
    until: float
    cause: str


class Retries:
    """Times are of the monotonic clock."""

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
