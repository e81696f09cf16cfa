"""Which words there are, and where they live."""

from __future__ import annotations

from k8e.cli.process import Failure, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CANNOT_RUN = 125  # of run, exec and attach, whose other exit codes are the command's own; as podman and env have it


class Command:
    def __init__(self, module: str, about: str, failed: int = 0, function: str = "main") -> None:
        self.about = about
        self.failed = failed  # the exit code when it fails; 0: 1, or 2 when the daemon cannot be reached
        self._module = module
        self._function = function

    def load(self) -> Callable[[list[str]], int]:
        from importlib import import_module

        found: Callable[[list[str]], int] = getattr(
            import_module(f"k8e.cli.agentkernel.{self._module}"), self._function
        )
        return found


COMMANDS = {
    "run": Command("run", "run a command in a sandbox of its own, which is gone afterwards", CANNOT_RUN),
    "exec": Command("exec", "run a command in a sandbox that is there", CANNOT_RUN),
    "attach": Command("exec", "a shell in a sandbox that is there", CANNOT_RUN, "attach"),
    "cp": Command("copy", "copy files and folders into a sandbox, and out of it"),
    "sandbox": Command("sandbox", "create, start, stop, remove and list sandboxes that last"),
    "daemon": Command("daemon", "start, stop and look at the daemon; have sandboxes ready"),
    "mcp": Command("mcp", "serve sandboxes to an agent"),
    "init": Command("init", "write an agentkernel.toml for the project in this folder"),
    "trust": Command("trust", "let an agentkernel.toml ask for more than you do"),
    "plugin": Command("plugin", "tell an agent about us"),
    "audit": Command("audit", "show who did what"),
    "doctor": Command("doctor", "say what works on this machine"),
}

ABOUT = """\
usage: agentkernel COMMAND ...

Run commands in sandboxes: nothing they do can hurt this machine.

  agentkernel run python3 -c 'print(1)'
  agentkernel run --profile restrictive ./untrusted.sh
  agentkernel run --compatibility-mode claude npm test

commands:
"""


def show_help(word: str) -> int:
    if word == "--version":
        from importlib.metadata import version

        write_all(1, f"agentkernel (k8e) {version('k8e')}\n".encode())
        return 0
    if word not in ("--help", "-h", "help"):
        raise Failure("usage", f"there is no command {word!r}", hint="agentkernel --help")
    lines = "".join(f"  {name:<10} {command.about}\n" for name, command in COMMANDS.items())
    write_all(1, f"{ABOUT}{lines}\n`agentkernel COMMAND --help` says more.\n".encode())
    return 0
