"""`k8e cluster backup` and `k8e cluster restore`, on a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k8e.cli.cluster.member import read_address
from k8e.cli.cluster.place import find_layout, find_membership, require_root
from k8e.cli.process import Failure
from k8e.cli.view import show_value
from k8e.cluster.api import Api
from k8e.cluster.member.backups.backup import check_backup, list_backups, make_backup
from k8e.cluster.member.backups.restoration import restore_backup
from k8e.cluster.member.departure import find_supervisor
from k8e.cluster.member.member import find_address, name_node
from k8e.cluster.programs import USUAL, open_programs

if TYPE_CHECKING:
    import argparse


def backup(options: argparse.Namespace) -> int:
    require_root("k8e cluster backup")
    etcdutl = find_etcdutl(options)
    if options.check:
        show_value({"ok": True, **check_backup(Path(options.check).absolute(), etcdutl).body})
        return 0
    layout = find_layout()
    if options.list:
        found = [{"file": str(path), "size": path.stat().st_size} for path in list_backups(layout)]
        show_value({"ok": True, "backups": found}, "backups")
        return 0
    membership = find_membership(layout)
    if not layout.is_server:
        hint = f"a server is at {membership.url}"
        raise Failure("not_a_server", "this machine is a worker: that is asked on a server", hint=hint)
    etcd = Api("https://127.0.0.1:2379", layout.tls / "etcd-ca.crt", layout.tls / "supervisor" / "etcd.pem")
    target = Path(options.output).absolute() if options.output else None
    show_value({"ok": True, **make_backup(layout, etcd, etcdutl, membership.node, target).body})
    return 0


def restore(options: argparse.Namespace) -> int:
    require_root("k8e cluster restore FILE")
    layout = find_layout()
    if find_supervisor(layout) is not None:
        hint = "end it first: `systemctl stop k8e`, or SIGTERM to `k8e server --cluster`"
        raise Failure("already_running", "a supervisor runs on this machine", hint=hint)
    node = options.node_name.lower() or name_node()
    address = read_address(options.node_ip) if options.node_ip else find_address()
    done = restore_backup(layout, Path(options.file).absolute(), find_etcdutl(options), node, address)
    show_value({"ok": True, **done.body, "next": "k8e server --cluster"})
    return 0


def find_etcdutl(options: argparse.Namespace) -> Path:
    return open_programs(Path(options.bin_dir or USUAL).absolute()).program("etcdutl")
