"""One control, and the two exceptions of its check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from k8e.engine.local.doctor.subject import Subject
from k8e.link.model import Identity

ROOT = Identity(0, 0)
SEARCH_DEADLINE = 8.0
_UNEXPECTED = "do not use this runtime; this is a fault of ours or of the runtime: please report it with this output"


class Broken(Exception):
    """The control does not hold; says what was seen."""


class Untested(Exception):
    """The control does not apply; says why."""


@dataclass(frozen=True, slots=True)
class Control:
    name: str
    tried: str  # how
    check: Callable[[Subject], Awaitable[str]]
    hint: str = _UNEXPECTED  # what to do when it is broken
