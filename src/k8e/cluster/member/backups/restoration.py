"""Makes this machine the only server of a cluster, as a backup has it. The other servers join again; workers stay."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from ipaddress import IPv4Address
from pathlib import Path

from k8e.cluster.child import list_programs
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.backups.backup import Backup, unpack_backup
from k8e.cluster.member.backups.snapshot import make_data
from k8e.cluster.member.layout import USERS, Layout
from k8e.cluster.member.servers.key_files import check_keys, write_keys
from k8e.cluster.member.servers.server_list import PORT, find_alive, read_servers


def restore_backup(layout: Layout, path: Path, etcdutl: Path, node: str, address: IPv4Address) -> Backup:
    """Puts a backup in the place of this server's data, which is kept beside it. No supervisor may run. It can be
    killed and repeated: data and keys that are in their place are whole."""
    _refuse_running(layout, address)
    layout.server.mkdir(mode=0o711, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=layout.server) as temporary:
        backup, snapshot, keys = unpack_backup(path, Path(temporary), etcdutl)
        check_keys(layout, keys)
        data = Path(temporary, "data")
        make_data(etcdutl, snapshot, data, node, address, f"k8e-{secrets.token_hex(8)}")
        _give(data, USERS["etcd"])
        write_keys(layout, keys)
        layout.initial_cluster.unlink(missing_ok=True)
        earlier = layout.etcd.with_name("etcd-before-restore")
        if layout.etcd.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            layout.etcd.rename(earlier)
        data.rename(layout.etcd)
    # A token is an object of the cluster: that of the backup's time is in the backup's file or gone.
    layout.server_token.unlink(missing_ok=True)
    return backup


def _refuse_running(layout: Layout, address: IPv4Address) -> None:
    """Two halves of one cluster, each with other data, would both be believed."""
    if programs := list_programs(layout.logs):
        hint = "end it first: `systemctl stop k8e-cluster`, or SIGTERM to `k8e server --cluster`"
        detail = ", ".join(sorted(programs))
        raise ClusterError("already_running", "the cluster's programs run on this machine", detail=detail, hint=hint)
    others = [each for each in read_servers(layout.servers) if each != f"{address}:{PORT}"]
    if alive := find_alive(others):
        text = f"other servers of this cluster run: {', '.join(alive)}"
        hint = "end all servers first; they join again afterwards, with K8E_URL of this one and its server-token"
        raise ClusterError("servers_running", text, hint=hint)


def _give(folder: Path, user: int) -> None:
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(parent, name), user, user, follow_symlinks=False)
