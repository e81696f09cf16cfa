"""The chart's service accounts: their entries become settings, and the right to ask about tokens comes with them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml

from k8e.settings.accounts import AccountRule
from k8e.settings.file import read_table
from tests.kubernetes.install.helm import CHART, ROOT, Helm
from tests.kubernetes.install.test_chart import list_rights, pick

ACCOUNTS: list[dict[str, Any]] = [
    {"account": "agents/planner", "tenants": ["a", "b"], "scope": "operator"},
    {"account": "ci/*", "tenants": ["ci"]},
]


def test_entries_become_settings_and_bring_the_right(helm: Helm) -> None:
    objects = helm.render({"tokens": {"audience": "here", "accounts": ACCOUNTS}})
    (config,) = pick(objects, "ConfigMap")
    found = read_table(ROOT, tomllib.loads(config["data"]["k8e.toml"])).kubernetes
    rules = (AccountRule("agents", "planner", ("a", "b"), "operator"), AccountRule("ci", "*", ("ci",), "run"))
    assert (found.token_audience, found.accounts) == ("here", rules)
    tokens = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/tokens.yaml").read_text()))
    assert list_rights(objects) - list_rights(helm.render()) == list_rights(tokens)


@pytest.mark.parametrize(
    "entry",
    [
        {"account": "ci/*"},
        {"account": "*/*", "tenants": ["ci"]},
        {"account": "ci/x", "tenants": []},
        {"account": "ci/x", "tenants": ["ci"], "scope": "root"},
        {"account": "ci/x", "tenants": ["ci"], "role": "run"},
    ],
    ids=str,
)
def test_entries_that_mean_nothing_are_refused(helm: Helm, entry: dict[str, Any]) -> None:
    said = helm.refused("template", "boxes", str(CHART), helm.values({"tokens": {"accounts": [entry]}}))
    assert "values don't meet the specifications of the schema" in said
