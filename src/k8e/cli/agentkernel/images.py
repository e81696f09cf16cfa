"""The image of a new sandbox: pulled if the machine lacks it, else replaced by the machine's own tools.

To find out that a registry is out of reach takes seconds, which every run on a machine without a way to it would pay
again. So the user's state directory keeps a note of it, which counts for ten minutes; images that the user names are
tried nevertheless.
"""

from __future__ import annotations

import os
import time

from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.plan import state_folder
from k8e.cli.images.commands import Meter, pull_image
from k8e.cli.process import Failure
from k8e.profiles.fallback import NOT_HERE, fall_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.client import LocalClient
    from k8e.cli.process import ServiceError
    from k8e.profiles.sandbox_policy import SandboxPolicy

MISSING = "image_not_found"
UNREACHABLE = "registry_unreachable"
NOTE_SECONDS = 600.0
NOTE_SIZE = 300


def is_about_image(error: ServiceError) -> bool:
    return error.code.startswith("image_") or error.detail.startswith("image ")


def obtain(client: LocalClient, policy: SandboxPolicy, error: Failure) -> SandboxPolicy:
    """The policy with which to try again after its image was missing: unchanged if the image could be pulled, else on
    the machine's own tools where that is allowed and possible. Raises Failure if neither helps."""
    if error.code == MISSING:
        try:
            pull(client, policy)
        except Failure as failure:
            error = failure
        else:
            return policy
    found = fall_back(policy, error.detail or error.error, is_program)
    if found is None:
        raise error
    policy, line = found
    say(line)
    return policy


def pull(client: LocalClient, policy: SandboxPolicy) -> None:
    if policy.detected and (cause := find_outage(policy.image)):
        raise Failure(UNREACHABLE, f"fetching {policy.image} failed a short while ago", detail=cause, hint=NOT_HERE)
    try:
        pull_image(client, policy.image, PullMeter(f"agentkernel: {policy.image}"))
    except Failure as failure:
        if failure.code == UNREACHABLE:
            note_outage(policy.image, failure.detail or failure.error)
        raise


class PullMeter(Meter):
    """Shows nothing before there are bytes to pull: if there are none, another line says so."""

    def show(self, progress: dict[str, Any]) -> None:
        if progress["total"]:
            super().show(progress)


def is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def find_outage(image: str) -> str:
    """Why its registry could not be reached a short while ago; empty if there is no such note."""
    path = name_note(image)
    try:
        age = time.time() - os.stat(path).st_mtime
        if not 0 <= age < NOTE_SECONDS:
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(NOTE_SIZE)
    except OSError:
        return ""


def note_outage(image: str, cause: str) -> None:
    path = name_note(image)
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(cause[:NOTE_SIZE])
    except OSError:
        pass  # then the next command finds out for itself


def name_note(image: str) -> str:
    first, slash, _ = image.partition("/")
    registry = first if slash and ("." in first or ":" in first) else "docker.io"
    plain = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in registry)
    return os.path.join(state_folder(), f"unreachable-{plain[:100]}")
