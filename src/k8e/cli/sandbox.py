"""The commands of `k8e sandbox`, and the options of each."""

from __future__ import annotations

from k8e.cli import values
from k8e.cli.arguments import Word, add_table, read_with
from k8e.cli.command import Command
from k8e.cli.run import OPTIONS, RunOptions, read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from k8e.cli.arguments import Parser


def add_owner(parser: Parser) -> None:
    """For commands about sessions: other sessions may have the same id."""
    about = "the session of this tenant, where several have the id"
    parser.add_argument("--tenant-id", default="", metavar="NAME", help=about)
    about = "the session of this owner: a user of the machine, or gateway"
    parser.add_argument("--owner", default="", metavar="UID", help=about)


def add_sid(parser: Parser) -> None:
    add_owner(parser)
    parser.add_argument("sid", metavar="SID")


def add_path(parser: Parser) -> None:
    add_sid(parser)
    parser.add_argument("path", metavar="PATH", help="relative ones begin at /workspace")


def add_run_id(parser: Parser) -> None:
    parser.add_argument("run_id", metavar="RUN-ID")


def add_run_options(parser: Parser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="default: standard input")
    add_table(parser, OPTIONS, RunOptions())


def add_list_options(parser: Parser) -> None:
    add_owner(parser)
    parser.add_argument("--phase", choices=("active", "all"), default="active", help="default: active")


def add_start_options(parser: Parser) -> None:
    add_sid(parser)
    for name, noun, about in (
        ("--env", "NAME=VALUE", "another variable for all its commands, or another value"),
        ("--secret", "NAME", "a variable with the value that it has here"),
    ):
        about = f"{about}; may be given several times"
        parser.add_argument(name, action="append", default=[], metavar=noun, help=about)


def add_hosts_options(parser: Parser) -> None:
    add_sid(parser)
    for name, about in (
        ("--add", "put these on the list"),
        ("--remove", "take these off it; connections to them are cut"),
        ("--hosts", "instead of the whole list"),
    ):
        parser.add_argument(name, action="append", metavar="HOSTS", help=about)
    parser.add_argument("--clear", action="store_true", help="take everything off it")


def add_write_options(parser: Parser) -> None:
    add_path(parser)
    parser.add_argument("--mode", choices=("w", "a"), default="w", help="w replaces (default), a appends")


def add_read_options(parser: Parser) -> None:
    add_path(parser)
    parser.add_argument("--raw", action="store_true", help="print the bytes as they are instead of JSON")


def add_files_options(parser: Parser) -> None:
    add_sid(parser)
    parser.add_argument("--path", action=Word, default="", metavar="DIR", help="default: /workspace")
    parser.add_argument("--since", type=float, default=0.0, metavar="TIME", help="only what changed after (unix time)")


def add_status_options(parser: Parser) -> None:
    about = "the tenant whose session is yours, as for `run --tenant`"
    parser.add_argument("--tenant", action=Word, default="", metavar="NAME", help=about)


def add_confirm_options(parser: Parser) -> None:
    add_sid(parser)
    parser.add_argument("action", metavar="ACTION", help="what is to be done, for the person who decides")
    seconds = read_with(read_seconds, "number of seconds", "more than 0")
    about = "for how long it can be answered; default: 30"
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help=about)
    parser.add_argument("--no-wait", action="store_true", help="print the approval's id at once")


def add_approve_options(parser: Parser) -> None:
    parser.add_argument("approval_id", metavar="APPROVAL-ID")
    about = "as the API key of a person, which is typed at the terminal: for approvals that root's programs ask for"
    parser.add_argument("--key", action="store_true", help=about)
    parser.add_argument("--reject", action="store_true", help="answer no")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the program that asked, and the audit log")


def add_approvals_options(parser: Parser) -> None:
    parser.add_argument("approval_id", nargs="?", default="", metavar="APPROVAL-ID")
    parser.add_argument("--all", action="store_true", help="those that are settled, too")


def add_sandbox_options(
    parser: Parser, runtime: str, image: str, cpus: str, memory: str, disk: str, ttl: str, hosts: str
) -> Callable[..., None]:
    """Options of `create` and `subagent` alike; the texts are their defaults. Returns what adds further options."""

    def add(name: str, noun: str, about: str, **settings: Any) -> None:
        parser.add_argument(name, metavar=noun, help=about, **settings)

    size, span = (
        read_with(values.read_size, "size", "such as 512m or 2g"),
        read_with(values.read_span, "span of time", "such as 90s, 15m, 2d"),
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
    add_owner(parser)
    parser.add_argument("parent", metavar="PARENT-SID", help="the session whose workspace it shares")
    same = "its parent's"
    add = add_sandbox_options(parser, same, same, same, same, same, same, "all that its parent may")
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
    add = add_sandbox_options(
        *(parser, "the strongest that works here", "host, this machine's own tools"),
        *("0.5", "512m", "2g", "1h", "the usual list"),
    )
    add(
        "--tenant",
        "NAME",
        "the tenant to which it belongs",
        action=Word,
        default="",
    )
    add("--manifest", "FILE", "YAML with files, directories and repositories to begin with", action=Word, default="")
    add("--git-repo", "URL", "clone this into /workspace, under its own name", action=Word, default="")
    add("--git-ref", "REF", "the branch, tag or commit of --git-repo", action=Word, default="")
    parser.add_argument(
        "--persistent", action="store_true", help="it can be stopped and started, and does not end by itself"
    )


SANDBOX = {
    "run": Command("run code or a shell command", "run:run_parsed", text="manual:RUN", options=add_run_options),
    "create": Command("make a session and print its id", "sessions:create", options=add_create_options),
    "subagent": Command(
        "make a session that shares another's workspace",
        "sessions:subagent",
        text="manual:SUBAGENT",
        options=add_child_options,
    ),
    "get": Command("show a session", "sessions:get", options=add_sid),
    "allow-hosts": Command(
        "show or change what a session may reach",
        "sessions:allow_hosts",
        text="manual:HOSTS",
        options=add_hosts_options,
    ),
    "sessions": Command("list your sessions", "sessions:list_sessions", options=add_list_options),
    "stop": Command("end what runs in a persistent session; its files stay", "sessions:stop", options=add_sid),
    "start": Command(
        "bring a stopped session back, with its files", "sessions:start", text="manual:START", options=add_start_options
    ),
    "destroy": Command("end a session with all that is in it", "sessions:destroy", options=add_sid),
    "write": Command("write standard input to a file of a session", "sessions:write", options=add_write_options),
    "read": Command("read a file of a session", "sessions:read", options=add_read_options),
    "list": Command("list the files of a session", "sessions:list_files", options=add_files_options),
    "status": Command(
        "say whether sandboxes work, and which session is yours", "sessions:status", options=add_status_options
    ),
    "poll": Command("show how a background run is doing", "sessions:poll", options=add_run_id),
    "kill": Command("end a background run", "sessions:kill", options=add_run_id),
    "ps": Command("list the commands of a session", "sessions:ps", options=add_sid),
    "log": Command("list the runs of a session", "sessions:log", options=add_sid),
    "confirm": Command(
        "ask a person whether something may be done",
        "approvals:confirm",
        text="manual:CONFIRM",
        options=add_confirm_options,
    ),
    "approve": Command(
        "answer such a question", "approvals:approve", text="manual:APPROVE", options=add_approve_options
    ),
    "approvals": Command(
        "list the questions that can be answered, or show one",
        "approvals:list_approvals",
        options=add_approvals_options,
    ),
}
