"""Builds the policies: what a list of hosts is in Cilium's words. Pure.

Policies add up, and a denial comes before whatever any of them allows. A rule that names nothing allows nothing, and a
pod that some policy selects reaches only what some policy allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, collapse_addresses, ip_network
from typing import Any, Final

from lightkube.models.meta_v1 import ObjectMeta

from k8e.engine.kubernetes import names
from k8e.engine.kubernetes.cilium.objects import (
    GROUP,
    NOW,
    TURN,
    TURN_PORTS,
    USED,
    VERSION,
    CiliumNetworkPolicy,
    policy_name,
)
from k8e.engine.kubernetes.egress_objects import LIST, digest_list
from k8e.policy import FORBIDDEN, PRIVATE, HostEntry, HostList, Network

Rule = dict[str, Any]
_DNS: Final = 53
_API: Final = f"{GROUP}/{VERSION}"
# IPv6 addresses that contain an IPv4 address (NAT64, 6to4) are closed as a whole here: block by block they would be ten
# times as many rules in every pod.
_TRANSLATED: Final = (IPv6Network("64:ff9b::/32"), IPv6Network("2002::/16"))
_NEVER: Final[tuple[Network, ...]] = (
    *(block for block in FORBIDDEN if isinstance(block, IPv4Network)),
    *collapse_addresses((*(block for block in FORBIDDEN if isinstance(block, IPv6Network)), *_TRANSLATED)),
)
_CLOSED: Final = {"ingress": True, "egress": True}
# The pods of the cluster's own name service, as all installers label them.
_NAME_SERVICE: Final = {"k8s:io.kubernetes.pod.namespace": "kube-system", "k8s:k8s-app": "kube-dns"}


def build_base(gateway: str) -> CiliumNetworkPolicy:
    """For all sandboxes of a gateway, with or without a list: nothing comes in or goes out, and what no list can open
    is denied."""
    everyone = {"matchLabels": dict(names.labels(gateway))}
    closed = {
        "endpointSelector": everyone,
        "ingress": [{}],
        "egress": [{}],
        "egressDeny": [{"toCIDRSet": [{"cidr": str(block)} for block in _NEVER]}, {"toEntities": ["kube-apiserver"]}],
        "enableDefaultDeny": _CLOSED,
    }
    turns = [
        {
            "endpointSelector": {"matchLabels": {**names.labels(gateway), TURN: str(turn)}},
            "ingress": [_let_in(port)],
            "enableDefaultDeny": _CLOSED,
        }
        for turn, port in enumerate(TURN_PORTS)
    ]
    return _build(names.policy_name(gateway), gateway, [closed, *turns])


def build_list(gateway: str, hosts: HostList, nameservers: Sequence[str], agent_port: int) -> CiliumNetworkPolicy:
    """For the sandboxes that have this list. It alone opens the agent's port: a gateway that reaches an agent knows
    that the list of its pod is in force."""
    digest = digest_list(hosts)
    own = names.labels(gateway)
    selectors: tuple[Rule, ...] = (
        {
            "matchLabels": {**own, LIST: digest},
            "matchExpressions": [{"key": NOW, "operator": "DoesNotExist"}],
        },
        {"matchLabels": {**own, NOW: digest}},
    )
    parts = {
        "ingress": [_let_in(agent_port)],
        "egress": [*_allow(hosts), *_resolve(hosts, nameservers)] or [{}],
        "egressDeny": list(_deny(hosts, nameservers)),
        "enableDefaultDeny": _CLOSED,
    }
    specs = [{"endpointSelector": selector, **parts} for selector in selectors]
    return _build(policy_name(gateway, digest), gateway, specs)


def _build(name: str, gateway: str, specs: list[Rule]) -> CiliumNetworkPolicy:
    return CiliumNetworkPolicy(
        api_version=_API,
        kind="CiliumNetworkPolicy",
        metadata=ObjectMeta(name=name, labels=dict(names.labels(gateway)), annotations={USED: "never"}),
        specs=specs,
    )


def _let_in(port: int) -> Rule:
    return {"fromEntities": ["all"], "toPorts": [{"ports": [_port(port)]}]}


def _port(first: int, last: int = 0, protocol: str = "TCP") -> Rule:
    return {"port": str(first), "protocol": protocol, **({"endPort": last} if last else {})}


def _allow(hosts: HostList) -> Iterator[Rule]:
    """A rule for each set of ports: names, and blocks, which Cilium does not mix."""
    if any(entry.everything for entry in hosts.entries):
        every = [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]
        yield {"toCIDRSet": every, "toPorts": [{"ports": [_port(1, 65535)]}]}
    entries = [entry for entry in hosts.entries if not entry.everything]
    for ports in dict.fromkeys(entry.ports for entry in entries):
        on = [{"ports": [_port(port) for port in ports]}]
        same = [entry for entry in entries if entry.ports == ports]
        if found := [_match(entry) for entry in same if entry.network is None]:
            yield {"toFQDNs": found, "toPorts": on}
        if blocks := [{"cidr": str(entry.network)} for entry in same if entry.network is not None]:
            yield {"toCIDRSet": blocks, "toPorts": on}


def _match(entry: HostEntry) -> Rule:
    """Two asterisks are any number of labels, one would be a single label."""
    if entry.everything:
        return {"matchPattern": "*"}
    return {"matchPattern": f"**.{entry.name}"} if entry.wildcard else {"matchName": entry.name}


def _resolve(hosts: HostList, nameservers: Sequence[str]) -> Iterator[Rule]:
    """Questions for names on the list, and for no others, to trusted name servers, and to no others: an answer opens
    the address that it has."""
    matches = [_match(entry) for entry in hosts.entries if entry.network is None]
    # The same name on two ports is one question.
    unique = [match for number, match in enumerate(matches) if match not in matches[:number]]
    if not unique:
        return
    where: Rule = {"toEndpoints": [{"matchLabels": dict(_NAME_SERVICE)}]}
    if nameservers:
        where = {"toCIDR": [str(ip_network(address)) for address in nameservers]}
    yield {**where, "toPorts": [{"ports": [_port(_DNS, protocol="ANY")], "rules": {"dns": unique}}]}


def _deny(hosts: HostList, nameservers: Sequence[str]) -> Iterator[Rule]:
    """Addresses that are not public, unless the list has them as addresses: the owner of a listed name decides which
    address it has. A name server that has such an address is one on its port only."""
    listed = [entry.network for entry in hosts.entries if entry.network is not None]
    servers = [ip_network(address) for address in nameservers]
    blocks = []
    for block in PRIVATE:
        if not any(_covers(other, block) for other in (*listed, *_NEVER)):
            holes = [str(each) for each in (*listed, *servers) if _covers(block, each)]
            blocks.append({"cidr": str(block), **({"except": holes} if holes else {})})
    yield {"toCIDRSet": blocks}
    if closed := [str(each) for each in servers if any(_covers(block, each) for block in PRIVATE)]:
        rest = [_port(1, _DNS - 1, "ANY"), _port(_DNS + 1, 65535, "ANY")]
        yield {"toCIDR": closed, "toPorts": [{"ports": rest}]}


def _covers(outer: Network, inner: Network) -> bool:
    if isinstance(outer, IPv4Network):
        return isinstance(inner, IPv4Network) and inner.subnet_of(outer)
    return isinstance(inner, IPv6Network) and inner.subnet_of(outer)
