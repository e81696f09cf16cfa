"""From what an agent asks for to the session that it gets: profiles and modes (k8e.profiles) decide, here is what they
decide about. A missing image is fetched, and told about while it comes; one that nobody asked for is replaced by this
machine's own tools where it cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from k8e.core.errors import Fault, Kind
from k8e.core.model import SessionSpec
from k8e.doors.mcp.execution import Report
from k8e.doors.mcp.fronts import Front, Surroundings
from k8e.doors.mcp.guest import Guest
from k8e.doors.specs import Fields, read_session_spec
from k8e.engine.images import Progress
from k8e.profiles.effective import HOST_IMAGE, Cage
from k8e.profiles.fallback import NOT_HERE, fall_back
from k8e.profiles.problem import Problem
from k8e.profiles.profile import PERMISSIVE
from k8e.profiles.protection import find_new
from k8e.profiles.trust import decide
from k8e.profiles.wishes import Wishes

OUTAGE: Final = 600.0  # for which a registry out of reach is not asked again for what nobody asked for
PAUSE: Final = 0.5  # between two words about an image that comes
# Which parameter a problem is about.
_FIELDS: Final = {
    "unknown_profile": "profile",
    "unknown_mode": "compatibility_mode",
    "no_project": "compatibility_mode",
    "project_refused": "compatibility_mode",
    "no_home": "profile",
    "invalid_name": "name",
    "network_contradiction": "network",
}

_MISTAKES: Final = ("unknown_profile", "unknown_mode", "invalid_name")  # as every door calls them


@dataclass(frozen=True, slots=True)
class Made:
    """What a session is to be, and what has to be said about it."""

    spec: SessionSpec
    asked_image: bool
    notes: tuple[str, ...] = ()


class Cages:
    """For one front, in one place."""

    def __init__(self, front: Front, surroundings: Surroundings) -> None:
        self._front = front
        self._surroundings = surroundings
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
        wishes = Wishes(
            profile=fields.take_text("profile") or None,
            mode=fields.take_text("compatibility_mode") or None,
            network=fields.take_flag("network") if "network" in fields else None,
            image=fields.take_text("image") or (None if self._front.detects else HOST_IMAGE),
        )
        fields.finish()
        try:
            scene = await asyncio.to_thread(self._surroundings.look)
            cage = decide(wishes, scene, command, name=name, persistent=persistent)
        except Problem as problem:
            raise _explain(problem) from problem
        self._refuse_permissive(cage)
        cage, notes = await self._obtain(guest, cage, report)
        request = cage.to_request()
        if not self._front.detects and wishes.mode is None and cage.hosts.everywhere:
            del request["allowed_hosts"]  # k8e's own default: the usual list
        spec = read_session_spec(Fields(request), guest.service.default_limits)
        return Made(spec, cage.image_by == "asked" and cage.image != HOST_IMAGE, notes)

    async def review(self, made: Made) -> tuple[str, ...]:
        """What is to be said when its command has ended."""
        if not made.spec.shape.mounts:
            return made.notes
        kept = [name for mount in made.spec.shape.mounts for name in mount.kept]
        new = find_new(kept, await asyncio.to_thread(self._surroundings.find_protected))
        told = (f"{name} is new in the project and may run on the machine: look at it first" for name in new)
        return (*made.notes, *told)

    def _refuse_permissive(self, cage: Cage) -> None:
        if cage.profile != PERMISSIVE.name or self._surroundings.allow_permissive:
            return
        raise Fault(
            Kind.DENIED,
            "permissive_refused",
            "the profile permissive is not for agents to choose",
            detail="it mounts the project and the home, and passes variables on",
            hint="moderate; or a person starts this server with --allow-permissive.",
            field="profile",
        )

    async def _obtain(self, guest: Guest, cage: Cage, report: Report | None) -> tuple[Cage, tuple[str, ...]]:
        if cage.image == HOST_IMAGE:
            return cage, ()
        try:
            if not await guest.service.images(guest.caller, cage.image):
                await self._pull(guest, cage, report)
        except Fault as fault:
            fault.field = "image"
            found = fall_back(cage, fault.detail or fault.error, _is_program)
            if found is None:
                raise
            return found[0], (found[1],)
        return cage, ()

    async def _pull(self, guest: Guest, cage: Cage, report: Report | None) -> None:
        """Without credentials: those are a person's, who pulls what needs them (`k8e image pull`)."""
        registry = cage.image.partition("/")[0] if "/" in cage.image else ""
        since, before = self._outages.get(registry, (0.0, None))
        if before is not None and cage.detected and time.monotonic() - since < OUTAGE:
            # In the words of this call: the image that failed then may have been another one.
            error = f"fetching {cage.image} failed a short while ago"
            raise Fault(before.kind, before.code, error, detail=before.detail or before.error, hint=NOT_HERE)
        telling = Telling(cage.image, report)
        try:
            await guest.service.pull_image(guest.caller, cage.image, None, telling.note)
        except Fault as fault:
            if fault.code == "registry_unreachable":
                self._outages[registry] = (time.monotonic(), fault)
            raise
        finally:
            await telling.close()


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


def _explain(problem: Problem) -> Fault:
    field = _FIELDS.get(problem.code, "")
    code = "invalid_argument" if problem.code in _MISTAKES else problem.code
    return Fault(Kind.INVALID, code, problem.error, detail=problem.detail, hint=problem.hint, field=field)


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
