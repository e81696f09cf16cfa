"""From the arguments of a tool call to the session that it gets. Profiles and modes (k8e.profiles) decide; where the
client has a bridge, the bridge decides by the same rules, because it may read the project's configuration (bridge.py).

A missing image is pulled, with progress notifications. An image that was detected and not asked for is replaced by the
machine's own tools where it cannot be pulled.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from k8e.core.errors import Fault, Kind, correct
from k8e.core.model import SessionSpec
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.http.requests import read_credentials, read_session_spec
from k8e.doors.mcp.bridge import Bridge
from k8e.doors.mcp.clients import McpClient
from k8e.doors.mcp.tools.progress import SendProgress, notify
from k8e.engine.images import Credentials, Progress
from k8e.profiles.agent import decide_for_agent
from k8e.profiles.errors import ProfileError
from k8e.profiles.fallback import NOT_HERE, can_replace, describe_fallback
from k8e.profiles.options import Context, SandboxOptions
from k8e.profiles.protection import KEPT, REPOSITORY, find_new
from k8e.profiles.sandbox_policy import DETECTED, HOST_IMAGE, SandboxPolicy

if TYPE_CHECKING:
    from k8e.doors.mcp.toolsets import Toolset

OUTAGE: Final = 600.0  # seconds for which a registry that did not answer is not asked for detected images
INTERVAL: Final = 0.5  # between two notifications about an image that is pulled
# The parameter that an error of the profiles is about.
_FIELDS: Final = {
    "unknown_profile": "profile",
    "unknown_mode": "compatibility_mode",
    "no_project": "compatibility_mode",
    "project_refused": "compatibility_mode",
    "no_home": "profile",
    "permissive_refused": "profile",
    "invalid_name": "name",
    "network_contradiction": "network",
}

_INVALID: Final = ("unknown_profile", "unknown_mode", "invalid_name")  # invalid_argument at every door
_REFUSED: Final = ("permissive_refused", "widening_refused", "beyond_configuration")


@dataclass(frozen=True, slots=True)
class ClientFolders:
    """Where the bridge was started, as it says itself. The engine opens these folders with the rights of the user whom
    the kernel reported, so that a false name gains nothing."""

    cwd: str = ""  # empty: the client has no folder on this machine
    home: str = ""

    def look(self) -> Context:
        return Context(self.cwd, self.home, self.find_protected())

    def find_protected(self) -> frozenset[str]:
        """Looks again at every call: such a name may be new."""
        return frozenset(
            name for name in (*KEPT, *REPOSITORY) if self.cwd and os.path.lexists(os.path.join(self.cwd, name))
        )


NO_FOLDERS: Final = ClientFolders()


@dataclass(frozen=True, slots=True)
class Decision:
    """The part of a policy that is needed to make its session."""

    request: Json  # the body of POST /v1/sessions
    image_by: str
    needs: tuple[str, ...]  # commands that the image must have
    left_out: tuple[str, ...] = ()  # variables that exceed the room for them

    @classmethod
    def of(cls, policy: SandboxPolicy) -> Decision:
        return cls(policy.to_request(), policy.image_by, policy.needs, policy.env_left_out)

    @property
    def image(self) -> str:
        return str(self.request["image"])

    @property
    def detected(self) -> bool:
        return self.image_by in DETECTED

    def on_host(self) -> Decision:
        labels = {**self.request.get("labels", {}), "image_by": "fallback"}
        return replace(self, request={**self.request, "image": HOST_IMAGE, "labels": labels}, image_by="fallback")


@dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """A session to be made, and the notes that its answer carries."""

    spec: SessionSpec
    asked_image: bool
    notes: tuple[str, ...] = ()


class SpecResolver:
    """Resolves the calls of one client with one toolset."""

    def __init__(self, toolset: Toolset, folders: ClientFolders, bridge: Bridge | None = None) -> None:
        self._toolset = toolset
        self._folders = folders
        self._bridge = bridge
        self._outages: dict[str, tuple[float, Fault]] = {}

    async def resolve(
        self,
        client: McpClient,
        fields: Fields,
        send_progress: SendProgress | None,
        command: Sequence[str] = (),
        *,
        name: str = "",
        persistent: bool = False,
    ) -> ResolvedSpec:
        """Takes `profile`, `compatibility_mode`, `network` and `image`."""
        options = SandboxOptions(
            profile=fields.take_text("profile") or None,
            mode=fields.take_text("compatibility_mode") or None,
            network=fields.take_flag("network") if "network" in fields else None,
            image=fields.take_text("image") or (None if self._toolset.detects_image else HOST_IMAGE),
        )
        fields.finish()
        decision = await self._decide(options, command, name, persistent=persistent)
        decision, notes = await self._obtain_image(client, decision, send_progress)
        if decision.left_out:
            notes = (*notes, f"no room for these variables: {', '.join(decision.left_out)}")
        # In a thread, because it may read files.
        spec = await asyncio.to_thread(read_session_spec, Fields(decision.request), client.service.default_limits)
        return ResolvedSpec(spec, decision.image_by == "asked" and decision.image != HOST_IMAGE, notes)

    async def _decide(
        self, options: SandboxOptions, command: Sequence[str], name: str, *, persistent: bool
    ) -> Decision:
        if self._bridge is not None and self._toolset.detects_image:
            asked = {each: getattr(options, each) for each in options.said}
            words = {"wishes": asked, "command": list(command), "name": name, "persistent": persistent}
            return _read_decision(_read_reply(await self._bridge.ask("cage", **words)))
        try:
            context = await asyncio.to_thread(self._folders.look)
            policy = decide_for_agent(options, context, command, name=name, persistent=persistent)
        except ProfileError as problem:
            raise _explain(problem) from problem
        decision = Decision.of(policy)
        if not self._toolset.detects_image and options.mode is None and policy.hosts.everywhere:
            del decision.request["allowed_hosts"]  # k8e's own default: the usual list
        return decision

    async def review(self, resolved: ResolvedSpec) -> tuple[str, ...]:
        """The notes, once the command has ended."""
        if not resolved.spec.shape.mounts:
            return resolved.notes
        kept = [name for mount in resolved.spec.shape.mounts for name in mount.kept]
        new = find_new(kept, await asyncio.to_thread(self._folders.find_protected))
        found = (f"{name} is new in the project and may run on the machine: look at it first" for name in new)
        return (*resolved.notes, *found)

    async def _obtain_image(
        self, client: McpClient, decision: Decision, send_progress: SendProgress | None
    ) -> tuple[Decision, tuple[str, ...]]:
        if decision.image == HOST_IMAGE:
            return decision, ()
        try:
            if not await client.service.images.list(client.caller, decision.image):
                await self._pull(client, decision, send_progress)
        except Fault as fault:
            fault.field = "image"
            if not decision.detected or not can_replace(decision.image, decision.needs, _is_program):
                raise
            return decision.on_host(), (describe_fallback(decision.image, fault.detail or fault.error),)
        return decision, ()

    async def _pull(self, client: McpClient, decision: Decision, send_progress: SendProgress | None) -> None:
        image = decision.image
        registry = image.partition("/")[0] if "/" in image else ""
        since, before = self._outages.get(registry, (0.0, None))
        if before is not None and decision.detected and time.monotonic() - since < OUTAGE:
            # The earlier fault may name another image.
            error = f"fetching {image} failed a short while ago"
            raise Fault(before.kind, before.code, error, detail=before.detail or before.error, hint=NOT_HERE)
        credentials = await self._find_credentials(image)
        steps = itertools.count(1)
        try:
            async with notify(send_progress, INTERVAL) as notifier:

                def report(progress: Progress) -> None:
                    size = f" {progress.done} of {progress.total} bytes" if progress.total else ""
                    notifier.note(lambda: (next(steps), f"{image}: {progress.step}{size}"))

                await client.service.images.pull(client.caller, image, credentials, report)
        except Fault as fault:
            if fault.code == "registry_unreachable":
                self._outages[registry] = (time.monotonic(), fault)
            raise

    async def _find_credentials(self, image: str) -> Credentials | None:
        """The user's own, which only the bridge may read. The daemon does not keep them."""
        if self._bridge is None:
            return None
        reply = _read_reply(await self._bridge.ask("credentials", image=image))
        return read_credentials(reply.take_fields("credentials")) if "credentials" in reply else None


def _read_reply(reply: Json) -> Fields:
    """Raises Fault where the bridge answers with an error."""
    fields = Fields(reply)
    if "problem" not in fields:
        return fields
    problem = fields.take_fields("problem")
    code, error, detail, hint = (problem.take_text(name) for name in ("code", "error", "detail", "hint"))
    raise _explain(ProfileError(code, error, detail=detail, hint=hint))


def _read_decision(fields: Fields) -> Decision:
    request = fields.take_object("request")
    if not isinstance(request.get("image"), str) or not isinstance(request.get("labels", {}), dict):
        hint = "restart the bridge (`k8e sandbox-mcp`): it is of another version than the daemon"
        raise Fault(Kind.INVALID, "invalid_json", "the agent's bridge answers what is no answer", hint=hint)
    image_by = fields.take_text("image_by")
    needs, left_out = (tuple(fields.take_texts(name) or ()) for name in ("needs", "left_out"))
    return Decision(request, image_by, needs, left_out)


def _explain(problem: ProfileError) -> Fault:
    field = _FIELDS.get(problem.code, "")
    code = "invalid_argument" if problem.code in _INVALID else problem.code
    kind = Kind.DENIED if problem.code in _REFUSED else Kind.INVALID
    return Fault(kind, code, problem.error, detail=problem.detail, hint=problem.hint or correct(field), field=field)


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
