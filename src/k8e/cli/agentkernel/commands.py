"""The commands of `agentkernel`. Those that end in a command of the user read their own words (leading_options.py): to
argparse, options of that command would be ours."""

from __future__ import annotations

from k8e.cli.command import Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import Parser

CANNOT_RUN = 125  # of run, exec and attach, whose other exit codes are the command's own; as podman and env have it


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_name(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    add_json(parser)


def add_create_options(parser: Parser) -> None:
    from k8e.cli.agentkernel.options import OPTIONS, CommandOptions
    from k8e.cli.arguments import add_table

    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="default: the name in agentkernel.toml")
    add_table(parser, OPTIONS, CommandOptions())


def add_sandboxes_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with the policy that is in force")


def add_config(parser: Parser) -> None:
    add_json(parser)
    parser.add_argument("--config", metavar="FILE", help="an agentkernel.toml with [daemon], besides your own")


def add_prewarm_options(parser: Parser) -> None:
    from k8e.cli.agentkernel.daemon import USUAL
    from k8e.profiles.mode import MODES

    add_config(parser)
    parser.add_argument("--mode", choices=tuple(MODES), help="default: all that your configuration names")
    parser.add_argument("--count", type=int, metavar="N", help=f"default: your configuration's, or {USUAL}")


def add_mcp_options(parser: Parser) -> None:
    about = "the tenant in which sandboxes are kept after the connection; `k8e sandbox run --tenant` names it"
    parser.add_argument("--tenant-id", default="", metavar="NAME", help=about)
    parser.add_argument(
        "--allow-permissive",
        action="store_true",
        help="let agents choose the profile permissive: this folder, your home and your variables are theirs then",
    )


def add_init_options(parser: Parser) -> None:
    from k8e.profiles.config import AGENTS
    from k8e.profiles.mode import MODES
    from k8e.profiles.profile import PROFILES

    parser.add_argument("--name", default="", metavar="NAME", help="of its sandbox; default: the folder's")
    parser.add_argument("--agent", choices=AGENTS, default="claude", help="the one you use; default: claude")
    about = "the security profile; default: moderate"
    parser.add_argument("--profile", choices=tuple(PROFILES), default="moderate", help=about)
    parser.add_argument("--compatibility-mode", choices=tuple(MODES), default="", help="default: none")
    parser.add_argument("--dry-run", action="store_true", help="print it instead")
    parser.add_argument("--force", action="store_true", help="replace the one that is there")


def add_trust_options(parser: Parser) -> None:
    from k8e.cli.agentkernel.plan import FILE_NAME

    parser.add_argument("file", nargs="?", default=FILE_NAME, metavar="FILE", help=f"default: {FILE_NAME}")
    parser.add_argument("--revoke", action="store_true", help="trust it no longer")
    parser.add_argument("--list", action="store_true", help="show what you trust")
    add_json(parser)


def add_install_options(parser: Parser) -> None:
    from k8e.profiles.config import AGENTS

    parser.add_argument("agent", nargs="?", choices=AGENTS, help="default: `preferred` of agentkernel.toml")
    parser.add_argument("--global", dest="everywhere", action="store_true", help="for all projects, not for this one")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--uninstall", action="store_true", help="take it out again")
    add_json(parser)


def add_audit_options(parser: Parser) -> None:
    from k8e.cli.arguments import read_with
    from k8e.cli.values import read_count, read_span

    parser.add_argument("--sandbox", default="", metavar="NAME", help="only what concerns this one")
    parser.add_argument("--event", action="append", default=[], metavar="NAME", help="only these, such as run_started")
    span = read_with(read_span, "span of time", "such as 90s, 15m, 1h")
    parser.add_argument("--since", type=span, default=None, metavar="TIME", help="only the last 90s, 15m, 1h, 2d")
    count = read_with(read_count, "number", "0 or more")
    parser.add_argument("-n", "--last", type=count, default=100, metavar="N", help="so many; 0: all; default: 100")
    parser.add_argument("--json", action="store_true", help="print the lines as they are in the log")


def add_doctor_options(parser: Parser) -> None:
    from k8e.cli.commands import add_doctor_options

    add_doctor_options(parser)


SANDBOX = {
    "create": Command("make a sandbox and start it", "agentkernel.sandbox:create", options=add_create_options),
    "start": Command(
        "start a sandbox that was stopped, on its own files", "agentkernel.sandbox:start", options=add_name
    ),
    "stop": Command("end everything in it, and keep its files", "agentkernel.sandbox:stop", options=add_name),
    "remove": Command("end it, with all its files", "agentkernel.sandbox:remove", options=add_name),
    "list": Command("list your sandboxes", "agentkernel.sandbox:list_sandboxes", options=add_sandboxes_options),
}
DAEMON = {
    "start": Command(
        "start it, if it does not run, and size its pools as your configuration says",
        "agentkernel.daemon:start",
        options=add_config,
    ),
    "status": Command(
        "say whether it runs, and which sandboxes are ready", "agentkernel.daemon:status", options=add_json
    ),
    "stop": Command("stop it; sandboxes live on", "agentkernel.daemon:stop", options=add_json),
    "prewarm": Command(
        "have sandboxes ready, and wait until they are", "agentkernel.daemon:prewarm", options=add_prewarm_options
    ),
}
MCP = {
    "server": Command(
        "speak the Model Context Protocol on stdin and stdout", "agentkernel.mcp:serve", options=add_mcp_options
    ),
}
PLUGIN = {
    "install": Command("write it, or take it out again", "agentkernel.plugin:install", options=add_install_options),
}
COMMANDS = {
    "run": Command(
        "run a command in a sandbox of its own, which is gone afterwards",
        "agentkernel.run:main",
        plain=True,
        failed=CANNOT_RUN,
    ),
    "exec": Command("run a command in a sandbox that is there", "agentkernel.exec:main", plain=True, failed=CANNOT_RUN),
    "attach": Command("a shell in a sandbox that is there", "agentkernel.exec:attach", plain=True, failed=CANNOT_RUN),
    "cp": Command("copy files and folders into a sandbox, and out of it", "agentkernel.copy:main", plain=True),
    "sandbox": Command(
        "create, start, stop, remove and list sandboxes that last", text="agentkernel.manual:SANDBOX", commands=SANDBOX
    ),
    "daemon": Command(
        "start, stop and look at the daemon; have sandboxes ready", text="agentkernel.manual:DAEMON", commands=DAEMON
    ),
    "mcp": Command("serve sandboxes to an agent", text="agentkernel.manual:MCP", commands=MCP),
    "init": Command(
        "write an agentkernel.toml for the project in this folder",
        "agentkernel.init:main",
        text="agentkernel.manual:INIT",
        options=add_init_options,
    ),
    "trust": Command(
        "let an agentkernel.toml ask for more than you do",
        "agentkernel.trust:main",
        text="agentkernel.manual:TRUST",
        options=add_trust_options,
    ),
    "plugin": Command("tell an agent about us", text="agentkernel.manual:PLUGIN", commands=PLUGIN),
    "audit": Command(
        "show who did what", "agentkernel.audit:main", text="agentkernel.manual:AUDIT", options=add_audit_options
    ),
    "doctor": Command(
        "say what works on this machine", "daemon:examine", text="manual:DOCTOR", options=add_doctor_options
    ),
}

ABOUT = """\
usage: agentkernel COMMAND ...

Run commands in sandboxes: nothing they do can hurt this machine.

  agentkernel run python3 -c 'print(1)'
  agentkernel run --profile restrictive ./untrusted.sh
  agentkernel run --compatibility-mode claude npm test

commands:
"""


def dispatch(words: list[str]) -> int:
    word, rest = (words[0], words[1:]) if words else ("--help", [])
    if word not in COMMANDS:
        return show_help(word)
    command = COMMANDS[word]
    if command.plain:
        return command.call(rest)
    from k8e.cli.arguments import Parser

    parser = Parser(prog=f"agentkernel {word}", description=command.description)
    command.declare(parser)
    parsed = parser.parse_args(rest)
    return int(parsed.handler(parsed))


def show_help(word: str) -> int:
    from k8e.cli.process import Failure, write_all

    if word == "--version":
        from importlib.metadata import version

        write_all(1, f"agentkernel (k8e) {version('k8e')}\n".encode())
        return 0
    if word not in ("--help", "-h", "help"):
        raise Failure("usage", f"there is no command {word!r}", hint="agentkernel --help")
    lines = "".join(f"  {name:<10} {command.about}\n" for name, command in COMMANDS.items())
    write_all(1, f"{ABOUT}{lines}\n`agentkernel COMMAND --help` says more.\n".encode())
    return 0
