"""The interface of the node that leads to a pod: found by the pod's processes, and made a wire of its own.

Found without asking the pod or its network: processes of the pod are known by their control group, their network
namespace by the process, and the kernel says which interface of the node has its other end there. An address proves
nothing: a neighbour on the same bridge can claim any.

A bridge hands packets from pod to pod past the rules for routing. So the interface is taken out of its bridge: from
then on every packet of the pod is routed, as with the networks that have no bridge. The pod notices nothing: its
gateway has the hardware address that it had, and the node answers for its other neighbours.

Everything blocks for a moment, and can be done again after a crash in the middle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.netlink.links import (
    add_host_route,
    add_service_address,
    answer_for,
    answer_no_more,
    list_links,
    look_into,
    number_of,
    set_neighbour,
)
from k8e.engine.local.network.netlink.route import RouteSocket, set_mac, set_master

_PROC: Final = Path("/proc")
_SETTINGS: Final = {
    "ipv4/conf/{}/proxy_arp": "1",  # a refusal is told by a packet, so the packet that asks for it has to arrive
    "ipv4/neigh/{}/proxy_delay": "0",
    "ipv4/conf/{}/accept_redirects": "0",
    "ipv4/conf/{}/accept_source_route": "0",
    "ipv4/conf/{}/route_localnet": "0",
    "ipv4/conf/{}/send_redirects": "0",
    "ipv6/conf/{}/disable_ipv6": "1",  # closed, until there are rules for it here
}
_HINT: Final = "the helper needs the node's network, its processes (hostPID), and the capabilities of its manifest"


@dataclass(frozen=True, slots=True)
class PodLink:
    """One interface of the node, and the pod at its other end."""

    name: str
    address: str  # of the pod
    mac: str  # what the pod knows as its gateway's
    pod_mac: str
    bridge: str = ""  # which it was part of

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> PodLink | None:
        try:
            found = json.loads(path.read_text())
            return cls(**{str(name): str(value) for name, value in found.items()})
        except (OSError, ValueError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class PodWire(Wire):
    """A wire whose names and addresses are the cluster's."""

    name: str
    pod4: IPv4Address
    mac: str
    pod_mac: str

    @property
    def interface(self) -> str:
        return self.name

    @property
    def inner4(self) -> IPv4Address:
        return self.pod4

    @property
    def host_mac(self) -> str:
        return self.mac

    @property
    def inner_mac(self) -> str:
        return self.pod_mac


def _namespaces_of(uid: str) -> Iterator[int]:
    """Descriptors of the network namespaces in which processes of the pod are, the node's own left out."""
    names = (f"pod{uid}", f"pod{uid.replace('-', '_')}")
    seen = {os.stat("/proc/thread-self/ns/net").st_ino}
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            groups = (_PROC / entry / "cgroup").read_text()
            if not any(name in groups for name in names):
                continue
            descriptor = os.open(_PROC / entry / "ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if (number := os.fstat(descriptor).st_ino) not in seen:
                    seen.add(number)
                    yield descriptor
            finally:
                os.close(descriptor)


def find_link(uid: str, address: str) -> PodLink:
    """EngineError when there is none, or more than one: with a second network a pod has a second way out."""
    try:
        with RouteSocket() as kernel:
            links = list_links(kernel)
            numbers = [number_of(kernel, each) for each in _namespaces_of(uid)]
            found = [each for each in links if each.namespace >= 0 and each.namespace in numbers]
            if len(found) != 1:
                cause = f"{len(found)} interfaces of the node lead to the pod, and one is wanted"
                raise EngineError(
                    "pod network", cause, "pods with several networks, or with none of their own, cannot be"
                )
            (link,) = found
            pod_mac = look_into(kernel, link.namespace, link.peer).mac
            bridge = next((each for each in links if each.index == link.master), None)
    except OSError as error:
        raise EngineError("pod network", f"the pod's interface cannot be found: {error}", _HINT) from error
    mac, name = (link.mac, "") if bridge is None else (bridge.mac, bridge.name)
    return PodLink(link.name, address, mac, pod_mac, name)


def adopt_link(link: PodLink, wire: PodWire) -> None:
    """Makes the interface the pod's own wire. Its rules are in force already."""
    try:
        for name, value in _SETTINGS.items():
            _set(name.format(link.name), value)
        with RouteSocket() as kernel:
            index = kernel.index_of(link.name)
            if link.bridge:
                bridge = kernel.index_of(link.bridge)
                # A bridge has the hardware address of one of its ports, and another one when that port goes, unless it
                # was told to have this one.
                kernel.request(set_mac(bridge, link.mac), set_mac(index, link.mac), set_master(index, 0))
                kernel.request(answer_for(bridge, wire.inner4), fine=(errno.EEXIST,))
            kernel.request(add_service_address(index, wire.host4), fine=(errno.EEXIST,))
            kernel.request(add_host_route(index, wire.inner4), set_neighbour(index, wire.inner4, wire.inner_mac))
    except OSError as error:
        raise EngineError("pod network", f"{link.name} cannot be the pod's own: {error}", _HINT) from error


def forget_link(link: PodLink) -> None:
    """The interface has gone with its pod; what is left is the word for it on the bridge."""
    with contextlib.suppress(OSError), RouteSocket() as kernel:
        if link.bridge:
            kernel.request(
                answer_no_more(kernel.index_of(link.bridge), IPv4Address(link.address)), fine=(errno.ENOENT,)
            )


def _set(name: str, value: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # no IPv6
        Path("/proc/sys/net", name).write_text(value)
