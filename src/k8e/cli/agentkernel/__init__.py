"""The command line `agentkernel`: a second command line for the same daemon (docs/agentkernel.md).

commands.py has the table of commands; each is a module of its own, imported when it is called: a person or an agent
waits for this process (see k8e.cli for what imports cost).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.cli.terminal import Terminal

# Exit codes of run, exec and attach, as shells have them.
NO_PROGRAM = {"program_not_found": 127, "program_not_executable": 126}


def main() -> None:
    from k8e.cli.process import run_command

    run_command(choose, sys.argv[1:])


def open_terminal(*, required: bool) -> tuple[Terminal | None, dict[str, Any]]:
    """The user's terminal, if there is one, and its part of a request."""
    from k8e.cli.process import has_terminal

    if not required and not has_terminal():
        return None, {}
    from k8e.cli import terminal

    terminal.require("-t", "leave -t out: both are the command's anyway")
    return terminal.Terminal(), {"terminal": terminal.describe()}


def load_foreground() -> None:
    """Imports what follows a run: for the time in which the daemon starts it."""
    import k8e.cli.agentkernel.foreground
    import k8e.cli.client.streams  # noqa: F401


def choose(arguments: list[str]) -> int:
    """Errors are for people here, on stderr: stdout belongs to results."""
    if arguments == ["mcp", "server"]:  # as agents start it: without argparse
        from k8e.cli.mcp.command import bridge

        return bridge("", "agentkernel")
    from k8e.cli.agentkernel.commands import COMMANDS, dispatch
    from k8e.cli.process import FAILED, OutputLost
    from k8e.errors import ExplainedError

    command = COMMANDS.get(arguments[0]) if arguments else None
    failed = command.failed if command is not None else 0
    try:
        return dispatch(arguments)
    except ExplainedError as error:
        from k8e.cli.agentkernel.output import tell

        tell(error.body)
        return NO_PROGRAM.get(error.code, failed) if failed else getattr(error, "status", FAILED)
    except OutputLost as lost:
        from k8e.cli.agentkernel.output import tell

        tell(lost.failure.body)
        return failed or FAILED
