"""`agentkernel daemon start|status|stop|prewarm`: the machine's one daemon, and sandboxes that it has ready."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time

from k8e.cli.agentkernel.images import is_about_image, obtain
from k8e.cli.agentkernel.output import say, show_json, show_table
from k8e.cli.agentkernel.parsing import make_parser
from k8e.cli.agentkernel.plan import find_file, read_user_config
from k8e.cli.agentkernel.sandbox import ask
from k8e.cli.client.http import JSON, Client, run_dir
from k8e.cli.client.response import read_object
from k8e.cli.process import UNREACHABLE, Failure
from k8e.profiles.config import AgentPool, PoolSizes
from k8e.profiles.context import Context
from k8e.profiles.mode import MODES
from k8e.profiles.options import NO_OPTIONS, SandboxOptions, merge
from k8e.profiles.sandbox_policy import build_policy, find_language, list_targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.profiles.sandbox_policy import SandboxPolicy

ABOUT = """\
One daemon owns the sandboxes of this machine. Commands start it when it is not there; sandboxes live on without it.

  agentkernel daemon start                   and has ready what [daemon] of your configuration says
  agentkernel daemon status
  agentkernel daemon prewarm --mode claude
  agentkernel daemon stop
"""

USUAL = 2  # sandboxes that prewarm has ready where nobody said how many
PATIENCE = 120.0  # for them to be ready
STOPPING = 60.0
LOOK = 0.2


def main(arguments: list[str]) -> int:
    parser = make_parser("daemon", ABOUT)
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True)
    for word, about, handler in (
        ("start", "start it, if it does not run, and size its pools as your configuration says", start),
        ("status", "say whether it runs, and which sandboxes are ready", status),
        ("stop", "stop it; sandboxes live on", stop),
        ("prewarm", "have sandboxes ready, and wait until they are", prewarm),
    ):
        added = subcommands.add_parser(word, help=about)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(handler=handler)
        if word in ("start", "prewarm"):
            added.add_argument("--config", metavar="FILE", help="an agentkernel.toml with [daemon], besides your own")
        if word == "prewarm":
            added.add_argument("--mode", choices=tuple(MODES), help="default: all that your configuration names")
            added.add_argument("--count", type=int, metavar="N", help=f"default: your configuration's, or {USUAL}")
    parsed = parser.parse_args(arguments)
    handled: int = parsed.handler(parsed)
    return handled


def start(parsed: argparse.Namespace) -> int:
    pools = list_pools(read_daemon(parsed.config))
    was_running = is_running()
    client = Client()
    if not was_running:
        say("the daemon runs now")
    elif not parsed.json:
        say("the daemon runs already")
    for pool in pools:
        reserve(client, pool)
    return tell_status(client, as_json=parsed.json)


def status(parsed: argparse.Namespace) -> int:
    if is_running():
        return tell_status(Client(), as_json=parsed.json)
    if parsed.json:
        show_json({"running": False})
    else:
        any_way = "`agentkernel daemon start`, or any command, starts it"
        say(f"the daemon does not run; {any_way if os.geteuid() == 0 else '`sudo agentkernel daemon start` starts it'}")
    return UNREACHABLE


def tell_status(client: Client, *, as_json: bool) -> int:
    service = ask(client, "GET", "/v1/status")
    pool = ask(client, "GET", "/v1/pool")
    if as_json:
        show_json({"running": True, "pid": read_pid(), **service, "pool": pool})
        return 0
    say(f"k8e {service['version']}, {service['runtime']}, {service['sessions']} sandboxes in use, {pool['warm']} ready")
    rows = [
        (each["name"], each["image"], each["runtime"], f"{each['ready']} of {each['wanted']}", each["trouble"])
        for each in pool["reservations"]
    ]
    if rows:
        show_table(("MODE", "IMAGE", "RUNTIME", "READY", "TROUBLE"), rows)
    return 0


def stop(parsed: argparse.Namespace) -> int:
    if not is_running():
        raise Failure("daemon_not_running", "the daemon does not run", status=UNREACHABLE)
    if os.geteuid() != 0:
        raise Failure("needs_root", "only root stops the daemon", hint="sudo agentkernel daemon stop")
    pid = read_pid()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = -1
    if process >= 0:
        try:
            # The number may have passed on to somebody else before we had hold of the process; the lock would tell.
            if is_running() and read_pid() == pid:
                signal.pidfd_send_signal(process, signal.SIGTERM)
                wait_for_end(process, pid)
        finally:
            os.close(process)
    if parsed.json:
        show_json({"ok": True, "pid": pid})
    else:
        say("the daemon has stopped; sandboxes live on, and the next command starts it again")
    return 0


def wait_for_end(process: int, pid: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(STOPPING * 1000):
        raise Failure("daemon_not_stopped", "the daemon does not stop", detail=f"pid {pid}", hint="see its log")


def is_running() -> bool:
    """Whether somebody holds the daemon's lock, or answers where we may not look at it."""
    try:
        descriptor = os.open(os.path.join(run_dir(), "k8e.lock"), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except PermissionError:
        return os.path.exists(os.path.join(run_dir(), "k8e.sock"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_pid() -> int:
    try:
        with open(os.path.join(run_dir(), "k8e.lock"), encoding="ascii") as file:
            return int(file.read(32) or 0)
    except (OSError, ValueError):
        return 0


# Sandboxes that are ready


def prewarm(parsed: argparse.Namespace) -> int:
    configured = {pool.name: pool for pool in list_pools(read_daemon(parsed.config))}
    if parsed.count is not None and not 0 <= parsed.count <= 100:
        raise Failure("usage", "--count takes 0 to 100")
    names = [parsed.mode] if parsed.mode else list(configured) or [find_preferred(parsed.config)]
    client = Client()
    for name in names:
        pool = configured.get(name, AgentPool(name, USUAL))
        if parsed.count is not None:
            pool = pool.but(min_warm=parsed.count)
        reserve(client, pool)
        wait_until_ready(client, name)
    return tell_status(client, as_json=parsed.json)


def read_daemon(named: str | None) -> list[PoolSizes]:
    """What sizes the pools: your own configuration, and a project's file if it is named or trusted."""
    file, trusted = find_file(named)
    user = read_user_config()
    if file is not None and file.daemon is not None and not trusted:
        raise Failure(
            "widening_refused",
            f"{file.file} sizes the daemon's pools, and nobody has said that it may",
            detail=file.where("daemon"),
            hint=f"look at it, then `agentkernel trust {file.file}`, or name it: --config {file.file}",
        )
    return [config.daemon for config in (file, user) if config is not None and config.daemon is not None]


def find_preferred(named: str | None) -> str:
    """The agent that is used here: a name and no more, so nobody needs to trust who says it."""
    for config in (find_file(named)[0], read_user_config()):
        if config is not None and config.preferred:
            return config.preferred
    return "native"


def list_pools(wishes: list[PoolSizes]) -> list[AgentPool]:
    """One for each agent that has a section, and one for commands without a mode. Not more than max_warm in all."""
    if not wishes:
        return []
    wish = wishes[0]
    pools = [AgentPool("native", wish.min_warm)] if wish.min_warm else []
    pools = [*(pool for pool in pools if pool.name not in {each.name for each in wish.agents}), *wish.agents]
    left = wish.max_warm if wish.max_warm is not None else 1000
    sized = []
    for pool in reversed(pools):  # whoever has a section of its own comes first
        number = min(pool.min_warm, left)
        left -= number
        sized.append(pool.but(min_warm=number))
    return list(reversed(sized))


def describe_kind(pool: AgentPool, user: SandboxOptions) -> tuple[SandboxPolicy, list[str]]:
    """What a command in this mode gets, and where its directories will be; whose, nobody knows yet."""
    cage = build_policy(SandboxOptions(mode=pool.name, mount_cwd=False, mount_home=False), Context(), others=(user,))
    slots = list_targets(merge((SandboxOptions(mode=pool.name), user)))
    return cage.but(image=find_language(pool.runtime)) if pool.runtime else cage, list(slots)


def reserve(client: Client, pool: AgentPool) -> None:
    config = read_user_config()
    cage, slots = describe_kind(pool, config.options if config else NO_OPTIONS)
    answer = attempt(client, pool, cage, slots)
    if "reservations" not in answer and is_about_image(answer):
        answer = attempt(client, pool, obtain(client, cage.but(needs=()), answer), slots)
    if "reservations" not in answer:
        raise Failure.of(answer)


def attempt(client: Client, pool: AgentPool, cage: SandboxPolicy, slots: list[str]) -> dict[str, Any]:
    kept = ("image", "read_only", "powerless", "limits")
    kind = {name: value for name, value in cage.to_request().items() if name in kept}
    body = {"name": pool.name, "count": pool.min_warm, **kind, **({"slots": slots} if slots else {})}
    response = client.request("POST", "/v1/pool", json.dumps(body).encode(), JSON)
    return read_object(response)


def wait_until_ready(client: Client, name: str) -> None:
    deadline = time.monotonic() + PATIENCE
    told = -1
    while True:
        pool = ask(client, "GET", "/v1/pool")
        found = next((each for each in pool["reservations"] if each["name"] == name), None)
        if found is None:
            return  # none was asked for
        if found["ready"] != told:
            told = found["ready"]
            say(f"{name}: {told} of {found['wanted']} ready ({found['image']})")
        if told >= found["wanted"]:
            if found["wanted"] < found["asked"]:
                say(f"{name}: {found['asked']} were asked for; this machine has {pool['max']} ready at most")
            return
        if found["trouble"] or time.monotonic() > deadline:
            cause = found["trouble"] or f"not within {PATIENCE:g} seconds"
            raise Failure("not_ready", f"the sandboxes for {name} cannot be made ready", detail=cause)
        time.sleep(LOOK)
