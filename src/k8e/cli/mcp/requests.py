"""Requests of the daemon to the bridge of an AI agent: what only the user's own process in the project can know.

Each is answered as things stand at that moment: files may have changed since the last one.
"""

from __future__ import annotations

import json
from typing import Any

from k8e.cli.process import Failure
from k8e.errors import ExplainedError


def find_answer(line: bytes, *, permissive: bool) -> bytes:
    """Returns a line without its end. An error is an answer too."""
    request = json.loads(line)
    try:
        if request["ask"] == "credentials":
            said = answer_credentials(request["image"])
        elif request["ask"] == "cage":
            said = answer_policy(request, permissive=permissive)
        else:
            raise Failure("unknown_question", "the daemon asks what this program does not know", hint="update k8e")
    except ExplainedError as error:
        said = {"problem": error.body}
    except Exception as error:  # noqa: BLE001 - the daemon waits for an answer
        hint = "restart the bridge (`k8e sandbox-mcp`), and report this"
        said = {
            "problem": Failure("internal", "the bridge met an error of its own", detail=repr(error), hint=hint).body
        }
    return json.dumps({"id": request["id"], **said}).encode("ascii")


def answer_credentials(image: str) -> dict[str, Any]:
    """The user's credentials at the image's registry."""
    from k8e.cli.images.credentials import find_credentials
    from k8e.engine.reference import InvalidReference, parse_reference

    try:
        reference = parse_reference(image)
    except InvalidReference:
        return {}  # which the daemon explains
    found = find_credentials(reference.host, reference.path)
    return {"credentials": found} if found else {}


def answer_policy(request: dict[str, Any], *, permissive: bool) -> dict[str, Any]:
    """Decides the policy as for a command that the user types in this directory."""
    from k8e.cli.agentkernel.options import CommandOptions
    from k8e.cli.agentkernel.plan import describe_session, prepare
    from k8e.profiles.agent import decide_for_agent
    from k8e.profiles.options import SandboxOptions

    asked = SandboxOptions(**request["wishes"])

    def decide(_: object, *words: Any, **facts: Any) -> Any:
        return decide_for_agent(asked, *words, **facts, permissive=permissive)

    name, persistent = request["name"], request["persistent"]
    plan = prepare(CommandOptions(), request["command"], name=name, persistent=persistent, deciding=decide)
    said = {
        "request": describe_session(plan, plan.policy),
        "image_by": plan.policy.image_by,
        "needs": list(plan.policy.needs),
    }
    return said | {"left_out": list(plan.policy.env_left_out)}
