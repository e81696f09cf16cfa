"""`agentkernel exec` and `agentkernel attach`: a command, or a shell, in a sandbox that is there."""

from __future__ import annotations

from k8e.cli.agentkernel import load_foreground, open_terminal
from k8e.cli.agentkernel.leading_options import MOST_SECONDS, TERMINAL, TIMEOUT, show_help, take_options, wants_help
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import Failure, ServiceError, stdin_is_null

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

USAGE = "exec [options] NAME COMMAND [ARGUMENT ...]"
ABOUT = """\
Runs a command in the sandbox NAME, as if it were started here: its streams, its terminal and its exit code are ours.
What comes after COMMAND is the command's. Exit codes are those of `agentkernel run`."""
ATTACH_USAGE = "attach [options] NAME"
ATTACH_ABOUT = "A shell in the sandbox NAME. It goes with your terminal; what it started in the background does, too."

TABLE = {
    **TIMEOUT,
    **TERMINAL,
    "--env": (list, "NAME=VALUE", "a variable for this command; may be given several times"),
    "--workdir": (str, "DIR", "where it starts; default: as the sandbox has it"),
}
ATTACH_TABLE = {**TABLE, "--shell": (str, "PROGRAM", "default: bash, where the sandbox has none sh")}

# It reads our standard input, be it a terminal or not.
FIND_SHELL = "command -v bash > /dev/null && exec bash; exec sh"


class ExecOptions:
    def __init__(self) -> None:
        self.timeout = MOST_SECONDS
        self.env: list[str] = []
        self.workdir = ""
        self.shell = ""
        self.interactive = False
        self.tty = False


def main(words: list[str]) -> int:
    if wants_help(words, TABLE):
        return show_help(USAGE, ABOUT, TABLE)
    options = ExecOptions()
    name, *command = take_options(words, TABLE, options) or [""]
    if command[:1] == ["--"]:  # as others have it; no program has that name
        command = command[1:]
    if not name or not command:
        raise Failure("usage", "a sandbox and a command are needed", hint=f"agentkernel {USAGE}")
    return execute(name, command, options)


def attach(words: list[str]) -> int:
    if wants_help(words, ATTACH_TABLE):
        return show_help(ATTACH_USAGE, ATTACH_ABOUT, ATTACH_TABLE)
    options = ExecOptions()
    rest = take_options(words, ATTACH_TABLE, options)
    if len(rest) != 1:
        raise Failure("usage", "a sandbox is needed, and nothing else", hint=f"agentkernel {ATTACH_USAGE}")
    return execute(rest[0], [options.shell] if options.shell else ["sh", "-c", FIND_SHELL], options)


def execute(name: str, command: list[str], options: ExecOptions) -> int:
    own_terminal, about = open_terminal(required=options.tty)
    wanted: dict[str, Any] = {"argv": command, "timeout": options.timeout, **about}
    if options.env:
        from k8e.cli.values import read_env

        wanted["env"] = read_env(options.env)
    if options.workdir:
        wanted["workdir"] = options.workdir
    try:
        stream = LocalClient(load_foreground).stream_run(SessionName(name), wanted, feeds=not stdin_is_null())
    except ServiceError as error:
        raise explain(error, name) from None
    from k8e.cli.agentkernel.foreground import ForegroundRun

    return ForegroundRun(stream, own_terminal).follow()


def explain(error: ServiceError, name: str) -> ServiceError:
    """Gives the error a hint in the words of this command line."""
    hints = {
        "session_stopped": f"agentkernel sandbox start {name}",
        "session_not_found": "agentkernel sandbox list",
    }
    error.hint = hints.get(error.code, error.hint)
    return error
