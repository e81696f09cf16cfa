"""`agentkernel ps`: the sandboxes that run now, those of `agentkernel run` among them, and the commands in them."""

from __future__ import annotations

import time

from k8e.cli.agentkernel.output import show_table
from k8e.cli.agentkernel.sandbox import describe, find_ours
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import ServiceError, print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any


def main(parsed: argparse.Namespace) -> int:
    client = LocalClient()
    running = [each for each in find_ours(client) if each["phase"] == "active"]
    found = [
        describe(each) | {"commands": commands} for each in running if (commands := look(client, each)) is not None
    ]
    if parsed.json:
        print_json({"sandboxes": found})
        return 0
    rows = [
        (each["name"], each["image"], each["runtime"], describe_age(time.time() - each["created"]), list_names(each))
        for each in found
    ]
    show_table(("NAME", "IMAGE", "RUNTIME", "AGE", "COMMANDS"), rows)
    return 0


def look(client: LocalClient, session: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The commands that run in it; None when it has ended meanwhile."""
    owner = "gateway" if session["owner"] < 0 else str(session["owner"])
    name = SessionName(session["session_id"], session["tenant_id"], owner)
    try:
        processes = client.list_processes(name).parse()["processes"]
    except ServiceError:
        return None
    return [
        {"pid": each["pid"], "command": each["command"], "started": each["started"]}
        for each in processes
        if each["running"]
    ]


def list_names(sandbox: dict[str, Any]) -> str:
    return ", ".join(each["command"] for each in sandbox["commands"]) or "-"


def describe_age(seconds: float) -> str:
    for size, letter in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds / size)}{letter}"
    return f"{max(int(seconds), 0)}s"
