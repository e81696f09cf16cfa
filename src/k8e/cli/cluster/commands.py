"""The table of `k8e cluster` and the options of members. Nothing heavy is imported here."""

from __future__ import annotations

from k8e.cli.command import Command
from k8e.cli.values import read_life

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import Table

# Of every member: `k8e server --cluster` and `k8e agent`.
MEMBER: Table = {
    "--bin-dir": (str, "DIRECTORY", "where the cluster's programs are (default: /usr/local/lib/k8e-cluster)"),
    "--node-name": (str, "NAME", "this machine's name in the cluster (default: its own)"),
    "--node-ip": (str, "ADDRESS", "the address by which other machines reach it (default: that of the default route)"),
}
SERVER: Table = {
    "--cluster": (None, "", "make a Kubernetes cluster of this machine, with sandboxes on it"),
    "--disable-sandbox-matrix": (None, "", "with --cluster: only the cluster, without sandboxes"),
    **MEMBER,
}
BUILD: Table = {
    "--output": (str, "DIRECTORY", "where the programs and images go (default: /usr/local/lib/k8e-cluster)"),
    "--sandbox-root": (
        str,
        "FILE",
        "a tar archive of the files that sandboxes have (default: made of this machine's package sources)",
    ),
    "--without-sandboxes": (None, "", "no image for sandboxes: for `k8e server --cluster --disable-sandbox-matrix`"),
}
BACKUP: Table = {
    "--output": (str, "FILE", "where it goes (default: a name with the time, in /var/lib/k8e/server/backups)"),
    "--list": (None, "", "list the backups that this server has, instead"),
    "--check": (str, "FILE", "check a backup instead: every hash in it, and its snapshot by opening it"),
    "--bin-dir": MEMBER["--bin-dir"],
}
RESTORE: Table = {"file": (str, "FILE", "a backup"), **MEMBER}
TOKEN: Table = {
    "--server": (None, "", "with which a further server joins, not a worker"),
    "--ttl": (read_life, "TIME", "such as 24h (default), 7d or never"),
    "--description": (str, "TEXT", "what it is for"),
}
TOKEN_ID: Table = {"id": (str, "ID", "the six characters in front of the point of a token")}
END: Table = {
    "--yes": (None, "", "do not ask; where there is no terminal it cannot be asked"),
    "--with-sandboxes": (None, "", "end the sandboxes that run on this machine"),
}

TOKENS = {
    "create": Command(
        "make a token with which a machine joins; it is shown this once",
        "cluster.tokens:create",
        TOKEN,
        defaults={"ttl": "24h"},
    ),
    "list": Command("list the tokens, without their secrets", "cluster.tokens:list_all"),
    "delete": Command("delete a token; machines that joined with it stay", "cluster.tokens:delete", TOKEN_ID),
}
CLUSTER = {
    "build": Command(
        "build the cluster's programs from pinned Go modules; needs Go", "cluster.build:build", BUILD, "manual:BUILD"
    ),
    "status": Command("show the members, their programs and the gateway", "cluster.status:show_status"),
    "token": Command("tokens with which machines join", text="manual:TOKENS", commands=TOKENS),
    "backup": Command(
        "keep the cluster's objects and keys in a file, which is checked",
        "cluster.backups:backup",
        BACKUP,
        "manual:BACKUP",
    ),
    "restore": Command(
        "make this machine the first server of a cluster, from a backup",
        "cluster.backups:restore",
        RESTORE,
        "manual:RESTORE",
    ),
    "leave": Command("take this machine out of its cluster", "cluster.end:leave", END, "manual:LEAVE"),
    "uninstall": Command(
        "take the cluster off this machine, with all its data", "cluster.end:uninstall", END, "manual:CLUSTER_UNINSTALL"
    ),
}
