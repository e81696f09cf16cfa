"""From a plan to a session: made, fetching the image where it is missing, or on the machine's own tools."""

from __future__ import annotations

import json
import os

from k8e.cli.agentkernel.telling import say
from k8e.cli.client import JSON, quote
from k8e.cli.ending import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.agentkernel.cage import Plan
    from k8e.cli.client import AnyClient
    from k8e.profiles.effective import Cage


def open_session(client: AnyClient, plan: Plan) -> tuple[Cage, dict[str, Any]]:
    """The cage as it was made (the image may be another one), and the service's answer. Raises Failure."""
    cage = plan.cage
    if cage.env_left_out:
        say(f"no room for these variables: {', '.join(cage.env_left_out)}")
    answer = attempt(client, cage)
    if "session_id" not in answer and is_about_image(answer):
        cage = obtain(client, cage, answer)
        answer = attempt(client, cage)
    if "session_id" not in answer:
        raise Failure.of(answer)
    if plan.files:
        from k8e.cli.agentkernel.furnishing import furnish

        try:
            furnish(client, answer["session_id"], plan.files)
        except Failure:
            client.request("DELETE", f"/v1/sessions/{quote(answer['session_id'])}").read()
            raise
    return cage, answer


def attempt(client: AnyClient, cage: Cage) -> dict[str, Any]:
    response = client.request("POST", "/v1/sessions", json.dumps(cage.to_request()).encode(), JSON)
    answer: dict[str, Any] = json.loads(response.read())
    return answer


def is_about_image(problem: dict[str, Any]) -> bool:
    return str(problem.get("code", "")).startswith("image_") or str(problem.get("detail", "")).startswith("image ")


def obtain(client: AnyClient, cage: Cage, problem: dict[str, Any]) -> Cage:
    """The cage with which to try again, after its image could not be had: on the machine's own tools, where that is
    allowed and possible. Else the problem stands: Failure."""
    from k8e.profiles.fallback import fall_back

    found = fall_back(cage, problem.get("detail") or problem["error"], is_program)
    if found is None:
        raise Failure.of(problem)
    cage, line = found
    say(line)
    return cage


def is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
