"""A key of the gateway opens nothing private: the real daemon, its gateway and its door for agents, on a machine whose
private network answers whatever reaches it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from tests.cli.machine import Machine, make_folder
from tests.egress.internet import NAME_SERVER, Internet
from tests.egress.test_daemon import end_daemon
from tests.egress.zones import Zone
from tests.engine.answers import plant_answers
from tests.gateway.house import Guest, House, house_in_a_child
from tests.mcp.agents import call, fail
from tests.mcp.test_keys import agent_with, receiving

ZONE: Zone = {
    "public.com": {"A": ["45.90.31.1"]},
    "inside.com": {"A": ["10.9.8.7"], "AAAA": ["fd00:9::7"]},
    "turning.com": {"A": ["45.90.31.2"], "ttl": 0},
}
PRIVATE = [
    "10.9.8.7",
    "10.0.0.0/8:22",
    "192.168.1.1",
    "100.64.0.1",
    "fd00:9::7",
    "0.0.0.0/0",
    "::/0",
    "64:ff9b::a09:807",
]
TRY = """
import json, sys, urllib.request
for target in sys.argv[1:]:
    try:
        print(json.load(urllib.request.urlopen(f"http://{target}/", timeout=20))["address"])
    except OSError as error:
        print("refused")
"""


@pytest.fixture(scope="module")
def machine(internet: Internet) -> Iterator[Machine]:
    with make_folder() as folder:
        settings = '[pool]\nenabled = false\n[gateway]\nlisten = "127.0.0.1:0"\n[egress]\n'
        settings += f'nameservers = ["{NAME_SERVER}"]\nallowed_hosts = ["public.com", "10.77.0.0/16:80"]\n'
        (folder / "k8e.toml").write_text(settings)
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder)
        assert machine.k8e("sandbox", "status").code == 0
        yield machine
        for session in machine.live_sessions():
            machine.k8e("sandbox", "destroy", session)
        end_daemon(machine, signal.SIGTERM)


@pytest.fixture(scope="module")
def house(machine: Machine) -> Iterator[House]:
    with house_in_a_child(machine) as house:
        yield house


@pytest.fixture(scope="module")
def tenant(house: House) -> Guest:
    return house.tenant("red")


def update(guest: Guest, session: str, **changes: Any) -> list[str]:
    request = pb.UpdateAllowedHostsRequest(session_id=session, **changes)
    return list(guest.call("UpdateAllowedHosts", request).allowed_hosts)


def reach(guest: Guest, session: str, *targets: str) -> list[str]:
    words = ["/usr/bin/python3", "-c", TRY, *targets]
    done = guest.call("Exec", pb.ExecRequest(session_id=session, argv=[word.encode() for word in words]))
    assert done.exit_code == 0, done
    return [word.decode() for word in done.stdout.split()]


def assert_explained(code: str, field: str, detail: str, hint: str, wanted: str) -> None:
    assert (code, field) == ("beyond_ceiling", wanted)
    assert "they may open: *" in detail
    assert "gateway_hosts of [egress] in k8e.toml" in hint


@pytest.mark.parametrize("entry", PRIVATE)
def test_a_key_lists_nothing_private(tenant: Guest, entry: str) -> None:
    create = pb.CreateSessionRequest(runtime_class="native", allowed_hosts=["public.com", entry])
    status, detail = tenant.refused("CreateSession", create)
    assert status is grpc.StatusCode.PERMISSION_DENIED
    assert detail is not None
    assert_explained(detail.code, detail.field, detail.detail, detail.hint, "allowed_hosts")
    assert entry in detail.error


def test_over_grpc(machine: Machine, internet: Internet, tenant: Guest) -> None:
    session = tenant.create(runtime_class="native", allowed_hosts=["*"])
    assert reach(tenant, session, "public.com", "45.90.40.1") == ["45.90.31.1", "45.90.40.1"]
    assert reach(tenant, session, "10.9.8.7", "[fd00:9::7]", "inside.com") == ["refused"] * 3, "nor by a name"
    assert reach(tenant, session, "turning.com") == ["45.90.31.2"]
    internet.publish({"turning.com": {"A": ["10.9.8.7"]}})
    reached = ["45.90.31.2"]
    while reached == ["45.90.31.2"]:  # for the second in which it is remembered
        reached = reach(tenant, session, "turning.com")
    assert reached == ["refused"], "nor by one that turns"
    for request, field in (
        (pb.UpdateAllowedHostsRequest(session_id=session, add=["10.9.8.7"]), "add"),
        (pb.UpdateAllowedHostsRequest(session_id=session, allowed_hosts=["*", "10.9.8.7"]), "hosts"),
    ):
        status, detail = tenant.refused("UpdateAllowedHosts", request)
        assert status is grpc.StatusCode.PERMISSION_DENIED
        assert detail is not None
        assert_explained(detail.code, detail.field, detail.detail, detail.hint, field)
    more = pb.CreateSessionRequest(runtime_class="native", more_hosts=["10.9.8.7"])
    assert tenant.refused("CreateSession", more)[0] is grpc.StatusCode.PERMISSION_DENIED
    # A user of the machine may, for that very session, and then it stays.
    opened = machine.k8e("sandbox", "allow-hosts", session, "--tenant-id", "red", "--add", "10.9.8.7")
    assert opened.code == 0, opened.stdout
    assert reach(tenant, session, "10.9.8.7") == ["10.9.8.7"]
    assert update(tenant, session, add=["other.com"]) == ["*", "other.com", "10.9.8.7"]
    assert update(tenant, session, remove=["10.9.8.7"]) == ["*", "other.com"]
    request = pb.UpdateAllowedHostsRequest(session_id=session, add=["10.9.8.7"])
    assert tenant.refused("UpdateAllowedHosts", request)[0] is grpc.StatusCode.PERMISSION_DENIED


def test_what_every_session_has_is_not_beyond_it(tenant: Guest) -> None:
    session = tenant.create(runtime_class="native")
    assert reach(tenant, session, "10.77.1.1", "10.9.8.7") == ["10.77.1.1", "refused"]
    assert update(tenant, session, allowed_hosts=["10.77.5.0/24:80"]) == ["10.77.5.0/24:80"], "within it"
    assert update(tenant, session, allowed_hosts=["10.77.0.0/16:80"]) == ["10.77.0.0/16:80"], "and back"


def test_users_of_the_machine_are_as_before(machine: Machine, house: House) -> None:
    made = machine.k8e("sandbox", "create", "--runtime", "native", "--allowed-hosts", "10.9.8.7")
    assert made.code == 0, made.stdout
    done = machine.run("--session-id", made.json["session_id"], "curl -sS http://10.9.8.7/").json
    assert json.loads(done["stdout"])["address"] == "10.9.8.7"
    root = house.root()  # over the gateway, with the certificate of a user of this machine
    session = root.create(runtime_class="native", allowed_hosts=["10.9.8.7"])
    assert reach(root, session, "10.9.8.7") == ["10.9.8.7"]


async def test_over_mcp_with_a_key(machine: Machine, house: House) -> None:
    key = house.make_key("agent", tenant_ids=["agent"])
    with receiving(machine) as server:
        async with agent_with(server, key) as agent:
            refused = await fail(agent, "sandbox_create_session", runtime_class="native", allowed_hosts=["10.9.8.7"])
            assert_explained(refused["code"], "allowed_hosts", refused["detail"], refused["hint"], "allowed_hosts")
            made = await call(agent, "sandbox_create_session", runtime_class="native", allowed_hosts=["*"])
            code = TRY.replace("sys.argv[1:]", "['public.com', '10.9.8.7', 'inside.com']")
            done = await call(agent, "sandbox_run", session_id=made["session_id"], code=code, language="python")
            assert done["stdout"].split() == ["45.90.31.1", "refused", "refused"]
