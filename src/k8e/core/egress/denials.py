"""Denials: network access that sandboxes tried and did not get. Each is told to every run that was under way.

The engine tells each refusal once. Here the recent ones of a session are kept, numbered, so that every run that was
under way hears of them: which command tried is not known, so of two at once both are told. Equal ones are one.

Names come from inside a sandbox. They are cut and made printable before they reach a terminal or a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Final
from weakref import WeakSet

from k8e.core.model import NONE_DENIED, Denial, Denials
from k8e.engine import Refusal
from k8e.policy import AddressKind, find_opening, kind_of

SHOWN: Final = 64  # in one result
KEPT: Final = 256  # of one session
_LONGEST_NAME: Final = 253
_LONGEST_WORD: Final = 64

Key = tuple[str, str, int, str]

# What no list opens, by the reason that the engine gives and by what kind of address it is.
_REASONS: Final = {
    "metadata": "No list opens metadata services of cloud providers.",
    "machine": "No list opens the machine itself.",
    "other_sandbox": "No list opens other sandboxes.",
    "protocol_not_allowed": "Only TCP leaves a sandbox; no list opens anything else.",
    "invalid_name": "It is no host name, and no list has it.",
    "too_many_connections": "It is on the list, and the sandbox has all the connections of its share. Close some.",
    "more_refusals": "More was refused than could be noted.",
}
_CLOSED: Final = {
    AddressKind.METADATA: "metadata services of cloud providers",
    AddressKind.LOOPBACK: "the machine itself",
    AddressKind.LINK_LOCAL: "link-local addresses",
    AddressKind.UNUSABLE: "addresses of no host",
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Mark:
    """Where a run began, and how many refusals since then are not kept any more."""

    since: int = 0  # the beginning
    lost: int = 0


class Notes:
    """The recent refusals of one session, oldest first. Pure."""

    def __init__(self) -> None:
        self._last = 0
        self._numbers: dict[Key, int] = {}  # in the order of the numbers
        self._refusals: dict[Key, Refusal] = {}
        self._marks: WeakSet[Mark] = WeakSet()  # as long as a run holds them

    def mark(self) -> Mark:
        """Everything noted from now on is after it."""
        mark = Mark(self._last)
        self._marks.add(mark)
        return mark

    def add(self, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            key = (refusal.host, refusal.address, refusal.port, refusal.reason)
            self._last += 1
            self._numbers.pop(key, None)
            self._numbers[key] = self._last
            self._refusals[key] = refusal
            if len(self._numbers) > KEPT:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._numbers))
        number = self._numbers.pop(key)
        del self._refusals[key]
        for mark in self._marks:
            mark.lost += number > mark.since

    def since(self, mark: Mark, session_id: str) -> Denials:
        """`session_id` is empty when there is no session whose list could be changed."""
        if mark.since == self._last and not mark.lost:
            return NONE_DENIED  # as for most runs
        found = [self._refusals[key] for key, number in self._numbers.items() if number > mark.since]
        return show(found, session_id, mark.lost)

    def recent(self, session_id: str) -> Denials:
        return show([self._refusals[key] for key in self._numbers], session_id)


def show(refusals: Sequence[Refusal], session_id: str, lost: int = 0) -> Denials:
    """The latest, if there are many."""
    kept = refusals[-SHOWN:]
    return Denials(
        tuple(
            Denial(
                each.host,
                each.address,
                each.port,
                each.reason,
                write_hint(each, session_id),
                each.at,
                find_opening(each.reason, each.host, each.address, each.port),
            )
            for each in kept
        ),
        len(refusals) - len(kept) + lost,
    )


def write_hint(refusal: Refusal, session_id: str = "") -> str:
    """How to get the access: for that session, or without one for a new session."""
    closed = _REASONS.get(refusal.reason) or _find_closed(refusal)
    if closed:
        return closed
    if refusal.reason == "address_not_public" and not refusal.address:
        return (
            "It stands for addresses that are not public. A private one can be reached when the list has the address "
            "itself; loopback, link-local and metadata addresses never."
        )
    entry = find_opening(refusal.reason, refusal.host, refusal.address, refusal.port)
    if not entry:
        return "Only TCP to hosts on the session's list leaves a sandbox."
    if session_id:
        return f"Ask for it: k8e sandbox allow-hosts {session_id} --add {entry}"
    return f"Ask for a session that may reach it: --allowed-hosts {entry} (this replaces the usual list)"


def _find_closed(refusal: Refusal) -> str:
    try:
        kind = kind_of(ip_address(refusal.address))
    except ValueError:
        return ""
    return f"No list opens {_CLOSED[kind]}." if kind in _CLOSED else ""


def clean(refusal: Refusal) -> Refusal:
    return replace(
        refusal,
        host=_make_printable(refusal.host, _LONGEST_NAME),
        address=_make_printable(refusal.address, _LONGEST_WORD),
        reason=_make_printable(refusal.reason, _LONGEST_WORD),
    )


def _make_printable(text: str, longest: int) -> str:
    return "".join(each if "!" <= each <= "~" else "?" for each in text[:longest])
