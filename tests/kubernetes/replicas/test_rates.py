"""Rates and quotas of a tenant hold for all gateways together, and after one of them was killed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.engine.rig import Site
from tests.kubernetes.replicas.test_two_gateways import K8E, Gateway, wait_for_leader

QUOTAS = "\n[quotas]\ncreates_per_minute = 1\nconcurrent_runs = 2\n"


@pytest.fixture
def gateways(site: Site, tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """The leader and the other one."""
    pair = (Gateway(site, tmp_path / "a"), Gateway(site, tmp_path / "b"))
    try:
        for each in pair:
            config = Path(each.env["K8E_CONFIG"])
            config.write_text(config.read_text() + QUOTAS)
            each.start()
        for each in pair:
            each.wait_until_open()
        yield wait_for_leader(*pair)
    finally:
        for each in pair:
            each.stop()


def answer(done: subprocess.CompletedProcess[bytes]) -> Any:
    return json.loads(done.stdout or done.stderr)


def test_a_tenant_has_its_rate_once_whichever_gateways_it_calls(gateways: tuple[Gateway, Gateway]) -> None:
    leader, other = gateways
    keys = {name: leader.ask("sandbox-apikey", "create", name, "--tenant", name)["key"] for name in ("busy", "calm")}
    create = ("sandbox", "create", "--runtime", "native")
    begun = time.monotonic()

    def expect_refusal(gateway: Gateway) -> None:
        refused = answer(gateway.call(*create, key=keys["busy"]))
        if refused.get("code") != "too_many_creates":  # on a machine that was so slow that the minute is over
            assert time.monotonic() - begun > 60, refused

    sessions = {"busy": other.ask(*create, key=keys["busy"])["session_id"]}
    expect_refusal(leader)
    expect_refusal(other)
    sessions["calm"] = leader.ask(*create, key=keys["calm"])["session_id"]  # pays for itself

    # Two runs at the same time, one through each gateway.
    run = {name: ("sandbox", "run", "--session-id", session) for name, session in sessions.items()}
    streams = [
        subprocess.Popen(
            [K8E, *run["busy"], "--raw", "echo begun; sleep 100"],
            env={**each.env, "K8E_SANDBOX_ENDPOINT": f"127.0.0.1:{each.port}", "K8E_SANDBOX_APIKEY": keys["busy"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for each in gateways
    ]
    for stream in streams:
        assert stream.stdout is not None
        assert stream.stdout.readline() == b"begun\n"
    for each in gateways:
        assert answer(each.call(*run["busy"], "true", key=keys["busy"]))["code"] == "too_many_runs"
        assert each.ask(*run["calm"], "echo mine", key=keys["calm"])["stdout"] == "mine\n"

    leader.kill()
    for stream in streams:
        stream.communicate(timeout=60)
    expect_refusal(other)  # the next leader knows when the session was created
    assert other.ask(*run["busy"], "echo again", key=keys["busy"])["stdout"] == "again\n"
    for name, session in sessions.items():
        other.ask("sandbox", "destroy", session, key=keys[name])
