"""Makes this machine a further server of a cluster: gets the authorities' keys, and a place among etcd's members.

A step that was interrupted is found by its result, and the next start goes on behind it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Any, Final
from urllib.parse import urlsplit

from k8e.cluster.api import Api, becomes_true
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.control_plane import ControlPlane
from k8e.cluster.member.join import JoinRefused, find_authority
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.servers.etcd_members import EtcdMember, EtcdMembers, name_peer, write_initial_cluster
from k8e.cluster.member.servers.key_files import write_keys
from k8e.cluster.member.servers.server_list import find_servers, read_servers
from k8e.cluster.member.servers.server_tokens import fetch_keys
from k8e.cluster.trust.join_token import JoinToken
from k8e.cluster.trust.leaves import write_file

Say = Callable[[str], None]
_PATIENCE: Final = 300.0  # for others that join at the same time, and for the data to arrive


async def receive_keys(layout: Layout, url: str, token: JoinToken) -> None:
    """Gets the cluster's keys, if this machine has none yet."""
    authority = await asyncio.to_thread(find_authority, url, token)
    keys = await fetch_keys(Api(url, authority, token=token.bearer), token)
    await asyncio.to_thread(write_keys, layout, keys)
    write_file(layout.server_token, f"{token.text}\n".encode())


def has_data(layout: Layout) -> bool:
    return (layout.etcd / "member").exists()


def check_start(layout: Layout) -> None:
    """Refuses to begin a second cluster under the name of the first: with its keys, and without its data."""
    if not has_data(layout) and (layout.node_token.exists() or layout.initial_cluster.exists()):
        hint = (
            "join again, with K8E_URL of another server and K8E_TOKEN from its file server-token; "
            "if there is none: `k8e cluster restore FILE`"
        )
        raise JoinRefused("etcd_data_missing", f"this server's data is not in {layout.etcd}", hint=hint)


async def remove_earlier_node(api: Api, layout: Layout, node: str, address: IPv4Address) -> None:
    """Removes this server's earlier node, whose certificate is lost with its disk. Another machine's of the same name
    stays."""
    path = f"/api/v1/nodes/{node}"
    if layout.node_certificate.exists() or (answer := await api.get(path)) is None or answer[0] != 200:
        return
    status: dict[str, Any] = json.loads(answer[1]).get("status") or {}
    addresses = {each.get("address") for each in status.get("addresses") or []}
    ready = {each["type"]: each["status"] for each in status.get("conditions") or []}.get("Ready") == "True"
    if ready and str(address) not in addresses:
        hint = "give this machine another name: --node-name NAME"
        raise JoinRefused("name_taken", f"there is a node {node}, and it is another machine", hint=hint)
    await api.request("DELETE", path)


class ServerJoin:
    """The way of one server into etcd. `prepare` comes before its etcd starts, `finish` afterwards."""

    def __init__(
        self, layout: Layout, control_plane: ControlPlane, url: str, node: str, address: IPv4Address, say: Say
    ) -> None:
        self._layout = layout
        self._control_plane = control_plane
        self._api = Api(url, control_plane.public("server"), control_plane.own_certificate)
        self._host = urlsplit(url).hostname or ""
        self._node = node
        self._address = str(address)
        self._peer = name_peer(address)
        self._say = say

    async def prepare(self) -> bool:
        """Returns whether this server still has to get its vote. One that has its data starts also when no other
        answers: after a power failure of all, each would wait for the others."""
        try:
            etcd, members = await self._find_members()
        except JoinRefused:
            if has_data(self._layout):
                return False
            raise
        mine = next((each for each in members if each.peer == self._peer), None)
        if has_data(self._layout):
            if mine is not None:
                return mine.is_learner
            self._put_aside()
        for member in members:
            await self._judge(etcd, member)
        await self._until(lambda: self._add(etcd), "etcd takes no further member")
        self._say("etcd has a place for this server")
        return True

    async def finish(self) -> None:
        """Returns when this server's etcd has its vote."""
        etcd, _ = await self._find_members()

        async def votes() -> bool:
            members = await etcd.list_members() or []
            mine = next((each for each in members if each.peer == self._peer), None)
            if mine is not None and mine.is_learner:
                await etcd.promote(mine)
                return False
            return mine is not None

        await self._until(votes, "this server's etcd does not catch up")
        self._say("etcd has the data, and votes")

    async def _find_members(self) -> tuple[EtcdMembers, list[EtcdMember]]:
        """Asks one etcd after the other for the list, then makes a client of all that are in it."""
        servers = [*(await find_servers(self._api) or ()), *read_servers(self._layout.servers)]
        addresses = [each.rpartition(":")[0] for each in servers]
        known = self._control_plane.list_etcd([*addresses, self._host])
        members = await known.list_members()
        if members is None:
            text = "the etcd of the cluster does not answer"
            hint = "port 2379 of a server has to be reachable from this machine; are most of the servers up?"
            raise JoinRefused("cluster_unreachable", text, hint=hint)
        others = [each.address for each in members if each.peer != self._peer]
        return self._control_plane.list_etcd(others), members

    async def _judge(self, etcd: EtcdMembers, member: EtcdMember) -> None:
        """Removes members that are gone: this server's own earlier one, and those whose node was removed. One that
        does not answer, and that no one has given up, is an error: a cluster with it would not survive one more."""
        if member.peer != self._peer and await etcd.is_alive(member):
            if member.name != self._node:
                return
            text = f"there is a server {self._node}, at {member.address}"
            raise JoinRefused("name_taken", text, hint="give this machine another name: --node-name NAME")
        if self._node != member.name and self._peer != member.peer:
            answer = await self._api.get(f"/api/v1/nodes/{member.name}") if member.name else (404, b"")
            if answer is None or answer[0] != 404:
                text = f"the server {member.name} does not answer"
                hint = f"start it again; if it is gone for good: kubectl delete node {member.name}, then join again"
                raise JoinRefused("server_lost", text, detail=f"its etcd: {member.peer}", hint=hint)
            if not member.name:
                return  # another server, which is joining
        self._say(f"the lost member {member.name or member.peer} of etcd is removed")
        await etcd.remove(member)

    async def _add(self, etcd: EtcdMembers) -> bool:
        members = await etcd.list_members()
        if members is None:
            return False
        if all(each.peer != self._peer for each in members):
            await etcd.add_learner(self._peer)
            return False
        write_file(self._layout.initial_cluster, write_initial_cluster(members, self._node, self._address).encode())
        return True

    def _put_aside(self) -> None:
        """Data of a member that was removed is of no use to etcd; it is kept for a person to look at."""
        path = self._layout.etcd.with_name("etcd-removed")
        shutil.rmtree(path, ignore_errors=True)
        self._layout.etcd.rename(path)
        self._say(f"this server was removed from etcd: its data is now in {path}")

    async def _until(self, question: Callable[[], Any], what: str) -> None:
        if not await becomes_true(question, _PATIENCE):
            hint = "etcd's log is in /var/lib/k8e/logs; another server may be joining: try again"
            raise ClusterError("server_not_joined", f"{what} after {_PATIENCE:.0f} s", hint=hint)
