"""`agentkernel sandbox create|start|stop|remove|list`: sandboxes that last, by name. A name is a session's id."""

from __future__ import annotations

from k8e.cli.agentkernel.options import CommandOptions
from k8e.cli.agentkernel.output import say, show_table
from k8e.cli.agentkernel.plan import describe_session, prepare
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import Failure, ServiceError, print_json, write_all
from k8e.profiles.sandbox_policy import FRONT, check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from k8e.cli.agentkernel.plan import Plan
    from k8e.cli.agentkernel.ports import Port
    from k8e.profiles.sandbox_policy import SandboxPolicy


def create(parsed: argparse.Namespace) -> int:
    from k8e.cli.arguments import take_over

    options = take_over(parsed, CommandOptions())
    plan = prepare(options, name=parsed.name, persistent=True)
    if not plan.policy.name:
        raise Failure("usage", "a sandbox needs a name", hint="agentkernel sandbox create NAME, or `name` in [sandbox]")
    if options.dry_run:
        show_plan(plan.policy, as_json=options.json)
        return 0
    policy, answer = create_session(LocalClient(), plan)
    if options.json:
        print_json({"name": policy.name, **answer, "effective": policy.to_json()})
    else:
        say(f"{policy.name} runs on {answer['runtime']}, image {policy.image} ({policy.image_reason})")
        write_all(1, f"{policy.name}\n".encode())
    return 0


def create_session(client: LocalClient, plan: Plan) -> tuple[SandboxPolicy, dict[str, Any]]:
    """Returns the policy as it is in force (the image may be another one), and the service's answer."""
    policy = plan.policy
    if policy.env_left_out:
        say(f"no room for these variables: {', '.join(policy.env_left_out)}")
    try:
        try:
            return policy, client.create_session(describe_session(plan, policy)).parse()
        except ServiceError as error:
            from k8e.cli.agentkernel.images import is_about_image, obtain

            if not is_about_image(error):
                raise
            policy = obtain(client, policy, error)
        return policy, client.create_session(describe_session(plan, policy)).parse()
    except ServiceError as error:
        if error.code == "session_exists":
            use, end = f"agentkernel exec {policy.name} COMMAND", f"agentkernel sandbox remove {policy.name}"
            error.hint = f"choose another name, use it (`{use}`), or end it first (`{end}`)"
        raise


def show_plan(policy: SandboxPolicy, ports: Sequence[Port] = (), *, as_json: bool) -> None:
    if as_json:
        print_json(policy.to_json() | ({"ports": [port.describe() for port in ports]} if ports else {}))
        return
    lines = "".join(f"{'port:':<14}{port.place} leads to {port.inside}\n" for port in ports)
    write_all(1, (policy.describe() + lines).encode("utf-8", "backslashreplace"))


def start(parsed: argparse.Namespace) -> int:
    client, name = find(parsed.name)
    client.start_session(SessionName(name), {})
    return report(parsed, "runs")


def stop(parsed: argparse.Namespace) -> int:
    client, name = find(parsed.name)
    client.stop_session(SessionName(name))
    return report(parsed, "is stopped; its files are kept")


def remove(parsed: argparse.Namespace) -> int:
    client, name = find(parsed.name)
    client.destroy_session(SessionName(name))
    return report(parsed, "is gone")


def report(parsed: argparse.Namespace, done: str) -> int:
    if parsed.json:
        print_json({"ok": True, "name": parsed.name})
    else:
        say(f"{parsed.name} {done}")
    return 0


def find(name: str) -> tuple[LocalClient, str]:
    """Raises Failure unless the session was made by this command line: it does not touch others."""
    found = SessionName(check_name(name))
    client = LocalClient()
    try:
        session = client.get_session(found).parse()
        if session.get("labels", {}).get("front") == FRONT:
            return client, name
    except ServiceError as error:
        if error.code != "session_not_found":
            raise
    raise Failure("sandbox_not_found", f"there is no sandbox {name}", hint="agentkernel sandbox list")


def list_sandboxes(parsed: argparse.Namespace) -> int:
    ours = find_ours(LocalClient())
    if parsed.json:
        print_json({"sandboxes": [describe(each) for each in ours]})
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


def find_ours(client: LocalClient) -> list[dict[str, Any]]:
    """The sessions that this command line made, those of single commands among them."""
    return [
        each
        for each in client.list_sessions("all").parse()["sessions"]
        if each.get("labels", {}).get("front") == FRONT and each["phase"] not in ("destroying", "destroyed")
    ]


PHASES = {"active": "running", "creating": "starting"}


def describe(session: dict[str, Any]) -> dict[str, Any]:
    """A sandbox with the policy that is in force, as the service reports it."""
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
