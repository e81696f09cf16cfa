"""The commands of `agentkernel`. Those that end in a command of the user read their own words (leading_options.py): to
argparse, options of that command would be ours."""

from __future__ import annotations

from k8e.cli.command import Command, any_text, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import Table

CANNOT_RUN = 125  # of run, exec and attach, whose other exit codes are the command's own; as podman and env have it

JSON: Table = {"--json": (None, "", "print JSON")}
NAME: Table = {"name": (str, "NAME", ""), **JSON}
CONFIG: Table = {**JSON, "--config": (any_text, "FILE", "an agentkernel.toml with [daemon], besides your own")}
TENANT = "the tenant in which sandboxes are kept after the connection; as of `k8e sandbox run --tenant`"
PERMISSIVE = "let agents choose the profile permissive: this folder, your home and your variables are theirs then"


def list_create_options() -> Table:
    from k8e.cli.agentkernel.options import OPTIONS

    return {"name?": (str, "NAME", "default: the name in agentkernel.toml"), **OPTIONS}


def list_prewarm_options() -> Table:
    from k8e.cli.agentkernel.daemon import USUAL
    from k8e.profiles.profile import MODES

    return {
        **CONFIG,
        "--mode": (tuple(MODES), "", "default: all that your configuration names"),
        "--count": (int, "N", f"default: your configuration's, or {USUAL}"),
    }


def list_init_options() -> Table:
    from k8e.profiles.config.file import AGENTS
    from k8e.profiles.profile import MODES, PROFILES

    return {
        "--name": (any_text, "NAME", "of its sandbox; default: the folder's"),
        "--agent": (AGENTS, "", "the one you use; default: claude"),
        "--profile": (tuple(PROFILES), "", "the security profile; default: moderate"),
        "--compatibility-mode": (tuple(MODES), "", "default: none"),
        "--dry-run": (None, "", "print it instead"),
        "--force": (None, "", "replace the one that is there"),
    }


def list_install_options() -> Table:
    from k8e.cli.skill.agents import NAMES

    return {
        "agent?": (NAMES, "", "default: `preferred` of agentkernel.toml"),
        "--global": (None, "", "for all projects, not for this one"),
        "--dry-run": (None, "", "only say what would be written"),
        "--uninstall": (None, "", "take it out again"),
        **JSON,
    }


def list_audit_options() -> Table:
    from k8e.cli.values import read_count, read_span

    return {
        "--sandbox": (any_text, "NAME", "only what concerns this one"),
        "--event": (list, "NAME", "only these, such as run_started"),
        "--since": (read_span, "TIME", "only the last 90s, 15m, 1h, 2d"),
        "-n --last": (read_count, "N", "so many, 0 or more; 0: all; default: 100"),
        "--json": (None, "", "print the lines as they are in the log"),
    }


def list_doctor_options() -> Table:
    from k8e.cli.commands import DOCTOR

    return DOCTOR


COMPLETION: Table = {"shell": (("bash", "zsh", "fish"), "", "")}
TRUST: Table = {
    "file?": (str, "FILE", "default: agentkernel.toml"),
    "--revoke": (None, "", "trust it no longer"),
    "--list": (None, "", "show what you trust"),
    **JSON,
}
SANDBOX = {
    "create": Command("make a sandbox and start it", "agentkernel.sandbox:create", list_create_options),
    "start": Command("start a sandbox that was stopped, on its own files", "agentkernel.sandbox:start", NAME),
    "stop": Command("end everything in it, and keep its files", "agentkernel.sandbox:stop", NAME),
    "remove": Command("end it, with all its files", "agentkernel.sandbox:remove", NAME),
    "list": Command(
        "list your sandboxes",
        "agentkernel.sandbox:list_sandboxes",
        {"--json": (None, "", "print JSON, with the policy that is in force")},
    ),
}
DAEMON = {
    "start": Command(
        "start it, if it does not run, and size its pools as your configuration says",
        "agentkernel.daemon:start",
        CONFIG,
        defaults={"config": None},
    ),
    "status": Command("say whether it runs, and which sandboxes are ready", "agentkernel.daemon:status", JSON),
    "stop": Command("stop it; sandboxes live on", "agentkernel.daemon:stop", JSON),
    "prewarm": Command(
        "have sandboxes ready, and wait until they are",
        "agentkernel.daemon:prewarm",
        list_prewarm_options,
        defaults={"config": None},
    ),
}
MCP = {
    "server": Command(
        "speak the Model Context Protocol on stdin and stdout",
        "mcp.command:serve_agentkernel",
        {"--tenant-id": (any_text, "NAME", TENANT), "--allow-permissive": (None, "", PERMISSIVE)},
    ),
}
PLUGIN = {
    "install": Command(
        "write it, or take it out again", "agentkernel.plugin:install", list_install_options, defaults={"agent": None}
    ),
}
GIT = {
    "pull": Command("bring a sandbox's commits here, below refs/k8e/NAME/", "agentkernel.git.pull:main", NAME),
}
COMMANDS = {
    "run": Command(
        "run a command in a sandbox of its own, which is gone afterwards",
        "agentkernel.run:main",
        lambda: load("agentkernel.run:TABLE"),
        plain=True,
        failed=CANNOT_RUN,
    ),
    "exec": Command(
        "run a command in a sandbox that is there",
        "agentkernel.exec:main",
        lambda: {"name": (str, "NAME", ""), **load("agentkernel.exec:TABLE")},
        plain=True,
        failed=CANNOT_RUN,
    ),
    "attach": Command(
        "a shell in a sandbox that is there",
        "agentkernel.exec:attach",
        lambda: {"name": (str, "NAME", ""), **load("agentkernel.exec:ATTACH_TABLE")},
        plain=True,
        failed=CANNOT_RUN,
    ),
    "ps": Command("list the sandboxes that run now, and the commands in them", "agentkernel.ps:main", JSON),
    "cp": Command("copy files and folders into a sandbox, and out of it", "agentkernel.copy:main", plain=True),
    "git": Command("bring back commits of sandboxes", text="agentkernel.manual:GIT", commands=GIT),
    "sandbox": Command(
        "create, start, stop, remove and list sandboxes that last", text="agentkernel.manual:SANDBOX", commands=SANDBOX
    ),
    "daemon": Command(
        "start, stop and look at the daemon; have sandboxes ready", text="agentkernel.manual:DAEMON", commands=DAEMON
    ),
    "mcp": Command("serve sandboxes to an agent", text="agentkernel.manual:MCP", commands=MCP),
    "init": Command(
        "write an agentkernel.toml for the project in this folder",
        "agentkernel.project.init:main",
        list_init_options,
        "agentkernel.manual:INIT",
        defaults={"agent": "claude", "profile": "moderate", "compatibility_mode": ""},
    ),
    "trust": Command(
        "let an agentkernel.toml ask for more than you do",
        "agentkernel.project.trust:main",
        TRUST,
        "agentkernel.manual:TRUST",
        defaults={"file": "agentkernel.toml"},
    ),
    "plugin": Command("tell an agent about us", text="agentkernel.manual:PLUGIN", commands=PLUGIN),
    "audit": Command(
        "show who did what",
        "agentkernel.audit:main",
        list_audit_options,
        "agentkernel.manual:AUDIT",
        defaults={"last": 100},
    ),
    "version": Command("say which version this is, and which one the daemon is", "agentkernel.version:main", JSON),
    "completion": Command(
        "print a script that completes commands at the TAB key", "completion:main_agentkernel", COMPLETION, plain=True
    ),
    "doctor": Command("say what works on this machine", "daemon:examine", list_doctor_options, "manual:DOCTOR"),
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
        from k8e.cli.agentkernel.version import show

        return show()
    if word not in ("--help", "-h", "help"):
        from k8e.cli.nearest import suggest

        hint = suggest(word, COMMANDS, "`agentkernel --help` lists the commands")
        raise Failure("usage", f"there is no command {word!r}", hint=hint)
    lines = "".join(f"  {name:<10} {command.about}\n" for name, command in COMMANDS.items())
    write_all(1, f"{ABOUT}{lines}\n`agentkernel COMMAND --help` says more.\n".encode())
    return 0
