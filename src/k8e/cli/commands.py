"""The commands of `k8e`: everything but the usual spellings of `sandbox run` (run.py) goes through argparse here."""

from __future__ import annotations

import argparse
import os
import sys

from k8e.cli import manual
from k8e.cli.arguments import Parser, add_table
from k8e.cli.cluster.commands import CLUSTER, MEMBER
from k8e.cli.cluster.commands import SERVER as CLUSTER_SERVER
from k8e.cli.command import Command, add_commands, any_text
from k8e.cli.process import want_json, write_all
from k8e.cli.sandbox.commands import SANDBOX
from k8e.cli.values import read_life, read_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from k8e.cli.arguments import Table


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        write_all(1, f"k8e {version('k8e')}\n".encode())
        parser.exit()


class K8eParser(Parser):
    def advise(self, rest: list[str], options: list[str]) -> str:
        for name in GATEWAY:
            if name in options:
                return f"{name} stands before the command: `k8e {name} ... sandbox ...`"
        if not options and self.prog.endswith(" sandbox run"):
            return "the code is one word: put it in quotes; `--` before it when it begins with a dash"
        return super().advise(rest, options)

    def advise_command(self, word: str, known: list[str]) -> str:
        nearest = super().advise_command(word, known)
        if not nearest and word in SANDBOX and "sandbox" in known:
            return f"did you mean `{self.prog} sandbox {word}`?"
        return nearest


def dispatch(arguments: list[str]) -> int:
    if "--json" in arguments:  # an error about other words is JSON, too
        want_json()
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return 0
    parsed = parser.parse_args(arguments)
    for option in ("endpoint", "apikey", "profile"):
        if value := getattr(parsed, option):
            os.environ[f"K8E_SANDBOX_{option.upper()}"] = value
    if parsed.apikey:  # comes before the files that variables name
        os.environ.pop("K8E_SANDBOX_CERT", None)
        os.environ.pop("K8E_SANDBOX_KEY", None)
        os.environ.pop("K8E_SANDBOX_TOKEN_FILE", None)
    handler: Callable[[argparse.Namespace], int] = parsed.handler
    return handler(parsed)


def build_parser() -> K8eParser:
    parser = K8eParser(prog=os.path.basename(sys.argv[0]) or "k8e", description=manual.ABOUT)
    parser.add_argument("--version", action=Version, nargs=0, help="say which version this is")
    add_table(parser, GATEWAY, {})
    add_commands(parser, COMMANDS, JSON)
    return parser


GATEWAY: Table = {
    "--endpoint": (str, "HOST:PORT", "a gateway (default: this machine's own daemon)"),
    "--apikey": (str, "KEY", "a key for it; better in K8E_SANDBOX_APIKEY, where others cannot see it"),
    "--profile": (str, "NAME", "a connection profile: a gateway as `k8e connect` has named it (no security profile)"),
}
JSON: Table = {"--json": (None, "", "print JSON, as in a pipe, at a terminal too")}
SERVER: Table = {
    "--engine": (("local", "kubernetes"), "", "where sandboxes are made (default: local)"),
    "--tenant-namespaces": (None, "", "on Kubernetes: each tenant's in a namespace of its own"),
    **CLUSTER_SERVER,
}
NODE_HELPER: Table = {
    "--node": (str, "NAME", "the node's name in the cluster"),
    "--address": (str, "ADDRESS", "the node's address, where gateways reach the helper"),
    "--port": (int, "PORT", "default: 10541"),
    "--namespace": (str, "NAME", "where the sandboxes are (default: k8e)"),
    "--state": (str, "DIRECTORY", "default: /var/lib/k8e-node"),
    "--kubeconfig": (str, "FILE", "default: as a pod of the cluster is given it"),
    "--nameserver": (list, "ADDRESS", "instead of those of /etc/resolv.conf; can be given several times"),
}
DOCTOR: Table = {
    "--engine": (("local", "kubernetes"), "", "which engine's sandboxes are tried (default: local)"),
    "--json": (None, "", "print JSON instead of a table"),
    "--fix": (None, "", "first install what is missing, for every user, and remove what is left over"),
}
UNINSTALL: Table = {
    "--yes": (None, "", "do not ask; where there is no terminal it cannot be asked"),
    "--with-sessions": (None, "", "destroy the sessions that there are, with all their files"),
    "--keep-state": (None, "", "keep /var/lib/k8e: stopped sessions, images, keys, logs"),
    "--packages": (None, "", "also remove the system packages that `k8e doctor --fix` had installed"),
}
SKILL: Table = {
    "agent?": (
        ("kiro", "claude", "gemini", "codex", "cursor", "windsurf", "all"),
        "",
        "kiro, claude, gemini, codex, cursor, windsurf, all (default)",
    ),
    "--dry-run": (None, "", "only say what would be written"),
    "--uninstall": (None, "", "take it out again"),
}
NAME: Table = {"name": (str, "NAME", "")}
TENANT: Table = {"--tenant": (str, "NAME", "the tenant of the gateway that is to have it; root only")}
IMPORT: Table = {
    "file": (str, "FILE", "an archive, a directory, or - for standard input"),
    "--name": (str, "NAME", "default: as the archive calls it"),
    **TENANT,
}
GUEST: Table = {
    "--without": (list, "PATH", "leave a directory below /usr out; can be given several times"),
    "--check": (None, "", "build nothing: compare every file of the guest with its hash"),
}
PRUNE: Table = {
    "--unused-for": (read_span, "TIME", "only those not used for that long: 1h, 7d (default: all)"),
    **TENANT,
}
KEY: Table = {
    **NAME,
    "--ttl": (read_life, "TIME", "such as 30d (default), 12h or never"),
    "--scope": (("run", "operator", "admin"), "", "default: run"),
    "--tenant": (list, "NAME", "the tenant whose sandboxes the key is for; an operator's key may have several"),
}
MCP: Table = {
    "--http": (None, "", "serve Streamable HTTP at /mcp instead of stdin and stdout"),
    "--http-addr": (any_text, "HOST:PORT", "where; default: K8E_SANDBOX_MCP_ADDR, or :8811, which is 127.0.0.1"),
    "--endpoint": (str, "HOST:PORT", "a gateway"),
    "--tls-cert": (
        any_text,
        "FILE",
        "our certificate to the gateway, or the CA to trust; with --http: that of the server",
    ),
    "--tls-key": (any_text, "FILE", "its key"),
    "--tenant-id": (str, "NAME", "the tenant in which sessions are kept after the connection; as of `run --tenant`"),
}
CONNECT: Table = {
    "address?": (str, "HOST:PORT", "default: --endpoint"),
    "--name": (str, "NAME", "the connection profile's name; default: --profile, or default"),
}
LOGIN: Table = {"name?": (str, "PROFILE", "a connection profile; default: --profile, or the last one")}

IMAGES = {
    "pull": Command("get an image from its registry", "images.commands:pull", {**NAME, **TENANT}),
    "import": Command(
        "take an image from a file that docker save or skopeo wrote, or an OCI layout",
        "images.commands:import_image",
        IMPORT,
    ),
    "list": Command("list the images that you can use", "images.commands:list_images"),
    "remove": Command("forget an image", "images.commands:remove", {**NAME, **TENANT}),
    "prune": Command(
        "forget all your images that no session of yours is made of",
        "images.commands:prune",
        PRUNE,
        defaults={"unused_for": 0.0},
    ),
    "build-base": Command(
        "build k8e/base out of this machine's own package sources; root only", "images.commands:build_base"
    ),
    "build-guest": Command(
        "build the guest of virtual machines: a kernel and this machine's /usr; root only",
        "images.commands:build_guest",
        GUEST,
    ),
}
KEYS = {
    "create": Command("make a key; it is shown this once", "keys:create", KEY, defaults={"ttl": "30d", "scope": "run"}),
    "list": Command("list the keys", "keys:list_keys"),
    "delete": Command("revoke a key and all its certificates, at once", "keys:delete", NAME),
}
COMMANDS = {
    "sandbox": Command("run code, make sessions, handle their files", text="manual:SANDBOX", commands=SANDBOX),
    "server": Command(
        "run the daemon in the foreground, or a server of a cluster",
        "daemon:serve",
        SERVER,
        "manual:SERVER",
        defaults={"engine": "local", "tenant_namespaces": False},
    ),
    "agent": Command(
        "run a worker of a cluster in the foreground: K8E_URL, K8E_TOKEN",
        "cluster.member:work",
        MEMBER,
        "manual:AGENT",
    ),
    "cluster": Command("a Kubernetes cluster of one's own", text="manual:CLUSTER", commands=CLUSTER),
    "node-helper": Command(
        "run the helper of a Kubernetes node in the foreground",
        "daemon:help_node",
        NODE_HELPER,
        "manual:NODE_HELPER",
        defaults={
            "namespace": "k8e",
            "port": 10541,
            "state": "/var/lib/k8e-node",
            "kubeconfig": "",
            "nameserver": [],
            "node": "",
            "address": "",
        },
    ),
    "doctor": Command(
        "say what works on this machine, or on a cluster",
        "daemon:examine",
        DOCTOR,
        "manual:DOCTOR",
        defaults={"engine": "local"},
    ),
    "uninstall": Command(
        "take everything back that `k8e doctor --fix` has installed",
        "install.uninstall:uninstall",
        UNINSTALL,
        "manual:UNINSTALL",
    ),
    "sandbox-install-skill": Command(
        "tell agents about us", "skill.install:install_skill", SKILL, "manual:SKILL", defaults={"agent": "all"}
    ),
    "image": Command("what sandboxes can be made of", text="manual:IMAGE", commands=IMAGES),
    "sandbox-apikey": Command("keys for programs on other machines", text="manual:KEYS", commands=KEYS),
    "sandbox-mcp": Command(
        "serve sandboxes to agents (MCP)",
        "mcp.command:serve",
        MCP,
        "manual:MCP",
        # SUPPRESS: an --endpoint before the command is kept if none stands behind it.
        defaults={
            "http_addr": os.environ.get("K8E_SANDBOX_MCP_ADDR") or ":8811",
            "endpoint": argparse.SUPPRESS,
        },
    ),
    "connect": Command("use a gateway on another machine", "remote.connect:connect", CONNECT, "manual:CONNECT"),
    "top": Command(
        "show sessions, load, pool and refusals live",
        "top:top",
        {"--every": (read_span, "TIME", "how often it looks; default: 2s")},
        defaults={"every": 2.0},
    ),
    "completion": Command(
        "print a script that completes commands at the TAB key",
        "completion:main_k8e",
        {"shell": (("bash", "zsh", "fish"), "", "bash, zsh or fish")},
        "completion:ABOUT",
    ),
    "login": Command("get a new certificate for a profile", "remote.connect:login", LOGIN, "manual:LOGIN"),
}
