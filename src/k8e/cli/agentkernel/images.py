"""From a plan to a session: made, fetching the image where it is missing, or on the machine's own tools."""

from __future__ import annotations

import json
import os

from k8e.cli.agentkernel.output import say
from k8e.cli.client.http import JSON
from k8e.cli.client.response import read_object
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.agentkernel.plan import Plan
    from k8e.cli.client.http import Client
    from k8e.cli.images import Meter
    from k8e.profiles.sandbox_policy import SandboxPolicy


MISSING = "image_not_found"
UNREACHABLE = "registry_unreachable"


def open_session(client: Client, plan: Plan) -> tuple[SandboxPolicy, dict[str, Any]]:
    """The cage as it was made (the image may be another one), and the service's answer. Raises Failure."""
    cage = plan.cage
    if cage.env_left_out:
        say(f"no room for these variables: {', '.join(cage.env_left_out)}")
    answer = attempt(client, plan, cage)
    if "session_id" not in answer and is_about_image(answer):
        cage = obtain(client, cage, answer)
        answer = attempt(client, plan, cage)
    if answer.get("code") == "session_exists":
        use, end = f"agentkernel exec {cage.name} COMMAND", f"agentkernel sandbox remove {cage.name}"
        answer["hint"] = f"choose another name, use it (`{use}`), or end it first (`{end}`)"
    if "session_id" not in answer:
        raise Failure.of(answer)
    return cage, answer


def attempt(client: Client, plan: Plan, cage: SandboxPolicy) -> dict[str, Any]:
    body = cage.to_request()
    if plan.files:
        from k8e.cli.agentkernel.project_files import describe_file

        body["files"] = [describe_file(file, content) for file, content in plan.files]
    response = client.request("POST", "/v1/sessions", json.dumps(body).encode(), JSON)
    return read_object(response)


def is_about_image(problem: dict[str, Any]) -> bool:
    return str(problem.get("code", "")).startswith("image_") or str(problem.get("detail", "")).startswith("image ")


def obtain(client: Client, cage: SandboxPolicy, problem: dict[str, Any]) -> SandboxPolicy:
    """The cage with which to try again, after its image was not there: fetched, or else on the machine's own tools,
    where that is allowed and possible. Else the problem stands: Failure."""
    from k8e.profiles.fallback import fall_back

    failure = Failure.of(problem)
    if problem["code"] == MISSING:
        try:
            fetch(client, cage)
        except Failure as error:
            failure = error
        else:
            return cage
    found = fall_back(cage, failure.body.get("detail") or failure.body["error"], is_program)
    if found is None:
        raise failure
    cage, line = found
    say(line)
    return cage


def fetch(client: Client, cage: SandboxPolicy) -> None:
    """The image, from its registry. One that nobody asked for is not tried again while its registry is out of reach."""
    from k8e.cli.agentkernel.outages import find_outage, note_outage
    from k8e.profiles.fallback import NOT_HERE

    if cage.detected and (cause := find_outage(cage.image)):
        raise Failure(UNREACHABLE, f"fetching {cage.image} failed a short while ago", detail=cause, hint=NOT_HERE)
    from k8e.cli.images import pull_image

    try:
        pull_image(client, cage.image, make_meter(cage.image))
    except Failure as failure:
        if failure.body["code"] == UNREACHABLE:
            note_outage(cage.image, failure.body.get("detail") or failure.body["error"])
        raise


def make_meter(image: str) -> Meter:
    from k8e.cli.images import Meter

    class Fetching(Meter):
        """Says nothing before there is something to fetch: where there is nothing, one line is said, and not here."""

        def show(self, progress: dict[str, Any]) -> None:
            if progress["total"]:
                super().show(progress)

    return Fetching(f"agentkernel: {image}")


def is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
