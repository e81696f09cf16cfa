"""Sessions of one id in several tenants: a caller who sees several names the tenant or the owner, on the machine and
over a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from k8e.cli.remote.connection import read_detail
from k8e.doors.grpc import sandbox_pb2 as pb
from tests.cli.machine import Machine
from tests.gateway.house import House

ID = "twin"


@pytest.fixture(scope="module")
def twins(house: House) -> None:
    for name in ("acme", "rival"):
        guest = house.tenant(name)
        guest.create(session_id=ID)
        guest.run(ID, f"echo {name} > who")


@pytest.fixture(scope="module", params=["root", "admin"])
def chief(
    request: pytest.FixtureRequest, house: House, twins: None, tmp_path_factory: pytest.TempPathFactory
) -> Machine:
    """Who sees all: on the machine itself, and from afar."""
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "root":
        return Machine(house.machine.folder, home)
    machine = Machine(tmp_path_factory.mktemp("far"), home)
    key = house.make_key("chief", scope="admin", tenant_ids=["office"])
    machine.overrides.update(K8E_SANDBOX_ENDPOINT=house.endpoint, K8E_SANDBOX_APIKEY=key)
    return machine


def test_who_does_not_say_is_told_who_there_is_and_how_to_say_it(chief: Machine) -> None:
    for words in (["get", ID], ["destroy", ID], ["run", "true", "--session-id", ID]):
        done = chief.k8e("sandbox", *words)
        problem = json.loads(done.stdout)
        assert (done.code, problem["code"]) == (1, "session_ambiguous")
        assert problem["detail"] == "the gateway's in tenant acme; the gateway's in tenant rival"
        assert "--tenant-id" in problem["hint"]
        assert "--owner" in problem["hint"]


@pytest.mark.parametrize("tenant", ["acme", "rival"])
def test_who_says_has_that_one_in_every_command(chief: Machine, tenant: str) -> None:
    whose = ("--tenant-id", tenant)
    assert chief.k8e("sandbox", "get", ID, *whose, "--owner", "gateway").json["tenant_id"] == tenant
    assert [one["tenant_id"] for one in chief.k8e("sandbox", "sessions", *whose).json["sessions"]] == [tenant]
    assert chief.run("cat who", "--session-id", ID, *whose).json["stdout"] == f"{tenant}\n"
    raw = chief.run("cat who; cat", "--raw", "--stdin", "--session-id", ID, *whose, stdin=b"in")
    assert raw.stdout == f"{tenant}\nin".encode()
    assert chief.k8e("sandbox", "read", ID, "who", *whose).json["content"] == f"{tenant}\n"
    assert chief.k8e("sandbox", "write", ID, "new", *whose, stdin=tenant.encode()).json["ok"]
    assert chief.k8e("sandbox", "read", ID, "new", *whose).json["content"] == tenant
    assert len(chief.k8e("sandbox", "list", ID, *whose).json["files"]) == 2
    assert chief.k8e("sandbox", "log", ID, *whose).json["runs"]
    assert chief.k8e("sandbox", "ps", ID, *whose).json["processes"] == []
    hosts = chief.k8e("sandbox", "allow-hosts", ID, "--hosts", f"{tenant}.example", *whose).json
    assert hosts["policy"]["allowed_hosts"] == [f"{tenant}.example"]
    child = chief.k8e("sandbox", "subagent", ID, *whose).json
    assert chief.k8e("sandbox", "get", ID, *whose).json["children"] == [child["session_id"]]
    assert chief.k8e("sandbox", "destroy", child["session_id"], *whose).json["ok"]
    stopped = chief.k8e("sandbox", "stop", ID, *whose)
    assert json.loads(stopped.stdout)["code"] == "session_not_persistent"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["get", ID, "--tenant-id", "none"], "session_not_found"),
        (["get", ID, "--tenant-id", "acme", "--owner", "0"], "session_not_found"),
        (["get", ID, "--tenant-id", "é\n"], "session_not_found"),
        (["get", ID, "--owner", "somebody"], "invalid_argument"),
        (["run", "true", "--tenant-id", "acme"], "usage"),
    ],
)
def test_what_is_said_has_to_be_so(chief: Machine, words: list[str], code: str) -> None:
    done = chief.k8e("sandbox", *words)
    assert (done.code, json.loads(done.stdout)["code"]) == (1, code)


def test_naming_a_tenant_gives_no_caller_more_rights(house: House, twins: None, tmp_path: Path) -> None:
    rival = house.guest(house.make_key("rival-2", tenant_ids=["rival"]))
    heard = []
    for tenant in ("acme", "none"):
        call: Any = rival.channel.unary_unary(
            "/sandbox.v1.SandboxService/GetSession",
            pb.GetSessionRequest.SerializeToString,
            pb.GetSessionResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(pb.GetSessionRequest(session_id=ID), metadata=(("sandbox-tenant", tenant),), timeout=60)
        detail = read_detail(refused.value)
        heard.append((refused.value.code(), str(detail)))
    assert heard[0] == heard[1]
    assert heard[0][0] is grpc.StatusCode.NOT_FOUND
    operator = Machine(tmp_path, tmp_path)
    key = house.make_key("operator", scope="operator", tenant_ids=["acme", "rival"])
    env = {"K8E_SANDBOX_ENDPOINT": house.endpoint, "K8E_SANDBOX_APIKEY": key}
    for tenant in ("acme", "rival"):
        done = operator.k8e("sandbox", "run", "cat who", "--session-id", ID, "--tenant-id", tenant, env=env)
        assert done.json["stdout"] == f"{tenant}\n"


def test_no_tenant_of_an_operator_comes_before_the_others(house: House, twins: None, tmp_path: Path) -> None:
    """Whichever its key names first."""
    operator = Machine(tmp_path, tmp_path)
    key = house.make_key("operator-2", scope="operator", tenant_ids=["rival", "acme"])
    operator.overrides.update(K8E_SANDBOX_ENDPOINT=house.endpoint, K8E_SANDBOX_APIKEY=key)
    for words in (["get", ID], ["run", "true", "--session-id", ID], ["read", ID, "who"]):
        done = operator.k8e("sandbox", *words)
        problem = json.loads(done.stdout)
        assert (done.code, problem["code"]) == (1, "session_ambiguous")
        assert problem["detail"] == "the gateway's in tenant acme; the gateway's in tenant rival"
