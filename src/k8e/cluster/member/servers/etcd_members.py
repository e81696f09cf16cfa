"""The members of the cluster's etcd: who they are, and who becomes one, by etcd's own HTTP interface.

Every decision is made from the list of members, never from the text of an error: a step whose answer was lost is seen
in the next list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from k8e.cluster.api import Api

CLIENTS, PEERS = 2379, 2380
_OK: Final = 200


@dataclass(frozen=True, slots=True)
class EtcdMember:
    id: str
    name: str  # the node's; empty for one that was added and has never run
    peer: str  # the URL by which the others reach it
    is_learner: bool

    @property
    def address(self) -> str:
        return urlsplit(self.peer).hostname or ""


def name_peer(address: object) -> str:
    return f"https://{address}:{PEERS}"


def write_initial_cluster(members: Sequence[EtcdMember], node: str, address: object) -> str:
    """Returns the members as a new one has to be told of them: with itself, and under its name."""
    named = {member.peer: member.name for member in members if member.name}
    named[name_peer(address)] = node
    return ",".join(f"{name}={peer}" for peer, name in sorted(named.items()))


class EtcdMembers:
    """Asks each of several members, until one answers."""

    def __init__(self, addresses: Sequence[str], authority: Path, certificate: Path) -> None:
        self._apis = {address: Api(f"https://{address}:{CLIENTS}", authority, certificate) for address in addresses}

    async def list_members(self) -> list[EtcdMember] | None:
        """Returns the members as a majority of them knows them; None when there is no answer."""
        body = await self._ask("list", {"linearizable": True})
        return None if body is None else [_read(each) for each in body.get("members", [])]

    async def add_learner(self, peer: str) -> bool:
        """Adds a member that gets all data and has no vote yet. etcd takes one of these at a time."""
        return await self._ask("add", {"peerURLs": [peer], "isLearner": True}) is not None

    async def promote(self, member: EtcdMember) -> bool:
        """Gives a learner its vote; etcd refuses as long as it has not caught up."""
        return await self._ask("promote", {"ID": member.id}) is not None

    async def remove(self, member: EtcdMember) -> bool:
        return await self._ask("remove", {"ID": member.id}) is not None

    async def is_alive(self, member: EtcdMember) -> bool:
        """Whether a member answers, with or without a majority. Only members that this was made with can be asked."""
        return member.address in self._apis and await self._apis[member.address].is_served("/livez")()

    async def _ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
        for api in self._apis.values():
            answer = await api.request("POST", f"/v3/cluster/member/{verb}", body)
            if answer is not None and answer[0] == _OK:
                found: dict[str, Any] = json.loads(answer[1])
                return found
        return None


def _read(found: dict[str, Any]) -> EtcdMember:
    peers = found.get("peerURLs") or [""]
    return EtcdMember(str(found["ID"]), found.get("name", ""), peers[0], bool(found.get("isLearner")))
