"""`agentkernel run`: a command in a sandbox of its own, which is gone afterwards. Imports only what it uses."""

from __future__ import annotations

import os
import time

from k8e.cli.agentkernel import load_foreground, open_terminal
from k8e.cli.agentkernel.leading_options import MOST_SECONDS, TERMINAL, TIMEOUT, show_help, take_options, wants_help
from k8e.cli.agentkernel.options import OPTIONS, CommandOptions
from k8e.cli.agentkernel.plan import describe_session, prepare, tell_new
from k8e.cli.client import LocalClient
from k8e.cli.process import Failure, OutputLost, ServiceError, stdin_is_null

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from k8e.cli.agentkernel.plan import Plan
    from k8e.cli.agentkernel.ports import Forwarding, Port
    from k8e.cli.client.streams import LocalStream
    from k8e.profiles.sandbox_policy import SandboxPolicy

USAGE = "run [options] COMMAND [ARGUMENT ...]"
ABOUT = """\
Runs a command in a sandbox of its own, as if it were started here: its streams, its terminal and its exit code are
ours. Afterwards the sandbox is gone with everything in it. What comes after COMMAND is the command's.

The exit code is the command's own; 128+n when a signal ended it, 124 after --timeout. Ours are 125 (it could not be
run), 126 (it is no program) and 127 (there is no such program)."""

TABLE = {
    **OPTIONS,
    **TIMEOUT,
    **TERMINAL,
    "-p --publish": (
        list,
        "HOST:SANDBOX",
        "a port of this machine that leads to one of the sandbox; on loopback, or as ADDRESS:HOST:SANDBOX says",
    ),
    "--keep": (None, "", "keep the sandbox, with its files; its name is said at the end"),
    "--entrypoint": (str, "WORD", "instead of what the image puts before commands; '' is nothing"),
}


class RunOptions(CommandOptions):
    def __init__(self) -> None:
        super().__init__()
        self.timeout = MOST_SECONDS
        self.keep = False
        self.entrypoint: str | None = None
        self.interactive = False
        self.tty = False
        self.publish: list[str] = []


def main(words: list[str]) -> int:
    if wants_help(words, TABLE):
        return show_help(USAGE, ABOUT, TABLE)
    options = RunOptions()
    command = take_options(words, TABLE, options)
    if options.json and not options.dry_run:
        error = "--json is for --dry-run: what a command prints is its own"
        raise Failure("usage", error, hint="`k8e sandbox run` prints JSON")
    if not command and options.image is None:
        raise Failure("usage", "there is no command to run", hint=f"agentkernel {USAGE}")
    ports = read_ports(options)
    plan = prepare(options, command)
    if options.dry_run:
        from k8e.cli.agentkernel.sandbox import show_plan

        show_plan(plan.policy, ports, as_json=options.json)
        return 0
    if plan.policy.env_left_out:
        say(f"no room for these variables: {', '.join(plan.policy.env_left_out)}")
    return execute(options, command, plan, forward(ports))


def say(line: str) -> None:
    from k8e.cli.agentkernel import output

    output.say(line)


def read_ports(options: RunOptions) -> list[Port]:
    if not options.publish:
        return []
    from k8e.cli.agentkernel.ports import read_port

    return [read_port(text) for text in options.publish]


def forward(ports: list[Port]) -> Forwarding | None:
    """Listens already: a port that is taken is known before anything runs."""
    if not ports:
        return None
    from k8e.cli.agentkernel.ports import Forwarding

    return Forwarding(ports)


def execute(options: RunOptions, command: list[str], plan: Plan, forwarding: Forwarding | None) -> int:
    begun = time.time()
    own_terminal, about = open_terminal(required=options.tty)
    try:
        stream = start(options, command, plan, about)
    except ServiceError as error:
        from k8e.cli.agentkernel.advice import advise_on_program

        raise advise_on_program(error, command, plan) from None

    def advise(denial: Mapping[str, Any]) -> str:
        from k8e.cli.agentkernel.advice import advise_on_denial

        return advise_on_denial(denial, plan, options)

    def offer() -> None:
        if plan.repository is not None:
            from k8e.cli.agentkernel.git.offer import offer_commits

            offer_commits(stream.session_id, plan.repository, begun, stays=options.keep)

    if forwarding is not None:
        forwarding.serve(stream.session_id)
    from k8e.cli.agentkernel.foreground import ForegroundRun

    try:
        # The list of a sandbox that is kept can be changed, as the service's own hint says.
        run = ForegroundRun(stream, own_terminal, None if options.keep else advise)
        try:
            code = run.follow()
        except (BrokenPipeError, OutputLost):
            offer()  # the sandbox is there until we leave
            raise
        except Failure:
            if plan.repository is not None and not options.keep:
                say("if it committed, that is lost with its sandbox")
            raise
        offer()
        return code
    finally:
        if forwarding is not None:
            forwarding.close()
        tell_new(plan, begun)
        if options.keep:
            name = stream.session_id
            say(f"kept as {name}: agentkernel exec {name} COMMAND, agentkernel sandbox remove {name}")


def start(options: RunOptions, command: list[str], plan: Plan, others: dict[str, Any]) -> LocalStream:
    """Sends one request. Only if it fails because the image is missing is there another: nothing has been run."""
    client, feeds = LocalClient(load_foreground), not stdin_is_null()
    try:
        return client.stream_once(describe_run(options, command, plan, plan.policy) | others, feeds=feeds)
    except ServiceError as error:
        if not error.code.startswith("image_"):
            raise
        from k8e.cli.agentkernel.images import obtain

        policy = obtain(LocalClient(), plan.policy, error)
    return client.stream_once(describe_run(options, command, plan, policy) | others, feeds=feeds)


def describe_run(options: RunOptions, command: list[str], plan: Plan, policy: SandboxPolicy) -> dict[str, Any]:
    entrypoint = policy.image_by == "asked"
    if options.entrypoint is not None:
        command = [options.entrypoint, *command] if options.entrypoint else command
        entrypoint = False
    if options.keep:
        policy = policy.but(name=f"run-{os.urandom(4).hex()}", persistent=True)
    wanted = {"session": describe_session(plan, policy), "argv": command, "timeout": options.timeout}
    # With `linger` the sandbox stays until we leave, so that commits can be taken out of it.
    stay = {"keep": True} if options.keep else {"linger": True} if plan.repository is not None else {}
    return wanted | ({"entrypoint": True} if entrypoint else {}) | stay
