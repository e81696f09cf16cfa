"""Every command but `run`: one request each, and its answer printed as it came."""

from __future__ import annotations

import argparse
import json
import os

from k8e.cli.client.http import BYTES, JSON, aim, open_client, quote
from k8e.cli.client.response import Response, read_object
from k8e.cli.process import FAILED, UNREACHABLE, Failure, read_all, write_all
from k8e.cli.run import MESSAGE, check_object, describe_env
from k8e.cli.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.remote.replies import Reply


def describe_session(*, manifest: str = "", git_repo: str = "", git_ref: str = "") -> dict[str, Any]:
    """What goes into a session from its beginning."""
    if git_ref and not git_repo:
        raise Failure("usage", "--git-ref is given without --git-repo")
    wanted: dict[str, Any] = {}
    if manifest:
        try:
            with open(manifest, encoding="utf-8") as file:
                wanted["manifest"] = file.read(MESSAGE)
                if file.read(1):
                    raise Failure("message_too_large", f"{manifest} has more than {MESSAGE} bytes")
        except (OSError, UnicodeDecodeError) as error:
            hint = "--manifest takes a YAML file"
            raise Failure("manifest_unreadable", "the manifest cannot be read", detail=str(error), hint=hint) from error
    if git_repo:
        wanted["git_repo"] = git_repo
    if git_ref:
        wanted["git_ref"] = git_ref
    return wanted


def split_hosts(values: list[str]) -> list[str]:
    """a,b and repeated flags; an empty word is no host, so that '' is nothing at all."""
    return [host.strip() for value in values for host in value.split(",") if host.strip()]


def finish(response: Response | Reply) -> int:
    write_all(1, check_object(response.read()))
    return 0 if response.status < 300 else FAILED


def create(options: argparse.Namespace) -> int:
    wanted = describe_session(manifest=options.manifest, git_repo=options.git_repo, git_ref=options.git_ref)
    wanted.update(describe_wishes(options))
    own = {
        "tenant_id": options.tenant,
        "secrets": read_secrets(options.secret),
        "persistent": options.persistent,
    }
    wanted.update({name: value for name, value in own.items() if value})
    return finish(open_client().request("POST", "/v1/sessions", json.dumps(wanted).encode(), JSON))


def describe_wishes(options: argparse.Namespace) -> dict[str, Any]:
    """What a session and a sub-agent's can both be asked to have."""
    limits = {name: getattr(options, name) for name in ("cpus", "memory", "disk")}
    given = {
        "session_id": options.session_id,
        "runtime": options.runtime,
        "image": options.image,
        "env": json.loads(f"{{{describe_env(options.env)}}}"),
        "limits": {name: value for name, value in limits.items() if value is not None},
    }
    wanted = {name: value for name, value in given.items() if value}
    if options.ttl is not None:
        wanted["ttl"] = options.ttl
    if options.allowed_hosts:
        wanted["allowed_hosts"] = split_hosts(options.allowed_hosts)
    return wanted


def subagent(options: argparse.Namespace) -> int:
    wanted = describe_wishes(options)
    if options.secret:  # no variable of a child is ever kept on a disk
        wanted["env"] = {**wanted.get("env", {}), **read_secrets(options.secret)}
    for name in ("agent_type", "workspace_path", "read_only", "powerless"):
        if value := getattr(options, name):
            wanted[name] = value
    target = aim(f"/v1/sessions/{quote(options.parent)}/subagents", options)
    return finish(open_client().request("POST", target, json.dumps(wanted).encode(), JSON))


def read_secrets(names: list[str]) -> dict[str, str]:
    """From our own environment: what stands on a command line can be seen by others."""
    for name in names:
        if "=" in name:  # which is not repeated: the rest of it may be a secret
            raise Failure("usage", "--secret takes a NAME alone", hint="the value is that of our own variable NAME")
        if name not in os.environ:
            hint = f"export {name}, or put it before the command; the value does not stand on the command line"
            raise Failure("secret_not_set", f"--secret {name}: there is no variable of that name here", hint=hint)
    return {name: os.environ[name] for name in names}


def stop(options: argparse.Namespace) -> int:
    return finish(open_client().request("POST", aim(f"/v1/sessions/{quote(options.sid)}/stop", options), b"{}", JSON))


def start(options: argparse.Namespace) -> int:
    given = {"env": json.loads(f"{{{describe_env(options.env)}}}"), "secrets": read_secrets(options.secret)}
    body = json.dumps({name: value for name, value in given.items() if value}).encode()
    return finish(open_client().request("POST", aim(f"/v1/sessions/{quote(options.sid)}/start", options), body, JSON))


def get(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", aim(f"/v1/sessions/{quote(options.sid)}", options)))


def allow_hosts(options: argparse.Namespace) -> int:
    """Prints the list that is in force, after changing it if that was asked for."""
    target = aim(f"/v1/sessions/{quote(options.sid)}/hosts", options)
    change: dict[str, Any] = {
        name: split_hosts(values)
        for name in ("add", "remove", "hosts")
        if (values := getattr(options, name)) is not None
    }
    if options.clear:
        change["clear"] = True
    if not change:
        return finish(open_client().request("GET", target))
    if len(change) > 1 and set(change) != {"add", "remove"}:
        raise Failure("usage", "--hosts and --clear stand alone; only --add and --remove can be given together")
    return finish(open_client().request("POST", target, json.dumps(change).encode(), JSON))


def sessions(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", aim(f"/v1/sessions?phase={options.phase}", options)))


def destroy(options: argparse.Namespace) -> int:
    return finish(open_client().request("DELETE", aim(f"/v1/sessions/{quote(options.sid)}", options)))


def write(options: argparse.Namespace) -> int:
    content = read_all(0, MESSAGE)
    target = f"/v1/sessions/{quote(options.sid)}/files?path={quote(options.path)}&mode={options.mode}"
    return finish(open_client().request("PUT", aim(target, options), content, BYTES))


def read(options: argparse.Namespace) -> int:
    target = f"/v1/sessions/{quote(options.sid)}/files?path={quote(options.path)}"
    response = open_client().request("GET", aim(target, options), accept=BYTES if options.raw else JSON)
    if not options.raw or response.status >= 300:
        return finish(response)
    write_all(1, response.read())
    return 0


def list_files(options: argparse.Namespace) -> int:
    target = f"/v1/sessions/{quote(options.sid)}/entries?path={quote(options.path)}&since={options.since!r}"
    return finish(open_client().request("GET", aim(target, options)))


def status(options: argparse.Namespace) -> int:
    """What a script asks before anything else: the keys are there whatever is wrong."""
    answer: dict[str, Any] = {"available": False, "session_id": None, "tenant_id": State(options.tenant).tenant}
    try:
        client = open_client()
        answer["session_id"] = State(options.tenant, client.place).read() or None
        service = read_object(client.request("GET", "/v1/status"))
    except Failure as failure:
        print_json(answer | failure.body)
        return failure.status
    if "available" not in service:
        print_json(answer | service)
        return FAILED
    found = client.request("GET", f"/v1/sessions/{quote(answer['session_id'])}") if answer["session_id"] else None
    session = read_object(found) if found else {}
    if session.get("phase") != "active":
        answer["session_id"] = None
    print_json(answer | service)
    return 0 if service["available"] else UNREACHABLE


def poll(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", f"/v1/runs/{quote(options.run_id)}"))


def kill(options: argparse.Namespace) -> int:
    return finish(open_client().request("POST", f"/v1/runs/{quote(options.run_id)}/kill", b"{}", JSON))


def ps(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", aim(f"/v1/sessions/{quote(options.sid)}/processes", options)))


def log(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", aim(f"/v1/sessions/{quote(options.sid)}/runs", options)))


def print_json(value: object) -> None:
    from k8e.profiles.text import to_json

    write_all(1, to_json(value))


def create_key(options: argparse.Namespace) -> int:
    wanted: dict[str, Any] = {"name": options.name, "scope": options.scope}
    if options.ttl is not None:
        wanted["ttl"] = options.ttl
    wanted["for_ever"] = options.ttl is None
    if options.tenant:
        wanted["tenant_ids"] = options.tenant
    return finish(open_client().request("POST", "/v1/keys", json.dumps(wanted).encode(), JSON))


def list_keys(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", "/v1/keys"))


def delete_key(options: argparse.Namespace) -> int:
    return finish(open_client().request("DELETE", f"/v1/keys/{quote(options.name)}"))
