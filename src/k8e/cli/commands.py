"""The commands of `k8e`: everything but the usual spellings of `sandbox run` (run.py) goes through argparse here."""

from __future__ import annotations

import argparse
import os
import sys

from k8e.cli import manual, values
from k8e.cli.arguments import Parser, Word, read_with
from k8e.cli.command import Command, add_commands
from k8e.cli.process import write_all
from k8e.cli.sandbox import SANDBOX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        write_all(1, f"k8e {version('k8e')}\n".encode())
        parser.exit()


class K8eParser(Parser):
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
    for option in ("endpoint", "apikey", "profile"):
        if value := getattr(parsed, option):
            os.environ[f"K8E_SANDBOX_{option.upper()}"] = value
    handler: Callable[[argparse.Namespace], int] = parsed.handler
    return handler(parsed)


def build_parser() -> K8eParser:
    parser = K8eParser(prog=os.path.basename(sys.argv[0]) or "k8e", description=manual.ABOUT)
    parser.add_argument("--version", action=Version, nargs=0, help="say which version this is")
    for name, noun, about in (
        ("--endpoint", "HOST:PORT", "a gateway (default: this machine's own daemon)"),
        ("--apikey", "KEY", "a key for it; better in K8E_SANDBOX_APIKEY, where others cannot see it"),
        ("--profile", "NAME", "a connection profile: a gateway as `k8e connect` has named it (no security profile)"),
    ):
        parser.add_argument(name, action=Word, metavar=noun, help=about)
    add_commands(parser, COMMANDS)
    return parser


def add_doctor_options(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fix", action="store_true", help="first install what is missing and remove what is left over")


def add_skill_options(parser: Parser) -> None:
    names = ("kiro", "claude", "gemini", "codex", "all")
    parser.add_argument("agent", nargs="?", choices=names, default="all", help=f"{', '.join(names)} (default)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--uninstall", action="store_true", help="take it out again")


def add_image_name(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    add_image_tenant(parser)


def add_image_tenant(parser: Parser) -> None:
    about = "the tenant of the gateway that is to have it; root only"
    parser.add_argument("--tenant", action=Word, default="", metavar="NAME", help=about)


def add_import_options(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="an archive, a directory, or - for standard input")
    about = "default: as the archive calls it"
    parser.add_argument("--name", dest="image", action=Word, default="", metavar="NAME", help=about)
    add_image_tenant(parser)


def add_prune_options(parser: Parser) -> None:
    span = read_with(values.read_span, "span of time", "such as 90s, 15m, 2d")
    about = "only those not used for that long: 1h, 7d (default: all)"
    parser.add_argument("--unused-for", type=span, default=0.0, metavar="TIME", help=about)
    add_image_tenant(parser)


IMAGE = {
    "pull": Command("get an image from its registry", "images:pull", options=add_image_name),
    "import": Command(
        "take an image from a file that docker save or skopeo wrote, or an OCI layout",
        "images:import_image",
        options=add_import_options,
    ),
    "list": Command("list the images that you can use", "images:list_images"),
    "remove": Command("forget an image", "images:remove", options=add_image_name),
    "prune": Command(
        "forget all your images that no session of yours is made of", "images:prune", options=add_prune_options
    ),
    "build-base": Command("build k8e/base out of this machine's own package sources; root only", "images:build_base"),
}


def add_key_options(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME")
    life = read_with(values.read_life, "span of time", "such as 12h, 30d, or never")
    parser.add_argument("--ttl", type=life, default="30d", metavar="TIME", help="such as 30d (default), 12h or never")
    parser.add_argument("--scope", choices=("run", "operator", "admin"), default="run", help="default: run")
    about = "the tenant whose sandboxes the key is for; an operator's key may have several"
    parser.add_argument("--tenant", action="append", default=[], metavar="NAME", help=about)


KEYS = {
    "create": Command("make a key; it is shown this once", "keys:create", options=add_key_options),
    "list": Command("list the keys", "keys:list_keys"),
    "delete": Command(
        "revoke a key and all its certificates, at once",
        "keys:delete",
        options=lambda parser: parser.add_argument("name", metavar="NAME"),
    ),
}


def add_mcp_options(parser: Parser) -> None:
    parser.add_argument("--http", action="store_true", help="serve Streamable HTTP at /mcp instead of stdin and stdout")
    parser.add_argument(
        "--http-addr",
        default=os.environ.get("K8E_SANDBOX_MCP_ADDR") or ":8811",
        metavar="HOST:PORT",
        help="where; default: K8E_SANDBOX_MCP_ADDR, or :8811, which is 127.0.0.1",
    )
    # SUPPRESS: what stands before the subcommand is not overwritten by what does not stand behind it.
    parser.add_argument("--endpoint", action=Word, default=argparse.SUPPRESS, metavar="HOST:PORT", help="a gateway")
    about = "who we are to the gateway, or whom to trust; with --http: what clients are shown"
    parser.add_argument("--tls-cert", default="", metavar="FILE", help=about)
    parser.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    about = "the tenant in which sessions are kept after the connection; it is what `run --tenant` names"
    parser.add_argument("--tenant-id", action=Word, default="", metavar="NAME", help=about)


def add_connect_options(parser: Parser) -> None:
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="default: --endpoint")
    about = "the connection profile's name; default: --profile, or default"
    parser.add_argument("--name", action=Word, default="", metavar="NAME", help=about)


def add_login_options(parser: Parser) -> None:
    about = "a connection profile; default: --profile, or the last one"
    parser.add_argument("name", nargs="?", default="", metavar="PROFILE", help=about)


COMMANDS = {
    "sandbox": Command("run code, make sessions, handle their files", text="manual:SANDBOX", commands=SANDBOX),
    "server": Command("run the daemon in the foreground", "daemon:serve", text="manual:SERVER"),
    "doctor": Command(
        "say what works on this machine", "daemon:examine", text="manual:DOCTOR", options=add_doctor_options
    ),
    "sandbox-install-skill": Command(
        "tell agents about us", "skill.install:install_skill", text="manual:SKILL", options=add_skill_options
    ),
    "image": Command("what sandboxes can be made of", text="manual:IMAGE", commands=IMAGE),
    "sandbox-apikey": Command("keys for programs on other machines", text="manual:KEYS", commands=KEYS),
    "sandbox-mcp": Command("serve sandboxes to agents (MCP)", "mcp:serve", text="manual:MCP", options=add_mcp_options),
    "connect": Command(
        "use a gateway on another machine", "remote.connect:connect", text="manual:CONNECT", options=add_connect_options
    ),
    "login": Command(
        "get a new certificate for a profile", "remote.connect:login", text="manual:LOGIN", options=add_login_options
    ),
}
