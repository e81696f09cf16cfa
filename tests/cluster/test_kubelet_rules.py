"""What a kubelet has put into the tables of iptables is found among the rules of others."""

from __future__ import annotations

from typing import Any

from k8e.cluster.member.kubelet_rules import is_empty, plan_removal

BASE: dict[str, Any] = {"chain": {"name": "OUTPUT", "policy": "accept", "hook": "output"}}


def rule(chain: str, handle: int, target: str) -> dict[str, Any]:
    return {"rule": {"chain": chain, "handle": handle, "expr": [{"counter": {}}, {"jump": {"target": target}}]}}


def test_rules_that_lead_to_its_chains_go_first_and_others_stay() -> None:
    found: list[dict[str, Any]] = [
        {"metainfo": {}},
        {"table": {"name": "filter"}},
        BASE,
        {"chain": {"name": "KUBE-FIREWALL"}},
        {"chain": {"name": "MINE"}},
        rule("OUTPUT", 4, "KUBE-FIREWALL"),
        rule("OUTPUT", 5, "MINE"),
        rule("KUBE-FIREWALL", 6, "MINE"),
    ]
    assert list(plan_removal("ip", "filter", found)) == [
        "delete rule ip filter OUTPUT handle 4",
        "flush chain ip filter KUBE-FIREWALL",
        "delete chain ip filter KUBE-FIREWALL",
    ]


def test_a_table_of_others_is_not_empty() -> None:
    assert is_empty([{"metainfo": {}}, {"table": {"name": "nat"}}, BASE])
    assert not is_empty([BASE, {"chain": {"name": "MINE"}}])
    assert not is_empty([{"chain": {"name": "INPUT", "policy": "drop"}}])
    assert not is_empty([BASE, rule("OUTPUT", 5, "MINE")])
