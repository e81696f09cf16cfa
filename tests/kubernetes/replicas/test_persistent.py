"""A persistent session of two gateways: its files are on a volume, its variables in a Secret, and both are there when
another gateway starts it again."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cluster.cluster import Cluster
from tests.kubernetes.engine.conftest import open_site
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.replicas.conftest import allow_records
from tests.kubernetes.replicas.test_two_gateways import Gateway, wait_for_leader


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=True) as site:
        allow_records(site.kubectl)
        yield site


@pytest.fixture
def gateways(site: Site, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    pair = (Gateway(site, tmp_path / "a"), Gateway(site, tmp_path / "b"))
    try:
        for each in pair:
            each.start()
        for each in pair:
            each.wait_until_open()
        yield wait_for_leader(*pair)
    finally:
        for each in pair:
            each.stop()


def list_kept(site: Site) -> list[str]:
    """Secrets of sessions, by their records' names."""
    found = json.loads(site.kubectl("get", "secrets", "-l", "k8e.dev/gateway", "--output=json"))["items"]
    return [each["metadata"]["ownerReferences"][0]["name"] for each in found]


def test_its_variables_are_there_when_another_gateway_starts_it(site: Site, gateways: tuple[Gateway, Gateway]) -> None:
    leader, other = gateways
    key = leader.ask("sandbox-apikey", "create", "ci", "--tenant", "ci")["key"]
    made = ("--runtime", "native", "--persistent", "--env", "WORD=kept", "--secret", "TOKEN")
    other.env["TOKEN"] = "s3cr3t-value"
    session = other.ask("sandbox", "create", *made, key=key)["session_id"]
    run = ("sandbox", "run", "--session-id", session)
    assert leader.ask(*run, "echo $WORD $TOKEN > /workspace/file", key=key)["exit_code"] == 0
    (record,) = list_kept(site)
    content = base64.b64decode(site.kubectl.get(f"secret/{record}")["data"]["environment"])
    assert (b"WORD=kept" in content, b"TOKEN" in content) == (True, False)
    leader.ask("sandbox", "stop", session, key=key)
    leader.kill()
    refused = other.call("sandbox", "start", session, key=key)
    assert (refused.returncode != 0, b"secrets_missing" in refused.stdout + refused.stderr) == (True, True), refused
    other.env["TOKEN"] = "another"
    other.ask("sandbox", "start", session, "--secret", "TOKEN", key=key)
    assert other.ask(*run, "cat /workspace/file; echo $WORD $TOKEN", key=key)["stdout"] == (
        "kept s3cr3t-value\nkept another\n"
    )
    other.ask("sandbox", "stop", session, key=key)
    other.ask("sandbox", "start", session, "--env", "WORD=new", "--secret", "TOKEN", key=key)
    assert other.ask(*run, "echo $WORD", key=key)["stdout"] == "new\n"
    other.ask("sandbox", "destroy", session, key=key)
    assert list_kept(site) == []
