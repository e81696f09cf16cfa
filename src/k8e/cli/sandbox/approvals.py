"""`k8e sandbox confirm`, `approve` and `approvals`: a program asks for an approval, a person answers elsewhere.

The action comes from a program, perhaps one that wants to be misunderstood. It is shown without anything that a
terminal acts on, though the service has seen to that already: the gateway may be another party's.
"""

from __future__ import annotations

import os
import time

from k8e.cli.client import LocalClient, open_client, run_dir
from k8e.cli.portable import find_user
from k8e.cli.process import FAILED, UNREACHABLE, Failure, read_some, write_all
from k8e.cli.sandbox.sessions import name_session
from k8e.cli.view import show, show_value
from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.cli.client.service import Service

WAIT = 30.0
LEEWAY = 5.0  # for a service that is restarted in the last moment
PAUSE = 0.2


def confirm(options: argparse.Namespace) -> int:
    client = open_client()
    seconds: float | None = options.timeout
    if seconds is None and not options.no_wait:
        seconds = WAIT
    approval = client.request_approval(name_session(options), options.action, seconds).parse()
    write_all(2, describe(approval, client).encode())
    if options.no_wait:
        show_value(approval)
        return 0
    approval = await_answer(client, approval, seconds or WAIT)
    show_value(approval)
    return 0 if approval["approved"] else FAILED


def await_answer(client: Service, approval: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The approval outlives the service: if the service goes away, it is asked again."""
    end = time.monotonic() + seconds
    while approval["status"] == "pending":
        rest = end - time.monotonic()
        try:
            approval = client.get_approval(approval["approval_id"], max(rest, 0)).parse()
        except Failure as failure:
            if failure.status != UNREACHABLE or rest < -LEEWAY:
                raise
            time.sleep(PAUSE)
            client = reopen(client)
        else:
            if approval["status"] == "pending":
                if rest < -LEEWAY:
                    break
                time.sleep(PAUSE)
    return approval


def reopen(client: Service) -> Service:
    try:
        return open_client()
    except Failure:
        return client  # whose next request fails, until it is time to give up


def approve(options: argparse.Namespace) -> int:
    client = open_as_person() if options.key else open_client()
    if not options.reject and (options.key or not client.place):
        approval = client.check_approval(options.approval_id).parse()  # before the person types anything
        if approval["status"] == "pending" and (options.key or approval["asked_by"] == f"uid:{find_user()}"):
            ask_at_terminal(approval)
    return show(client.answer_approval(options.approval_id, options.reason, approved=not options.reject))


def open_as_person() -> Service:
    """Reads a key from the terminal, which is stored nowhere: what lies in this user's files is the agent's to use,
    too."""
    key = read_secret("API key: ")
    endpoint = os.environ.get("K8E_SANDBOX_ENDPOINT", "")
    if not endpoint:
        endpoint = LocalClient().status().parse()["gateway"]["endpoint"] or ""
        if not endpoint:
            hint = "[gateway] in k8e.toml turns it on; `k8e sandbox status` says why it is off"
            raise Failure("gateway_closed", "a key is for the gateway, and this machine has none open", hint=hint)
    from k8e.cli.remote.client import RemoteClient
    from k8e.cli.remote.connection import log_in, read_endpoint, read_key
    from k8e.cli.remote.discovery import of

    return RemoteClient(of(log_in(read_endpoint(endpoint), read_key(key))))


def list_approvals(options: argparse.Namespace) -> int:
    client = open_client()
    if options.approval_id:
        return show(client.get_approval(options.approval_id))
    return show(client.list_approvals("all" if options.all else "pending"), "approvals")


def open_own_terminal() -> int:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        others = "" if find_user() == 0 else "as root (sudo), or "
        raise Failure(
            "terminal_needed",
            "only a person at a terminal can answer this",
            detail=str(error),
            hint=f"run it in a terminal of your own, {others}with a person's key (--key)",
        ) from error


def ask_at_terminal(approval: dict[str, Any]) -> None:
    """A process of the same user asked: the person has to read the action, and to type that they mean it."""
    import termios

    terminal = open_own_terminal()
    try:
        text = f"Session {clean(approval['session_id'])} wants to:\n\n  {clean(approval['action'])}\n\n"
        write_all(terminal, text.encode())
        termios.tcflush(terminal, termios.TCIFLUSH)  # what was typed before this was read is no answer to it
        write_all(terminal, b"Type yes to approve it: ")
        answer = read_some(terminal)
    finally:
        os.close(terminal)
    if answer.strip().lower() != b"yes":
        hint = "type yes to approve; --reject rejects"
        raise Failure("not_confirmed", "nothing was answered", hint=hint)


def read_secret(prompt: str) -> str:
    """Reads a line from the terminal without echo."""
    import termios

    terminal = open_own_terminal()
    try:
        before = termios.tcgetattr(terminal)
        hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        try:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, hidden)
            write_all(terminal, prompt.encode())
            return read_some(terminal).decode("utf-8", "replace").strip()
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
            write_all(terminal, b"\n")
    finally:
        os.close(terminal)


def describe(approval: dict[str, Any], client: Service) -> str:
    command = name_command(approval, client)
    seconds = round(approval["expires_at"] - approval["asked_at"])
    return (
        f"Session {clean(approval['session_id'])} wants to:\n\n  {clean(approval['action'])}\n\n"
        f"A person has to approve it within {seconds} s, in another terminal:\n\n  {command}\n\n"
        f"or to reject it:\n\n  {command} --reject\n"
    )


def name_command(approval: dict[str, Any], client: Service) -> str:
    """A command line that the person can paste. A user cannot answer its own programs: root answers for users, and a
    person with a key answers for root."""
    import shlex

    words = ["sandbox", "approve", approval["approval_id"]]
    if client.endpoint:
        return shlex.join(["k8e", "--endpoint", client.endpoint, *words])
    run = [f"K8E_RUN_DIR={shlex.quote(run_dir())}"] if os.environ.get("K8E_RUN_DIR") else []
    if find_user() == 0:
        return " ".join([*run, "k8e", "sandbox", "approve", "--key", words[-1]])
    return " ".join(["sudo", *run, find_program(), *words])


def find_program() -> str:
    """The path of `k8e` as sudo finds it, which looks in root's directories only."""
    import shlex
    import shutil

    path = shutil.which("k8e") or "k8e"
    return "k8e" if os.path.dirname(path) in ("", "/usr/local/bin", "/usr/bin", "/bin") else shlex.quote(path)
