"""`agentkernel sandbox create|start|stop|remove|list`: sandboxes that last, by name. A name is a session's id."""

from __future__ import annotations

from k8e.cli.agentkernel.options import add_options, read_parsed
from k8e.cli.agentkernel.output import say, show_json, show_table
from k8e.cli.agentkernel.parsing import make_parser
from k8e.cli.agentkernel.plan import prepare
from k8e.cli.client.http import JSON, Client, quote
from k8e.cli.client.response import read_object
from k8e.cli.process import Failure, write_all
from k8e.profiles.sandbox_policy import FRONT, check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

ABOUT = """\
Sandboxes that last: their files stay when they are stopped, and when the machine is.

  agentkernel sandbox create my-sandbox
  agentkernel sandbox start my-sandbox
  agentkernel exec my-sandbox npm test
  agentkernel sandbox stop my-sandbox
  agentkernel sandbox remove my-sandbox
"""


def main(arguments: list[str]) -> int:
    parser = make_parser("sandbox", ABOUT)
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    making = subcommands.add_parser("create", help="make a sandbox and start it")
    making.add_argument("name", nargs="?", default="", metavar="NAME", help="default: the name in agentkernel.toml")
    add_options(making)
    making.set_defaults(handler=create)
    for word, about, handler in (
        ("start", "start a sandbox that was stopped, on its own files", start),
        ("stop", "end everything in it, and keep its files", stop),
        ("remove", "end it, with all its files", remove),
    ):
        added = subcommands.add_parser(word, help=about)
        added.add_argument("name", metavar="NAME")
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(handler=handler)
    listing = subcommands.add_parser("list", help="list your sandboxes")
    listing.add_argument("--json", action="store_true", help="print JSON, with the policy that is in force")
    listing.set_defaults(handler=list_sandboxes)
    parsed = parser.parse_args(arguments)
    handled: int = parsed.handler(parsed)
    return handled


def create(parsed: argparse.Namespace) -> int:
    options = read_parsed(parsed)
    plan = prepare(options, name=parsed.name, persistent=True)
    if not plan.cage.name:
        raise Failure("usage", "a sandbox needs a name", hint="agentkernel sandbox create NAME, or `name` in [sandbox]")
    if options.dry_run:
        show_plan(plan.cage, as_json=options.json)
        return 0
    from k8e.cli.agentkernel.images import open_session

    cage, answer = open_session(Client(), plan)
    if options.json:
        show_json({"name": cage.name, **answer, "effective": cage.to_json()})
    else:
        say(f"{cage.name} runs on {answer['runtime']}, image {cage.image} ({cage.image_reason})")
        write_all(1, f"{cage.name}\n".encode())
    return 0


def show_plan(cage: Any, *, as_json: bool) -> None:
    if as_json:
        show_json(cage.to_json())
    else:
        write_all(1, cage.describe().encode("utf-8", "backslashreplace"))


def start(parsed: argparse.Namespace) -> int:
    return change(parsed, "POST", "/start", "runs")


def stop(parsed: argparse.Namespace) -> int:
    return change(parsed, "POST", "/stop", "is stopped; its files are kept")


def remove(parsed: argparse.Namespace) -> int:
    return change(parsed, "DELETE", "", "is gone")


def change(parsed: argparse.Namespace, method: str, path: str, done: str) -> int:
    name = read_name(parsed.name)
    client = Client()
    find(client, name)
    body = (b"{}", JSON) if method == "POST" else (b"", "")
    ask(client, method, f"/v1/sessions/{quote(name)}{path}", *body)
    if parsed.json:
        show_json({"ok": True, "name": name})
    else:
        say(f"{name} {done}")
    return 0


def read_name(text: str) -> str:
    return check_name(text)


def find(client: Any, name: str) -> dict[str, Any]:
    """One of ours: other sessions are not touched by this front door."""
    response = client.request("GET", f"/v1/sessions/{quote(name)}")
    answer = read_object(response)
    if response.status == 200 and answer.get("labels", {}).get("front") == FRONT:
        return answer
    if response.status not in (200, 404):
        raise Failure.of(answer)
    raise Failure("sandbox_not_found", f"there is no sandbox {name}", hint="agentkernel sandbox list")


def ask(client: Any, method: str, target: str, body: bytes = b"", content_type: str = "") -> dict[str, Any]:
    response = client.request(method, target, body, content_type)
    answer = read_object(response)
    if response.status >= 300:
        raise Failure.of(answer)
    return answer


def list_sandboxes(parsed: argparse.Namespace) -> int:
    listed = ask(Client(), "GET", "/v1/sessions?phase=all")["sessions"]
    ours = [
        each
        for each in listed
        if each.get("labels", {}).get("front") == FRONT and each["phase"] not in ("destroying", "destroyed")
    ]
    if parsed.json:
        show_json({"sandboxes": [describe(each) for each in ours]})
        return 0
    rows = [
        (
            each["session_id"],
            PHASES.get(each["phase"], each["phase"]),
            each["image"],
            each["labels"].get("profile", ""),
            each["labels"].get("mode", ""),
            each["runtime"],
        )
        for each in ours
    ]
    show_table(("NAME", "STATE", "IMAGE", "PROFILE", "MODE", "RUNTIME"), rows)
    return 0


PHASES = {"active": "running", "creating": "starting"}


def describe(session: dict[str, Any]) -> dict[str, Any]:
    """With the policy that is in force, as the service has it."""
    labels = session["labels"]
    return {
        "name": session["session_id"],
        "state": PHASES.get(session["phase"], session["phase"]),
        "image": session["image"],
        "profile": labels.get("profile", ""),
        "mode": labels.get("mode", ""),
        "persistent": session.get("persistent", False),
        "runtime": session["runtime"],
        "created": session["created"],
        "policy": {
            "mounts": [],
            "read_only": False,
            "powerless": False,
            **session["policy"],
            "limits": session["limits"],
            "env_keys": session["env_keys"],
        },
    }
