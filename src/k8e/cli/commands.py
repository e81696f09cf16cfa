"""The whole command line in argparse: everything but the usual spellings of `sandbox run` (options.py)."""

from __future__ import annotations

import argparse
import os
import sys

from k8e.cli import amounts, handlers, manual, sessions
from k8e.cli.arguments import Parser, Word, read_with
from k8e.cli.process import write_all
from k8e.cli.sandbox import add_sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from k8e.cli.arguments import Handler


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        write_all(1, f"k8e {version('k8e')}\n".encode())
        parser.exit()


class Commands(Parser):
    def advise(self, rest: list[str]) -> str:
        options = [word.partition("=")[0] for word in rest if word.startswith("-")]
        for name in ("--endpoint", "--apikey", "--profile"):
            if name in options:
                return f"{name} stands before the command: `k8e {name} ... sandbox ...`"
        if not options and self.prog.endswith(" sandbox run"):
            return "the code is one word: put it in quotes; `--` before it when it begins with a dash"
        return ""


def dispatch(arguments: list[str]) -> int:
    parsed = build_parser().parse_args(arguments)
    for flag in ("endpoint", "apikey", "profile"):
        if value := getattr(parsed, flag):
            os.environ[f"K8E_SANDBOX_{flag.upper()}"] = value
    handler: Handler = parsed.handler
    return handler(parsed)


def build_parser() -> Commands:
    parser = Commands(prog=os.path.basename(sys.argv[0]) or "k8e", description=manual.ABOUT)
    parser.add_argument("--version", action=Version, nargs=0, help="say which version this is")
    parser.add_argument(
        "--endpoint", action=Word, metavar="HOST:PORT", help="a gateway (default: this machine's own daemon)"
    )
    parser.add_argument(
        "--apikey",
        action=Word,
        metavar="KEY",
        help="a key for it; better in K8E_SANDBOX_APIKEY, where others cannot see it",
    )
    parser.add_argument(
        "--profile", action=Word, metavar="NAME", help="a gateway that `k8e connect` has given this name"
    )
    commands_of = parser.add_subparsers(metavar="COMMAND", required=True)
    add_sandbox(commands_of)
    server = commands_of.add_parser("server", help="run the daemon in the foreground", description=manual.SERVER)
    server.set_defaults(handler=handlers.serve)
    doctor = commands_of.add_parser("doctor", help="say what works on this machine", description=manual.DOCTOR)
    add_doctor_options(doctor)
    doctor.set_defaults(handler=handlers.examine)
    skill = commands_of.add_parser("sandbox-install-skill", help="tell agents about us", description=manual.SKILL)
    names = ("kiro", "claude", "gemini", "codex", "all")
    skill.add_argument("agent", nargs="?", choices=names, default="all", help=f"{', '.join(names)} (default)")
    skill.add_argument("--dry-run", action="store_true", help="only say what would be written")
    skill.add_argument("--uninstall", action="store_true", help="take it out again")
    skill.set_defaults(handler=handlers.install_skill)
    add_images(commands_of)
    add_keys(commands_of)
    add_mcp(commands_of)
    add_connections(commands_of)
    return parser


def add_doctor_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fix", action="store_true", help="first install what is missing and remove what is left over")


def add_images(parent: Any) -> None:
    image = parent.add_parser("image", help="what sandboxes can be made of", description=manual.IMAGE)
    subcommands = image.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, function: str, about: str) -> Parser:
        added: Parser = subcommands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        added.set_defaults(handler=lambda parsed: handlers.run_image(function, parsed))
        return added

    pull = add("pull", "pull", "get an image from its registry")
    pull.add_argument("name", metavar="NAME")
    take = add("import", "add", "take an image from a file that docker save or skopeo wrote, or an OCI layout")
    take.add_argument("file", metavar="FILE", help="an archive, a directory, or - for standard input")
    take.add_argument(
        "--name", dest="image", action=Word, default="", metavar="NAME", help="default: as the archive calls it"
    )
    add("list", "list_images", "list the images that you can use")
    remove = add("remove", "remove", "forget an image")
    remove.add_argument("name", metavar="NAME")
    prune = add("prune", "prune", "forget all your images that no session of yours is made of")
    span = read_with(amounts.read_span, "span of time", "such as 90s, 15m, 2d")
    about = "only those not used for that long: 1h, 7d (default: all)"
    prune.add_argument("--unused-for", type=span, default=0.0, metavar="TIME", help=about)
    for parser in (pull, take, remove, prune):
        parser.add_argument(
            "--tenant", action=Word, default="", metavar="NAME", help="of the gateway, whose it is to be; root only"
        )
    add("build-base", "build_base", "build k8e/base out of this machine's own package sources; root only")


def add_keys(parent: Any) -> None:
    keys = parent.add_parser("sandbox-apikey", help="keys for programs on other machines", description=manual.KEYS)
    subcommands = keys.add_subparsers(metavar="COMMAND", required=True)
    create = subcommands.add_parser("create", help="make a key; it is shown this once")
    create.add_argument("name", metavar="NAME")
    life = read_with(amounts.read_life, "span of time", "such as 12h, 30d, or never")
    create.add_argument("--ttl", type=life, default="30d", metavar="TIME", help="such as 30d (default), 12h or never")
    create.add_argument("--scope", choices=("run", "operator", "admin"), default="run", help="default: run")
    create.add_argument(
        "--tenant", action="append", default=[], metavar="NAME", help="whose sandboxes; an operator's may be several"
    )
    create.set_defaults(handler=sessions.create_key)
    subcommands.add_parser("list", help="list the keys").set_defaults(handler=sessions.list_keys)
    delete = subcommands.add_parser("delete", help="revoke a key and all its certificates, at once")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(handler=sessions.delete_key)


def add_mcp(parent: Any) -> None:
    mcp = parent.add_parser("sandbox-mcp", help="serve sandboxes to agents (MCP)", description=manual.MCP)
    mcp.add_argument("--http", action="store_true", help="serve Streamable HTTP at /mcp instead of stdin and stdout")
    mcp.add_argument(
        "--http-addr",
        default=os.environ.get("K8E_SANDBOX_MCP_ADDR") or ":8811",
        metavar="HOST:PORT",
        help="where; default: K8E_SANDBOX_MCP_ADDR, or :8811, which is 127.0.0.1",
    )
    # SUPPRESS: what stands before the subcommand is not overwritten by what does not stand behind it.
    mcp.add_argument("--endpoint", action=Word, default=argparse.SUPPRESS, metavar="HOST:PORT", help="a gateway")
    mcp.add_argument(
        "--tls-cert",
        default="",
        metavar="FILE",
        help="who we are to the gateway, or whom to trust; with --http: what clients are shown",
    )
    mcp.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    mcp.add_argument(
        "--tenant-id", action=Word, default="", metavar="NAME", help="keep sessions for this tenant, and use its own"
    )
    mcp.set_defaults(handler=handlers.run_mcp)


def add_connections(parent: Any) -> None:
    connect = parent.add_parser("connect", help="use a gateway on another machine", description=manual.CONNECT)
    connect.add_argument("address", nargs="?", metavar="HOST:PORT", help="default: --endpoint")
    connect.add_argument(
        "--name", action=Word, default="", metavar="NAME", help="the profile's name; default: --profile, or default"
    )
    connect.set_defaults(handler=handlers.run_connect)
    login = parent.add_parser("login", help="get a new certificate for a profile", description=manual.LOGIN)
    login.add_argument("name", nargs="?", default="", metavar="PROFILE", help="default: --profile, or the last one")
    login.set_defaults(handler=handlers.run_login)
