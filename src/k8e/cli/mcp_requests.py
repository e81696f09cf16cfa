"""What the daemon asks the bridge of an agent: things that only the user's own process in the project's folder can say.

Each question is answered as things stand at that moment: files may have changed since the last one.
"""

from __future__ import annotations

import json
from typing import Any

from k8e.cli.process import Failure


def find_answer(line: bytes, *, permissive: bool) -> bytes:
    """Without a line's end. What goes wrong is an answer too."""
    question = json.loads(line)
    try:
        if question["ask"] == "credentials":
            said = answer_credentials(question["image"])
        elif question["ask"] == "cage":
            said = answer_cage(question, permissive=permissive)
        else:
            raise Failure("unknown_question", "the daemon asks what this program does not know", hint="update k8e")
    except Failure as failure:
        said = {"problem": failure.body}
    except Exception as error:  # noqa: BLE001 - whoever asked must hear of it
        said = {"problem": Failure("internal", "the bridge met an error of its own", detail=repr(error)).body}
    return json.dumps({"id": question["id"], **said}).encode("ascii")


def answer_credentials(image: str) -> dict[str, Any]:
    """Who the user is at the image's registry."""
    from k8e.cli.credentials import find_credentials
    from k8e.engine.reference import InvalidReference, parse_reference

    try:
        reference = parse_reference(image)
    except InvalidReference:
        return {}  # which the daemon explains
    found = find_credentials(reference.host, reference.path)
    return {"credentials": found} if found else {}


def answer_cage(question: dict[str, Any], *, permissive: bool) -> dict[str, Any]:
    """Decided here, as for a command that the user types in this folder."""
    from k8e.cli.agentkernel.options import CageOptions
    from k8e.cli.agentkernel.plan import prepare
    from k8e.cli.agentkernel.project_files import describe_file
    from k8e.profiles.agent import decide_for_agent
    from k8e.profiles.options import SandboxOptions

    asked = SandboxOptions(**question["wishes"])

    def decide(_: object, *words: Any, **facts: Any) -> Any:
        return decide_for_agent(asked, *words, **facts, permissive=permissive)

    name, persistent = question["name"], question["persistent"]
    plan = prepare(CageOptions(), question["command"], name=name, persistent=persistent, deciding=decide)
    request = plan.cage.to_request()
    if plan.files:
        request["files"] = [describe_file(file, content) for file, content in plan.files]
    said = {"request": request, "image_by": plan.cage.image_by, "needs": list(plan.cage.needs)}
    return said | {"left_out": list(plan.cage.env_left_out)}
