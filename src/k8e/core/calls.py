"""The calls of the contract: core counts the faults that they end with, and logs what a caller may not have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller
from k8e.core.parts import Parts

_STRANGE: Final = ("session_not_found", "run_not_found", "approval_not_found")  # it may be another caller's


class Noun(Protocol):
    """A class that implements a protocol of the contract."""

    @property
    def _parts(self) -> Parts: ...


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Noun)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def call(name: str) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Marks a method that doors call, caller first, with the name that the audit log has for it."""

    def mark(method: Method[S, P, T]) -> Method[S, P, T]:
        @functools.wraps(method)
        async def answer(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await method(self, *args, **kwargs)
            except Fault as fault:
                _note(self._parts, name, args, fault)
                raise

        return answer

    return mark


def _note(parts: Parts, name: str, arguments: tuple[object, ...], fault: Fault) -> None:
    """A caller sees no difference between what they may not have and what is not there. A reader of the audit log sees
    every try of either."""
    parts.metrics.failures.add(fault.code)
    if fault.kind in (Kind.DENIED, Kind.UNAUTHENTICATED) or fault.code in _STRANGE:
        caller, named = arguments[0], arguments[1] if len(arguments) > 1 else ""
        label = caller.label if isinstance(caller, Caller) else ""
        subject = named if isinstance(named, str) else getattr(named, "session_id", "")
        parts.audit.note("access_refused", caller=label, call=name, subject=subject[:100], code=fault.code)
