"""What every tool is: a call with a guest, its arguments and what it can say meanwhile, that gives one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.cages import Cages
from k8e.doors.mcp.execution import Report
from k8e.doors.mcp.guest import Guest
from k8e.doors.mcp.outputs import Kept


@dataclass(frozen=True, slots=True)
class Image:
    data: bytes
    kind: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One JSON object, and what is shown beside it."""

    body: Json
    image: Image | None = None
    links: Mapping[str, Kept] = field(default_factory=dict)  # resources with all of an output


@dataclass(frozen=True, slots=True)
class Talk:
    """What a call comes with: how sessions are made for it, and what can be said to the client while it lasts; None: it
    does not want to hear it."""

    cages: Cages
    report: Report | None = None
    ask: Callable[[str, str], Awaitable[bool | None]] | None = None  # a person, who may leave it open; with its id
    heard: tuple[str, bool | None] | None = None  # the id of a question that this same call asked before, its answer


Tool = Callable[[Guest, Fields, Talk], Awaitable[Answer]]
