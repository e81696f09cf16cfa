"""`k8e sandbox ...`: its commands and what each can be told."""

from __future__ import annotations

from k8e.cli import amounts, handlers, manual, sessions
from k8e.cli.arguments import Word, add_table, read_with
from k8e.cli.options import OPTIONS, RunOptions, read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from k8e.cli.arguments import Handler, Parser


# About a session, or some: there may be others of the same name.
OF_SESSIONS = frozenset(
    [
        *("get", "sessions", "allow-hosts", "stop", "start", "destroy", "subagent", "confirm"),
        *("write", "read", "list", "ps", "log"),
    ]
)


def add_sandbox(parent: Any) -> None:
    sandbox = parent.add_parser(
        "sandbox", help="run code, make sessions, handle their files", description=manual.SANDBOX
    )
    subcommands = sandbox.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, handler: Handler, about: str, description: str = "") -> Parser:
        added: Parser = subcommands.add_parser(
            name, help=about, description=description or f"{about[0].upper()}{about[1:]}."
        )
        added.set_defaults(handler=handler)
        if name in OF_SESSIONS:
            about = "whose session, where several have one of that name"
            added.add_argument("--tenant-id", default="", metavar="NAME", help=about)
            about = "the same: a user of the machine, or gateway"
            added.add_argument("--owner", default="", metavar="UID", help=about)
        return added

    add_run_options(add("run", handlers.run_parsed, "run code or a shell command", manual.RUN))
    add_create_options(add("create", sessions.create, "make a session and print its id"))
    add_child_options(
        add("subagent", sessions.subagent, "make a session that shares another's workspace", manual.SUBAGENT)
    )
    add("get", sessions.get, "show a session").add_argument("sid", metavar="SID")
    add_hosts_options(add("allow-hosts", sessions.allow_hosts, "show or change what a session may reach", manual.HOSTS))
    listing = add("sessions", sessions.sessions, "list your sessions")
    listing.add_argument("--phase", choices=("active", "all"), default="active", help="default: active")
    stop = add("stop", sessions.stop, "end what runs in a persistent session; its files stay")
    stop.add_argument("sid", metavar="SID")
    start = add("start", sessions.start, "bring a stopped session back, with its files", manual.START)
    start.add_argument("sid", metavar="SID")
    for name, noun, about in (
        ("--env", "NAME=VALUE", "another variable for all its commands, or another value"),
        ("--secret", "NAME", "a variable with the value that it has here"),
    ):
        start.add_argument(name, action="append", default=[], metavar=noun, help=f"{about}; may be given several times")
    add("destroy", sessions.destroy, "end a session with all that is in it").add_argument("sid", metavar="SID")
    write = add("write", sessions.write, "write standard input to a file of a session")
    write.add_argument("sid", metavar="SID")
    write.add_argument("path", metavar="PATH", help="relative ones begin at /workspace")
    write.add_argument("--mode", choices=("w", "a"), default="w", help="w replaces (default), a appends")
    read = add("read", sessions.read, "read a file of a session")
    read.add_argument("sid", metavar="SID")
    read.add_argument("path", metavar="PATH", help="relative ones begin at /workspace")
    read.add_argument("--raw", action="store_true", help="print the bytes as they are instead of JSON")
    entries = add("list", sessions.list_files, "list the files of a session")
    entries.add_argument("sid", metavar="SID")
    entries.add_argument("--path", action=Word, default="", metavar="DIR", help="default: /workspace")
    entries.add_argument("--since", type=float, default=0.0, metavar="TIME", help="only what changed after (unix time)")
    status = add("status", sessions.status, "say whether sandboxes work, and which session is yours")
    status.add_argument("--tenant", action=Word, default="", metavar="NAME")
    add("poll", sessions.poll, "show how a background run is doing").add_argument("run_id", metavar="RUN-ID")
    add("kill", sessions.kill, "end a background run").add_argument("run_id", metavar="RUN-ID")
    add("ps", sessions.ps, "list the commands of a session").add_argument("sid", metavar="SID")
    add("log", sessions.log, "list the runs of a session").add_argument("sid", metavar="SID")
    add_approvals(add)


def add_approvals(add: Callable[..., Parser]) -> None:
    confirm = add("confirm", handlers.run_confirm, "ask a person whether something may be done", manual.CONFIRM)
    confirm.add_argument("sid", metavar="SID")
    confirm.add_argument("action", metavar="ACTION", help="what is to be done, for the person who decides")
    seconds = read_with(read_seconds, "number of seconds", "more than 0")
    confirm.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="for how long it can be answered; default: 30"
    )
    confirm.add_argument("--no-wait", action="store_true", help="print the approval's id at once")
    approve = add("approve", handlers.run_approve, "answer such a question", manual.APPROVE)
    approve.add_argument("approval_id", metavar="APPROVAL-ID")
    key_help = "as the API key of a person, which is typed at the terminal: for root's own questions"
    approve.add_argument("--key", action="store_true", help=key_help)
    approve.add_argument("--reject", action="store_true", help="answer no")
    approve.add_argument("--reason", default="", metavar="TEXT", help="for whoever asked, and the audit log")
    approvals = add("approvals", handlers.run_approvals, "list the questions that can be answered, or show one")
    approvals.add_argument("approval_id", nargs="?", default="", metavar="APPROVAL-ID")
    approvals.add_argument("--all", action="store_true", help="those that are settled, too")


def add_run_options(parser: Parser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="default: standard input")
    add_table(parser, OPTIONS, RunOptions())


def add_hosts_options(parser: Parser) -> None:
    parser.add_argument("sid", metavar="SID")
    for name, about in (
        ("--add", "put these on the list"),
        ("--remove", "take these off it; connections to them are cut"),
        ("--hosts", "instead of the whole list"),
    ):
        parser.add_argument(name, action="append", metavar="HOSTS", help=about)
    parser.add_argument("--clear", action="store_true", help="take everything off it")


def add_wishes(
    parser: Parser, runtime: str, image: str, cpus: str, memory: str, disk: str, ttl: str, hosts: str
) -> Callable[..., None]:
    """What a session and a sub-agent's can both be asked to have; the words are their defaults."""

    def add(name: str, noun: str, about: str, **settings: Any) -> None:
        parser.add_argument(name, metavar=noun, help=about, **settings)

    size, span = (
        read_with(amounts.read_size, "size", "such as 512m or 2g"),
        read_with(amounts.read_span, "span of time", "such as 90s, 15m, 2d"),
    )
    add("--runtime", "NAME", f"gvisor or native; default: {runtime}", action=Word, default="")
    add("--image", "NAME", f"default: {image}", action=Word, default="")
    add("--session-id", "SID", "the id to give it; default: chosen for you", action=Word, default="")
    add(
        "--env",
        "NAME=VALUE",
        "a variable for all its commands; may be given several times",
        action="append",
        default=[],
    )
    add(
        "--secret",
        "NAME",
        "a variable with the value that it has here, which is kept on no disk; may be given several times",
        action="append",
        default=[],
    )
    add("--cpus", "N", f"default: {cpus}", type=float)
    add("--memory", "SIZE", f"such as 512m or 2g; default: {memory}", type=size)
    add("--disk", "SIZE", f"default: {disk}", type=size)
    add("--ttl", "TIME", f"unused for that long it is destroyed: 90s, 15m, 2d; default: {ttl}", type=span)
    add(
        "--allowed-hosts",
        "HOSTS",
        f"what it may reach, instead of {hosts}: a.example,*.b.example:8443; '' is nothing",
        action="append",
        default=[],
    )
    return add


def add_child_options(parser: Parser) -> None:
    parser.add_argument("parent", metavar="PARENT-SID", help="the session whose workspace it shares")
    same = "its parent's"
    add = add_wishes(parser, same, same, same, same, same, same, "all that its parent may")
    add("--agent-type", "NAME", "what kind of agent it is for, as a label", action=Word, default="")
    add(
        "--workspace-path",
        "DIR",
        "where in /workspace its commands start; made when it is not there",
        action=Word,
        default="",
    )
    parser.add_argument("--read-only", action="store_true", help="it sees the workspace and cannot change it")
    parser.add_argument("--powerless", action="store_true", help="not even its root has capabilities")


def add_create_options(parser: Parser) -> None:
    add = add_wishes(
        *(parser, "the strongest that works here", "host, this machine's own tools"),
        *("0.5", "512m", "2g", "1h", "the usual list"),
    )
    add("--tenant", "NAME", "whom it belongs to", action=Word, default="")
    add("--manifest", "FILE", "YAML with files, directories and repositories to begin with", action=Word, default="")
    add("--git-repo", "URL", "clone this into /workspace, under its own name", action=Word, default="")
    add("--git-ref", "REF", "the branch, tag or commit of --git-repo", action=Word, default="")
    parser.add_argument(
        "--persistent", action="store_true", help="it can be stopped and started, and does not end by itself"
    )
