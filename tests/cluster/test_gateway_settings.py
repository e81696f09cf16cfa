"""The gateway's settings: the administrator's count, and the file says what was meant."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8e.cluster.errors import StartFailed
from k8e.cluster.member.gateways.objects import KEY_SECRET, RECORDS, describe_records, describe_sandboxes
from k8e.cluster.member.gateways.peers import read_leader, read_names
from k8e.cluster.member.gateways.settings import merge_settings, read_settings, write_toml
from k8e.cluster.member.layout import SANDBOXES
from k8e.engine.kubernetes.doctor.rights import NEEDED, NEEDED_BY_SEVERAL
from k8e.replicas.lease import ADDRESS, lease_name
from k8e.replicas.objects import SandboxRecord


def test_what_the_administrator_has_set_counts() -> None:
    given = {"kubernetes": {"egress": "open"}, "pool": {"min": 3}}
    own = {"kubernetes": {"egress": "node", "image": "a"}, "gateway": {"listen": ":1"}}
    assert merge_settings(given, own) == {
        "kubernetes": {"egress": "open", "image": "a"},
        "gateway": {"listen": ":1"},
        "pool": {"min": 3},
    }


def test_the_file_has_every_value_again() -> None:
    value = {
        "limits": {
            "cpus": 0.5,
            "memory": "1g",
            "count": 3,
            "strict": True,
            "names": ["a", 'quote " and \\ slash', "ü"],
        },
        "runtimes": {"kata": {"emulation": False}},
        "kubernetes": {"accounts": [{"account": "a/b", "tenants": ["x"]}, {"account": "c/*", "scope": "admin"}]},
        "key with spaces": {"a.b": "newline\nand tab\t"},
    }
    assert tomllib.loads(write_toml(value)) == value


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    assert read_settings(tmp_path / "none") == {}
    (tmp_path / "bad").write_text("[pool\n")
    with pytest.raises(StartFailed) as refused:
        read_settings(tmp_path / "bad")
    assert refused.value.code == "settings_unreadable"


def test_the_gateways_have_the_rights_that_the_doctor_asks_for_and_no_others() -> None:
    """And their own Secret, in a namespace where they can read no other."""
    granted = {
        (verb, resource, group, found["metadata"].get("namespace", ""), *rule.get("resourceNames", ()))
        for found in describe_sandboxes()
        if found["kind"] in ("Role", "ClusterRole")
        for rule in found["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    namespace, _, name = KEY_SECRET.partition("/")
    assert granted == {
        (right.verb, right.resource, right.group, "" if right.everywhere else SANDBOXES)
        for right in (*NEEDED, *NEEDED_BY_SEVERAL)
    } | {(verb, "secrets", "", namespace, name) for verb in ("get", "patch")}


def test_the_kind_of_the_records_is_the_one_of_the_chart() -> None:
    assert describe_records() == yaml.safe_load(Path("deploy/helm/crds/sandboxrecords.yaml").read_text())
    info = SandboxRecord._api_info
    assert f"/apis/{info.resource.group}/{info.resource.version}/namespaces/{SANDBOXES}/{info.plural}" == RECORDS


def test_the_leader_is_the_holder_of_the_lease_once_it_serves() -> None:
    def lease(holder: str, address: str) -> dict[str, Any]:
        return {
            "metadata": {"name": lease_name("abc"), "annotations": {ADDRESS: address} if address else None},
            "spec": {"holderIdentity": holder},
        }

    other = {"metadata": {"name": "of-another-program"}, "spec": {"holderIdentity": "x"}}
    assert read_leader([other, lease("one-1", "10.0.0.1:10540")]) == "10.0.0.1:10540"
    assert read_leader([lease("one-1", "")]) == ""  # it leads, and does not serve yet
    assert read_leader([lease("", "10.0.0.1:10540")]) == ""  # given away
    assert read_leader([other]) == ""


def test_the_certificate_names_every_server_and_its_address() -> None:
    addresses = [{"type": "InternalIP", "address": "10.0.0.2"}, {"type": "Hostname", "address": "b"}]
    nodes: list[dict[str, Any]] = [
        {"metadata": {"name": "b"}, "status": {"addresses": addresses}},
        {"metadata": {"name": "a"}, "status": {}},  # it has just joined
    ]
    assert read_names(nodes) == ["10.0.0.2", "a", "b"]
