"""`k8e sandbox destroy`: one session, or all that are the caller's."""

from __future__ import annotations

import os

from k8e.cli.client import SessionName, open_client
from k8e.cli.portable import find_user
from k8e.cli.process import Failure, ServiceError, read_some, write_all
from k8e.cli.sandbox.sessions import name_session
from k8e.cli.view import show, show_value
from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.cli.client.service import Service

GATEWAY = -1  # the owner of what API keys made
SHOWN = 20  # names in the question
GONE = ("session_not_found", "session_destroying", "session_destroyed")  # a child ends with its parent


def destroy(options: argparse.Namespace) -> int:
    if bool(options.sid) == options.all:
        hint = "k8e sandbox destroy SID; `k8e sandbox sessions` lists them"
        raise Failure("usage", "name one session, or give --all", hint=hint)
    if options.sid:
        return show(open_client().destroy_session(name_session(options)))
    client = open_client()
    sessions = list_own(client, options)
    if sessions and not options.yes:
        ask(sessions)
    ended, failed = [], []
    for session in sessions:
        try:
            client.destroy_session(name(session))
        except ServiceError as error:
            if error.code not in GONE:
                failed.append({"session_id": session["session_id"], **error.body})
                continue
        ended.append(session["session_id"])
    if failed:
        raise Failure(
            "sessions_left",
            f"{len(failed)} sessions could not be destroyed",
            detail=failed[0]["error"],
            hint=failed[0]["hint"] or "try again",
            more={"ok": False, "destroyed": ended, "failed": failed},
        )
    show_value({"ok": True, "destroyed": ended})
    return 0


def list_own(client: Service, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Root sees the sessions of all users, and those of the gateway: all of root's own are meant, unless others are
    named. Sessions that come later are not among them."""
    owner = options.owner
    if not owner and not options.tenant_id and not client.place:
        owner = str(find_user())
    found: list[dict[str, Any]] = client.list_sessions("active", options.tenant_id, owner).parse()["sessions"]
    return found


def name(session: dict[str, Any]) -> SessionName:
    owner = session["owner"]
    return SessionName(session["session_id"], session["tenant_id"], "gateway" if owner == GATEWAY else str(owner))


def ask(sessions: list[dict[str, Any]]) -> None:
    if not os.isatty(0):
        hint = "--yes destroys them without asking; `k8e sandbox sessions` lists them"
        error = f"{len(sessions)} sessions would be destroyed, and there is no terminal to ask at"
        raise Failure("not_confirmed", error, hint=hint)
    lines = [
        f"  {clean(one['session_id'])}{' (persistent)' if one['persistent'] else ''}\n" for one in sessions[:SHOWN]
    ]
    if len(sessions) > SHOWN:
        lines.append(f"  and {len(sessions) - SHOWN} more\n")
    text = f"{''.join(lines)}Destroy these {len(sessions)} sessions with everything in them? Type yes: "
    write_all(2, text.encode("utf-8", "backslashreplace"))
    if read_some(0).strip().lower() != b"yes":
        raise Failure("not_confirmed", "nothing was destroyed", hint="type yes to destroy them; --yes does not ask")
