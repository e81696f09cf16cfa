"""Takes a server out of a cluster that has others: its member of etcd first, while there is a majority."""

from __future__ import annotations

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.departure import forget_node
from k8e.cluster.member.layout import Layout, Membership
from k8e.cluster.member.servers.etcd_members import EtcdMember, EtcdMembers, name_peer
from k8e.cluster.member.servers.server_list import PORT


def open_etcd(layout: Layout, *addresses: str) -> EtcdMembers:
    return EtcdMembers(addresses, layout.tls / "etcd-ca.crt", layout.tls / "supervisor" / "etcd.pem")


async def find_other_servers(layout: Layout, membership: Membership) -> list[EtcdMember]:
    """Returns the other servers that vote; empty on the last one."""
    members = await open_etcd(layout, "127.0.0.1").list_members()
    if members is None:
        hint = "most of the servers have to run; the last one goes with `k8e cluster uninstall`"
        raise ClusterError("cluster_unreachable", "etcd has no majority: no server can leave", hint=hint)
    return [each for each in members if each.peer != name_peer(membership.address) and not each.is_learner]


async def leave_etcd(layout: Layout, membership: Membership, others: list[EtcdMember]) -> None:
    etcd = open_etcd(layout, *(each.address for each in others))
    own = name_peer(membership.address)
    for member in await etcd.list_members() or []:
        if member.peer == own and not await etcd.remove(member):
            hint = "are the other servers well? `k8e cluster status`; try again in a few seconds"
            raise ClusterError("cluster_refuses", "etcd does not let this server go", hint=hint)


async def forget_server(layout: Layout, membership: Membership, others: list[EtcdMember]) -> bool:
    """Removes the server's node, at another server."""
    for other in others:
        url = f"https://{other.address}:{PORT}"
        api = Api(url, layout.tls / "server-ca.crt", layout.tls / "supervisor" / "client.pem")
        if await forget_node(api, membership.node):
            return True
    return False
