"""The gateway's settings: the administrator's count, and the file says what was meant."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from k8e.cluster.errors import StartFailed
from k8e.cluster.member.gateway import describe_sandboxes, merge_settings, read_settings, write_toml
from k8e.engine.kubernetes.doctor.rights import NEEDED


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


def test_the_gateway_has_the_rights_that_the_doctor_asks_for_and_no_others() -> None:
    roles = [found for found in describe_sandboxes() if found["kind"] in ("Role", "ClusterRole")]
    granted = {
        (verb, resource, group, found["kind"] == "ClusterRole")
        for found in roles
        for rule in found["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {(right.verb, right.resource, right.group, right.everywhere) for right in NEEDED}
