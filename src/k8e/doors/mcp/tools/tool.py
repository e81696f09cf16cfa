"""The contract of a tool: a call with its client, arguments and context, which gives one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.resources import OutputResource
from k8e.doors.mcp.tools.progress import SendProgress
from k8e.doors.mcp.tools.session_specs import SpecResolver


@dataclass(frozen=True, slots=True)
class ImageContent:
    data: bytes
    mime_type: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """One JSON object, with images and links to resources beside it."""

    body: Json
    images: tuple[ImageContent, ...] = ()
    links: Mapping[str, OutputResource] = field(default_factory=dict)  # by URI


@dataclass(frozen=True, slots=True)
class CallContext:
    """The parts of one call besides its arguments."""

    specs: SpecResolver
    send_progress: SendProgress | None = None  # None: the client asked for none
    # Elicitation: asks the person at the client, by the approval's id. None, here or as its result: no answer.
    ask: Callable[[str, str], Awaitable[bool | None]] | None = None
    answered: tuple[str, bool | None] | None = None  # the approval that an earlier try of this call asked for


Tool = Callable[[McpClient, Fields, CallContext], Awaitable[ToolAnswer]]
