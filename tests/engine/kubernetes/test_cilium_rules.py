"""What a list of hosts is in Cilium's words. Whether Cilium understands them is tried in tests/kubernetes/cilium."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.cilium.objects import (
    CLOSED_PORT,
    NOW,
    TURN,
    TURN_PORTS,
    CiliumEndpoint,
    CiliumNetworkPolicy,
    EndpointStatus,
    Identity,
    belongs_to,
    find_list,
    find_turn,
    has_labels,
)
from k8e.engine.kubernetes.cilium.rules import build_base, build_list
from k8e.engine.kubernetes.egress_objects import LIST, digest_list
from k8e.engine.kubernetes.names import labels
from k8e.engine.kubernetes.options import CILIUM
from k8e.engine.kubernetes.pods import build_pod
from k8e.policy import NOTHING, HostList, kind_of, may_answer, may_list
from tests.engine.kubernetes.test_pods import OPTIONS, PLAN, SPEC

AGENT = 10539
SERVER = "45.90.29.53"


def build(*entries: str, nameservers: tuple[str, ...] = (SERVER,)) -> dict[str, Any]:
    policy = build_list("gw", HostList.parse(entries), nameservers, AGENT)
    assert policy.specs is not None
    born, given = policy.specs
    assert {**born, "endpointSelector": None} == {**given, "endpointSelector": None}
    return born


def denied(policy: CiliumNetworkPolicy | dict[str, Any], address: str) -> bool:
    specs = [policy] if isinstance(policy, dict) else policy.specs or []
    found = ip_address(address)
    for rule in (rule for spec in specs for rule in spec.get("egressDeny", ())):
        for block in rule.get("toCIDRSet", ()):
            holes = [ip_network(hole) for hole in block.get("except", ())]
            if found in ip_network(block["cidr"]) and not any(found in hole for hole in holes):
                return True
    return False


def test_names_and_blocks_have_their_ports() -> None:
    spec = build("example.com", "*.example.org:8443", "192.0.2.0/24", "other.com:8443")
    web = [{"ports": [{"port": "80", "protocol": "TCP"}, {"port": "443", "protocol": "TCP"}]}]
    other = [{"ports": [{"port": "8443", "protocol": "TCP"}]}]
    rules = spec["egress"]
    assert {"toFQDNs": [{"matchName": "example.com"}], "toPorts": web} in rules
    assert {"toCIDRSet": [{"cidr": "192.0.2.0/24"}], "toPorts": web} in rules
    names = [{"matchPattern": "**.example.org"}, {"matchName": "other.com"}]
    assert {"toFQDNs": names, "toPorts": other} in rules
    assert len(rules) == 4


def test_questions_are_for_listed_names_and_trusted_servers() -> None:
    *_, rule = build("example.com", "example.com:8443", "*.example.org", "192.0.2.1")["egress"]
    assert rule == {
        "toCIDR": [f"{SERVER}/32"],
        "toPorts": [
            {
                "ports": [{"port": "53", "protocol": "ANY"}],
                "rules": {"dns": [{"matchName": "example.com"}, {"matchPattern": "**.example.org"}]},
            }
        ],
    }
    *_, rule = build("example.com", nameservers=())["egress"]
    assert rule["toEndpoints"] == [
        {"matchLabels": {"k8s:io.kubernetes.pod.namespace": "kube-system", "k8s:k8s-app": "kube-dns"}}
    ]


@pytest.mark.parametrize("entries", [(), ("192.0.2.1",)], ids=["nothing", "addresses"])
def test_without_names_there_are_no_questions(entries: tuple[str, ...]) -> None:
    assert not [rule for rule in build(*entries)["egress"] if "dns" in str(rule)]


def test_an_empty_list_allows_nothing_and_lets_the_gateway_in() -> None:
    spec = build()
    assert spec["egress"] == [{}]
    assert spec["ingress"] == [
        {"fromEntities": ["all"], "toPorts": [{"ports": [{"port": str(AGENT), "protocol": "TCP"}]}]}
    ]
    assert spec["enableDefaultDeny"] == {"ingress": True, "egress": True}


def test_everything_is_every_public_address_by_tcp() -> None:
    spec = build("*")
    every = [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]
    ports = [{"ports": [{"port": "1", "protocol": "TCP", "endPort": 65535}]}]
    assert spec["egress"][0] == {"toCIDRSet": every, "toPorts": ports}
    assert spec["egress"][1]["toPorts"][0]["rules"] == {"dns": [{"matchPattern": "*"}]}


ADDRESSES = (
    *("1.1.1.1", "45.90.31.1", "168.63.129.16", "169.254.169.254", "127.0.0.1", "10.1.2.3", "172.31.0.1"),
    *("192.168.1.1", "100.64.0.1", "100.100.100.200", "192.0.2.1", "224.0.0.1", "240.0.0.1", "0.0.0.0"),
    *("2a0b:4340::1", "fd00::1", "fe80::1", "::1", "ff02::1", "fd00:ec2::254", "2001:db8::1", "fec0::1"),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_a_name_may_not_answer_is_denied(address: str) -> None:
    found = ip_address(address)
    base, listed = build_base("gw"), build("example.com")
    assert denied(base, address) == (not may_list(found)), kind_of(found)
    assert (denied(base, address) or denied(listed, address)) == (not may_answer(found, registry=False))


def test_translated_addresses_are_denied_as_a_whole() -> None:
    for address in ("64:ff9b::a00:1", "64:ff9b::101:101", "2002:a00::1", "2001::1"):
        assert denied(build_base("gw"), address)


def test_private_addresses_can_be_listed_as_addresses_only() -> None:
    spec = build("10.1.0.0/16", "example.com")
    assert not denied(spec, "10.1.2.3")
    assert denied(spec, "10.2.0.1")
    assert denied(spec, "192.168.1.1")
    assert not denied(build("10.0.0.0/7"), "10.2.0.1")
    assert not denied(build("0.0.0.0/0"), "192.168.1.1")
    assert denied(build_base("gw"), "169.254.169.254")  # whatever a list says


def test_a_private_name_server_is_one_on_its_port_only() -> None:
    spec = build("example.com", nameservers=("10.96.0.10",))
    assert not denied(spec, "10.96.0.10")
    assert denied(spec, "10.96.0.11")
    (rule,) = [rule for rule in spec["egressDeny"] if "toCIDR" in rule]
    assert rule["toCIDR"] == ["10.96.0.10/32"]
    ports = [(port["port"], port["endPort"]) for port in rule["toPorts"][0]["ports"]]
    assert ports == [("1", 52), ("54", 65535)]


def test_each_turn_opens_its_own_port_and_none_the_closed_one() -> None:
    specs = build_base("gw").specs or []
    assert specs[0]["endpointSelector"] == {"matchLabels": dict(labels("gw"))}
    assert (specs[0]["ingress"], specs[0]["egress"]) == ([{}], [{}])
    opened = {
        spec["endpointSelector"]["matchLabels"][TURN]: spec["ingress"][0]["toPorts"][0]["ports"][0]["port"]
        for spec in specs[1:]
    }
    assert opened == {str(turn): str(port) for turn, port in enumerate(TURN_PORTS)}
    assert str(CLOSED_PORT) not in opened.values()


def test_a_label_selects_the_list_and_a_later_one_replaces_it() -> None:
    hosts = HostList.parse(["b.com", "a.com"])
    digest = digest_list(hosts)
    assert digest == digest_list(HostList.parse(["A.com", "b.com", "a.com"])) != digest_list(NOTHING)
    pod = build_pod(replace(SPEC, egress=hosts), PLAN, replace(OPTIONS, egress=CILIUM))
    assert find_list(pod) == digest
    assert find_turn(pod) == -1
    policy = build_list("gw", hosts, (), AGENT)
    born, given = (spec["endpointSelector"] for spec in policy.specs or ())
    assert born["matchLabels"] == {**labels("gw"), LIST: digest}
    assert born["matchExpressions"] == [{"key": NOW, "operator": "DoesNotExist"}]
    assert given == {"matchLabels": {**labels("gw"), NOW: digest}}
    assert pod.metadata is not None
    later = ObjectMeta(labels={**(pod.metadata.labels or {}), NOW: "x", TURN: "2"})
    assert (find_list(Pod(metadata=later)), find_turn(Pod(metadata=later))) == ("x", 2)


def test_names_are_complete_names() -> None:
    options = replace(OPTIONS, egress=CILIUM)
    spec = build_pod(SPEC, PLAN, options).spec
    assert spec is not None
    assert spec.dnsConfig is not None
    assert spec.dnsPolicy == "ClusterFirst"
    assert [(one.name, one.value) for one in spec.dnsConfig.options or ()] == [("ndots", "1")]
    spec = build_pod(SPEC, PLAN, replace(options, nameservers=(SERVER,))).spec
    assert spec is not None
    assert spec.dnsConfig is not None
    assert (spec.dnsPolicy, spec.dnsConfig.nameservers, spec.dnsConfig.searches) == ("None", [SERVER], None)


def test_an_endpoint_is_the_pods_own_and_has_all_labels() -> None:
    owner = OwnerReference(apiVersion="v1", kind="Pod", name="one", uid="u1")
    identity = Identity([f"k8s:{LIST}=d", f"k8s:{TURN}=1", "k8s:io.kubernetes.pod.namespace=k8e"])
    endpoint = CiliumEndpoint(metadata=ObjectMeta(ownerReferences=[owner]), status=EndpointStatus(identity))
    assert belongs_to(endpoint, "u1")
    assert not belongs_to(endpoint, "u2")
    assert has_labels(endpoint, {LIST: "d", TURN: "1"})
    assert not has_labels(endpoint, {LIST: "d", TURN: "2"})
    assert not has_labels(CiliumEndpoint(), {LIST: "d"})
