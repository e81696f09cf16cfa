"""From what an agent asks for to the session that it gets: profiles and modes (k8e.profiles) decide, here is what they
decide about. Where there is a project with files of its own, the agent's bridge decides by the same rules, because it
may read them (bridge.py).

A missing image is fetched, and told about while it comes; one that nobody asked for is replaced by this machine's own
tools where it cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import SessionSpec
from k8e.doors.http.answers import Json
from k8e.doors.http.fields import Fields
from k8e.doors.http.requests import read_credentials, read_session_spec
from k8e.doors.mcp.bridge import Bridge
from k8e.doors.mcp.execution import Report
from k8e.doors.mcp.fronts import Front, Surroundings
from k8e.doors.mcp.guest import Guest
from k8e.engine.images import Credentials, Progress
from k8e.profiles.agent import decide_for_agent
from k8e.profiles.errors import ProfileError
from k8e.profiles.fallback import NOT_HERE, can_replace, describe_fallback
from k8e.profiles.options import SandboxOptions
from k8e.profiles.protection import find_new
from k8e.profiles.sandbox_policy import DETECTED, HOST_IMAGE, SandboxPolicy

OUTAGE: Final = 600.0  # for which a registry out of reach is not asked again for what nobody asked for
PAUSE: Final = 0.5  # between two words about an image that comes
# Which parameter a problem is about.
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

_MISTAKES: Final = ("unknown_profile", "unknown_mode", "invalid_name")  # as every door calls them
_REFUSED: Final = ("permissive_refused", "widening_refused", "beyond_configuration")


@dataclass(frozen=True, slots=True)
class Decision:
    """A cage, as far as it matters from here on."""

    request: Json  # as POST /v1/sessions takes it
    image_by: str
    needs: tuple[str, ...]  # commands that the image must have
    left_out: tuple[str, ...] = ()  # variables for which there was no room

    @classmethod
    def of(cls, cage: SandboxPolicy) -> Decision:
        return cls(cage.to_request(), cage.image_by, cage.needs, cage.env_left_out)

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
class Made:
    """What a session is to be, and what has to be said about it."""

    spec: SessionSpec
    asked_image: bool
    notes: tuple[str, ...] = ()


class Cages:
    """For one front, in one place."""

    def __init__(self, front: Front, surroundings: Surroundings, bridge: Bridge | None = None) -> None:
        self._front = front
        self._surroundings = surroundings
        self._bridge = bridge
        self._outages: dict[str, tuple[float, Fault]] = {}

    async def choose(
        self,
        guest: Guest,
        fields: Fields,
        report: Report | None,
        command: Sequence[str] = (),
        *,
        name: str = "",
        persistent: bool = False,
    ) -> Made:
        """Takes `profile`, `compatibility_mode`, `network` and `image`."""
        wishes = SandboxOptions(
            profile=fields.take_text("profile") or None,
            mode=fields.take_text("compatibility_mode") or None,
            network=fields.take_flag("network") if "network" in fields else None,
            image=fields.take_text("image") or (None if self._front.detects else HOST_IMAGE),
        )
        fields.finish()
        decision = await self._decide(wishes, command, name, persistent=persistent)
        decision, notes = await self._obtain(guest, decision, report)
        if decision.left_out:
            notes = (*notes, f"no room for these variables: {', '.join(decision.left_out)}")
        # In a thread, because it may bring files along.
        spec = await asyncio.to_thread(read_session_spec, Fields(decision.request), guest.service.default_limits)
        return Made(spec, decision.image_by == "asked" and decision.image != HOST_IMAGE, notes)

    async def _decide(self, wishes: SandboxOptions, command: Sequence[str], name: str, *, persistent: bool) -> Decision:
        if self._bridge is not None and self._front.detects:
            asked = {each: getattr(wishes, each) for each in wishes.said}
            words = {"wishes": asked, "command": list(command), "name": name, "persistent": persistent}
            return _read_decision(_hear(await self._bridge.ask("cage", **words)))
        try:
            scene = await asyncio.to_thread(self._surroundings.look)
            cage = decide_for_agent(wishes, scene, command, name=name, persistent=persistent)
        except ProfileError as problem:
            raise _explain(problem) from problem
        decision = Decision.of(cage)
        if not self._front.detects and wishes.mode is None and cage.hosts.everywhere:
            del decision.request["allowed_hosts"]  # k8e's own default: the usual list
        return decision

    async def review(self, made: Made) -> tuple[str, ...]:
        """What is to be said when its command has ended."""
        if not made.spec.shape.mounts:
            return made.notes
        kept = [name for mount in made.spec.shape.mounts for name in mount.kept]
        new = find_new(kept, await asyncio.to_thread(self._surroundings.find_protected))
        told = (f"{name} is new in the project and may run on the machine: look at it first" for name in new)
        return (*made.notes, *told)

    async def _obtain(
        self, guest: Guest, decision: Decision, report: Report | None
    ) -> tuple[Decision, tuple[str, ...]]:
        if decision.image == HOST_IMAGE:
            return decision, ()
        try:
            if not await guest.service.images.list(guest.caller, decision.image):
                await self._pull(guest, decision, report)
        except Fault as fault:
            fault.field = "image"
            if not decision.detected or not can_replace(decision.image, decision.needs, _is_program):
                raise
            return decision.on_host(), (describe_fallback(decision.image, fault.detail or fault.error),)
        return decision, ()

    async def _pull(self, guest: Guest, decision: Decision, report: Report | None) -> None:
        image = decision.image
        registry = image.partition("/")[0] if "/" in image else ""
        since, before = self._outages.get(registry, (0.0, None))
        if before is not None and decision.detected and time.monotonic() - since < OUTAGE:
            # In the words of this call: the image that failed then may have been another one.
            error = f"fetching {image} failed a short while ago"
            raise Fault(before.kind, before.code, error, detail=before.detail or before.error, hint=NOT_HERE)
        credentials = await self._find_credentials(image)
        telling = Telling(image, report)
        try:
            await guest.service.images.pull(guest.caller, image, credentials, telling.note)
        except Fault as fault:
            if fault.code == "registry_unreachable":
                self._outages[registry] = (time.monotonic(), fault)
            raise
        finally:
            await telling.close()

    async def _find_credentials(self, image: str) -> Credentials | None:
        """The user's own, where there is somebody who may read them. Nobody keeps them."""
        if self._bridge is None:
            return None
        said = _hear(await self._bridge.ask("credentials", image=image))
        return read_credentials(said.take_fields("credentials")) if "credentials" in said else None


class Telling:
    """How far an image is, in an agent's progress notifications. These count upwards, whatever the step."""

    def __init__(self, image: str, report: Report | None) -> None:
        self._image = image
        self._report = report
        self._latest: Progress | None = None
        self._news = asyncio.Event()
        self._count = 0.0
        self._telling = asyncio.create_task(self._tell(report)) if report else None

    def note(self, progress: Progress) -> None:
        self._latest = progress
        self._news.set()

    async def _tell(self, report: Report) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._latest is not None:
                self._count += 1
                size = f" {self._latest.done} of {self._latest.total} bytes" if self._latest.total else ""
                await report(self._count, f"{self._image}: {self._latest.step}{size}")
            await asyncio.sleep(PAUSE)

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._telling


def _hear(said: Json) -> Fields:
    """What a bridge answers; what it found wrong is raised."""
    fields = Fields(said)
    if "problem" not in fields:
        return fields
    problem = fields.take_fields("problem")
    code, error, detail, hint = (problem.take_text(name) for name in ("code", "error", "detail", "hint"))
    raise _explain(ProfileError(code, error, detail=detail, hint=hint))


def _read_decision(fields: Fields) -> Decision:
    request = fields.take_object("request")
    if not isinstance(request.get("image"), str) or not isinstance(request.get("labels", {}), dict):
        raise Fault(Kind.INVALID, "invalid_json", "the agent's bridge answers what is no answer")
    image_by = fields.take_text("image_by")
    needs, left_out = (tuple(fields.take_texts(name) or ()) for name in ("needs", "left_out"))
    return Decision(request, image_by, needs, left_out)


def _explain(problem: ProfileError) -> Fault:
    field = _FIELDS.get(problem.code, "")
    code = "invalid_argument" if problem.code in _MISTAKES else problem.code
    kind = Kind.DENIED if problem.code in _REFUSED else Kind.INVALID
    return Fault(kind, code, problem.error, detail=problem.detail, hint=problem.hint, field=field)


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
