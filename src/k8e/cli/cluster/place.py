"""Finds this machine's files, the cluster that it is in, and the way to its API: for all commands of a cluster."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from k8e.cli.process import Failure

if TYPE_CHECKING:
    from k8e.cluster.api import Api
    from k8e.cluster.member.layout import Layout, Membership

T = TypeVar("T")


def require_root(command: str) -> None:
    if os.geteuid() != 0:
        raise Failure("needs_root", "a member of a cluster is root's", hint=f"sudo {command}")


def find_layout() -> Layout:
    """With the administrator's kubeconfig where this machine's server writes it."""
    from k8e.cluster.member.layout import Layout

    layout = Layout()
    if named := os.environ.get("K8E_KUBECONFIG_OUTPUT"):
        return Layout(kubeconfig=Path(named).absolute())
    if layout.kubeconfig_place.exists():
        return Layout(kubeconfig=Path(layout.kubeconfig_place.read_text().strip()))
    return layout


def find_membership(layout: Layout) -> Membership:
    from k8e.cluster.member.join import read_membership

    found = read_membership(layout)
    if found is None:
        hint = "`k8e server --cluster` makes a cluster, `k8e agent` joins one"
        raise Failure("no_cluster", "this machine is in no cluster", hint=hint)
    return found


def open_admin(layout: Layout) -> Api:
    """The API as a server's supervisor asks it."""
    from k8e.cluster.api import Api

    membership = find_membership(layout)
    if not layout.is_server:
        hint = f"a server is at {membership.url}"
        raise Failure("not_a_server", "this machine is a worker: that is asked on a server", hint=hint)
    return Api(membership.url, layout.tls / "server-ca.crt", layout.tls / "supervisor" / "client.pem")


def open_own(layout: Layout, membership: Membership) -> Api:
    """The API as this machine's node asks it, at any server; on a server as its supervisor."""
    from k8e.cluster.api import Api
    from k8e.cluster.member.servers.server_list import find_alive, read_servers

    if layout.is_server:
        return open_admin(layout)
    # Not by the forwarder: it ends with the supervisor.
    alive = find_alive(read_servers(layout.servers))
    url = f"https://{alive[0]}" if alive else membership.url
    return Api(url, membership.server_authority, layout.node_certificate)


def run(work: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(work)
