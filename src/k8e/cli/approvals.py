"""`k8e sandbox confirm`, `approve` and `approvals`: a program asks, a person answers, elsewhere.

What is to be approved comes from a program, perhaps one that wants to be misunderstood. It is shown without anything
that a terminal acts on, though the service has seen to that already: the gateway may be somebody else's.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from k8e.cli.client.http import JSON, Client, aim, open_client, quieten_grpc, quote, run_dir
from k8e.cli.client.response import read_object
from k8e.cli.process import FAILED, UNREACHABLE, Failure, read_some, write_all
from k8e.cli.sessions import finish, print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.client.http import AnyClient

WAIT = 30.0
LEEWAY = 5.0  # for a service that is started anew in the last moment
PAUSE = 0.2


def confirm(options: argparse.Namespace) -> int:
    client = open_client()
    seconds: float | None = options.timeout
    if seconds is None and not options.no_wait:
        seconds = WAIT
    wanted: dict[str, Any] = {"action": read_argument(options.action)}
    if seconds is not None:
        wanted["timeout"] = seconds
    target = aim(f"/v1/sessions/{quote(options.sid)}/approvals", options)
    response = client.request("POST", target, json.dumps(wanted).encode(), JSON)
    if response.status >= 300:
        return finish(response)
    approval = read_object(response)
    write_all(2, describe(approval, client).encode())
    if options.no_wait:
        print_json(approval)
        return 0
    approval = await_answer(client, approval, seconds or WAIT)
    print_json(approval)
    return 0 if approval["approved"] else FAILED


def await_answer(client: AnyClient, approval: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The question outlives the service: one that went away is asked again."""
    end = time.monotonic() + seconds
    while approval["status"] == "pending":
        rest = end - time.monotonic()
        try:
            response = client.request("GET", f"/v1/approvals/{approval['approval_id']}?wait={max(rest, 0):.3f}")
            answer = read_object(response)
            if response.status >= 300:
                raise Failure.of(answer)
            approval = answer
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


def reopen(client: AnyClient) -> AnyClient:
    try:
        return open_client()
    except Failure:
        return client  # whose next request fails, until it is time to give up


def approve(options: argparse.Namespace) -> int:
    client = open_as_person() if options.key else open_client()
    target = f"/v1/approvals/{quote(options.approval_id)}"
    if not options.reject and (options.key or not client.place):
        response = client.request("GET", target)
        if response.status >= 300:
            return finish(response)
        approval = read_object(response)
        if approval["status"] == "pending" and (options.key or approval["asked_by"] == f"uid:{os.geteuid()}"):
            ask_at_terminal(approval)
    wanted = {"approved": not options.reject, "reason": read_argument(options.reason)}
    return finish(client.request("POST", target, json.dumps(wanted).encode(), JSON))


def open_as_person() -> AnyClient:
    """With a key that is typed, and kept nowhere: what lies in this user's files is the agent's to use, too."""
    key = read_secret("API key: ")
    endpoint = os.environ.get("K8E_SANDBOX_ENDPOINT", "")
    if not endpoint:
        endpoint = read_object(Client().request("GET", "/v1/status"))["gateway"]["endpoint"] or ""
        if not endpoint:
            hint = "[gateway] in k8e.toml turns it on; `k8e sandbox status` says why it is off"
            raise Failure("gateway_closed", "a key is for the gateway, and this machine has none open", hint=hint)
    quieten_grpc()
    from k8e.cli.remote.client import RemoteClient
    from k8e.cli.remote.connection import log_in, read_endpoint, read_key
    from k8e.cli.remote.discovery import of

    return RemoteClient(of(log_in(read_endpoint(endpoint), read_key(key))))


def approvals(options: argparse.Namespace) -> int:
    client = open_client()
    if options.approval_id:
        return finish(client.request("GET", f"/v1/approvals/{quote(options.approval_id)}"))
    return finish(client.request("GET", f"/v1/approvals?status={'all' if options.all else 'pending'}"))


def open_own_terminal() -> int:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        others = "" if os.geteuid() == 0 else "as root (sudo), or "
        raise Failure(
            "terminal_needed",
            "only a person at a terminal can answer this",
            detail=str(error),
            hint=f"run it in a terminal of your own, {others}with a person's key (--key)",
        ) from error


def ask_at_terminal(approval: dict[str, Any]) -> None:
    """A process of the same user asked: the person has to read the question, and to type that they mean it."""
    import termios

    terminal = open_own_terminal()
    try:
        text = f"Session {show(approval['session_id'])} wants to:\n\n  {show(approval['action'])}\n\n"
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
    """A line from the terminal, which does not show it."""
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


def describe(approval: dict[str, Any], client: AnyClient) -> str:
    command = name_command(approval, client)
    seconds = round(approval["expires_at"] - approval["asked_at"])
    return (
        f"Session {show(approval['session_id'])} wants to:\n\n  {show(approval['action'])}\n\n"
        f"Somebody else has to approve it within {seconds} s, in another terminal:\n\n  {command}\n\n"
        f"or to reject it:\n\n  {command} --reject\n"
    )


def name_command(approval: dict[str, Any], client: AnyClient) -> str:
    """Which the person can paste. This user cannot answer its own question: root answers for users, and for root a
    person who has a key."""
    import shlex

    words = ["sandbox", "approve", approval["approval_id"]]
    if client.endpoint:
        return shlex.join(["k8e", "--endpoint", client.endpoint, *words])
    run = [f"K8E_RUN_DIR={shlex.quote(run_dir())}"] if os.environ.get("K8E_RUN_DIR") else []
    if os.geteuid() == 0:
        return " ".join([*run, "k8e", "sandbox", "approve", "--key", words[-1]])
    return " ".join(["sudo", *run, find_program(), *words])


def find_program() -> str:
    """As sudo finds it, which looks at root's places only."""
    import shlex
    import shutil

    path = shutil.which("k8e") or "k8e"
    return "k8e" if os.path.dirname(path) in ("", "/usr/local/bin", "/usr/bin", "/bin") else shlex.quote(path)


def show(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def read_argument(text: str) -> str:
    """Whatever the locale, the bytes as they were typed."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")
