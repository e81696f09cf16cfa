"""`agentkernel daemon start|status|stop|prewarm`: the machine's one daemon, and sandboxes that it has ready."""

from __future__ import annotations

import os
import time

from k8e.cli.agentkernel.output import say, show_table
from k8e.cli.agentkernel.plan import find_file, read_user_config
from k8e.cli.client import LocalClient
from k8e.cli.client.daemon_process import is_running, read_pid, stop_daemon
from k8e.cli.process import UNREACHABLE, Failure, ServiceError, print_json
from k8e.profiles.config.file import AgentPool, PoolSizes
from k8e.profiles.options import NO_OPTIONS, Context, SandboxOptions, merge
from k8e.profiles.sandbox_policy import build_policy, find_language, list_targets
from k8e.profiles.trust import find_pools

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.profiles.sandbox_policy import SandboxPolicy


USUAL = 2  # sandboxes that prewarm keeps ready where neither option nor configuration says how many
PATIENCE = 120.0  # for them to be ready
LOOK = 0.2


def start(parsed: argparse.Namespace) -> int:
    pools = list_pools(read_daemon(parsed.config))
    was_running = is_running()
    client = LocalClient()
    if not was_running:
        say("the daemon runs now")
    elif not parsed.json:
        say("the daemon runs already")
    for pool in pools:
        reserve(client, pool)
    return show_status(client, as_json=parsed.json)


def status(parsed: argparse.Namespace) -> int:
    if is_running():
        return show_status(LocalClient(), as_json=parsed.json)
    if parsed.json:
        print_json({"running": False})
    else:
        any_way = "`agentkernel daemon start`, or any command, starts it"
        say(f"the daemon does not run; {any_way if os.geteuid() == 0 else '`sudo agentkernel daemon start` starts it'}")
    return UNREACHABLE


def show_status(client: LocalClient, *, as_json: bool) -> int:
    service = client.status().parse()
    pool = client.get_pool().parse()
    if as_json:
        print_json({"running": True, "pid": read_pid(), **service, "pool": pool})
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
        hint = "nothing is to be stopped; `agentkernel daemon start` starts it"
        raise Failure("daemon_not_running", "the daemon does not run", hint=hint, status=UNREACHABLE)
    if os.geteuid() != 0:
        raise Failure("needs_root", "only root stops the daemon", hint="sudo agentkernel daemon stop")
    pid = stop_daemon()
    if parsed.json:
        print_json({"ok": True, "pid": pid})
    else:
        say("the daemon has stopped; sandboxes live on, and the next command starts it again")
    return 0


# Sandboxes that are ready


def prewarm(parsed: argparse.Namespace) -> int:
    configured = {pool.name: pool for pool in list_pools(read_daemon(parsed.config))}
    if parsed.count is not None and not 0 <= parsed.count <= 100:
        raise Failure("usage", "--count takes 0 to 100", hint="0 forgets the reservation")
    names = [parsed.mode] if parsed.mode else list(configured) or [find_preferred(parsed.config)]
    client = LocalClient()
    for name in names:
        pool = configured.get(name, AgentPool(name, USUAL))
        if parsed.count is not None:
            pool = pool.but(min_warm=parsed.count)
        reserve(client, pool)
        wait_until_ready(client, name)
    return show_status(client, as_json=parsed.json)


def read_daemon(named: str | None) -> list[PoolSizes]:
    """The sizes of the pools: from the user's own configuration, and a project's file if it is named or trusted."""
    file, trusted = find_file(named)
    user = read_user_config()
    if file is not None and file.daemon is not None and not trusted:
        raise Failure(
            "widening_refused",
            f"{file.file} sizes the daemon's pools, and is not trusted",
            detail="; ".join(f"{each.where} ({each.way})" for each in find_pools(file)),
            hint=f"look at it, then `agentkernel trust {file.file}`, or name it: --config {file.file}",
        )
    return [config.daemon for config in (file, user) if config is not None and config.daemon is not None]


def find_preferred(named: str | None) -> str:
    """The AI agent that is used here: a name and no more, so the file need not be trusted."""
    for config in (find_file(named)[0], read_user_config()):
        if config is not None and config.preferred:
            return config.preferred
    return "native"


def list_pools(configured: list[PoolSizes]) -> list[AgentPool]:
    """One pool for each AI agent that has a section, and one for commands without a mode; max_warm limits all."""
    if not configured:
        return []
    sizes = configured[0]
    pools = [AgentPool("native", sizes.min_warm)] if sizes.min_warm else []
    pools = [*(pool for pool in pools if pool.name not in {each.name for each in sizes.agents}), *sizes.agents]
    left = sizes.max_warm if sizes.max_warm is not None else 1000
    sized = []
    for pool in reversed(pools):  # those with a section of their own come first
        number = min(pool.min_warm, left)
        left -= number
        sized.append(pool.but(min_warm=number))
    return list(reversed(sized))


def describe_kind(pool: AgentPool, user: SandboxOptions) -> tuple[SandboxPolicy, list[str]]:
    """The policy of a command in this mode, and the slots for its directories, which are still unknown."""
    policy = build_policy(SandboxOptions(mode=pool.name, mount_cwd=False, mount_home=False), Context(), others=(user,))
    slots = list_targets(merge((SandboxOptions(mode=pool.name), user)))
    return policy.but(image=find_language(pool.runtime)) if pool.runtime else policy, list(slots)


def reserve(client: LocalClient, pool: AgentPool) -> None:
    config = read_user_config()
    policy, slots = describe_kind(pool, config.options if config else NO_OPTIONS)
    try:
        client.reserve(describe_reservation(pool, policy, slots))
    except ServiceError as error:
        from k8e.cli.agentkernel.images import is_about_image, obtain

        if not is_about_image(error):
            raise
        policy = obtain(client, policy.but(needs=()), error)
        client.reserve(describe_reservation(pool, policy, slots))


def describe_reservation(pool: AgentPool, policy: SandboxPolicy, slots: list[str]) -> dict[str, Any]:
    kept = ("image", "read_only", "powerless", "limits")
    kind = {name: value for name, value in policy.to_request().items() if name in kept}
    return {"name": pool.name, "count": pool.min_warm, **kind, **({"slots": slots} if slots else {})}


def wait_until_ready(client: LocalClient, name: str) -> None:
    deadline = time.monotonic() + PATIENCE
    told = -1
    while True:
        pool = client.get_pool().parse()
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
            hint = "`agentkernel daemon status` shows how far they are; `agentkernel doctor` what does not work here"
            raise Failure("not_ready", f"the sandboxes for {name} cannot be made ready", detail=cause, hint=hint)
        time.sleep(LOOK)
