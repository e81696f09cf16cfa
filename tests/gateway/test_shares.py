"""A gateway that other machines reach, and the share of this one that a tenant has by default."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from tests.gateway.house import Guest, House, open_house
from tests.mcp.agents import call, fail
from tests.mcp.test_keys import agent_with, receiving

MORE = 2 * len(os.sched_getaffinity(0)) + 1  # processors than a tenant's share


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house


def ask_for_more(guest: Guest) -> tuple[grpc.StatusCode, pb.ErrorDetail | None]:
    return guest.refused("CreateSession", pb.CreateSessionRequest(limits=pb.Limits(cpus=MORE)))


def test_beyond_loopback_a_tenant_has_a_share() -> None:
    with open_house(listen="0.0.0.0:0") as house:
        house.endpoint = house.endpoint.replace("0.0.0.0", "127.0.0.1")
        status, detail = ask_for_more(house.tenant("red"))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail is not None
        assert detail.code == "too_many_cpus"
        assert "twice as many as the machine has" in detail.detail
        assert "cpus of [quotas] in k8e.toml" in detail.hint
        assert house.root().create(limits=pb.Limits(cpus=MORE)), "a user of the machine has no limit"


def test_what_the_administrator_says_counts() -> None:
    with open_house("[quotas]\ncpus = 0\n", listen="0.0.0.0:0") as house:
        house.endpoint = house.endpoint.replace("0.0.0.0", "127.0.0.1")
        assert house.tenant("red").create(limits=pb.Limits(cpus=MORE))


async def test_on_loopback_it_has_no_limit_until_agents_come_from_elsewhere(house: House) -> None:
    key = house.make_key("red", tenant_ids=["red"])
    guest = house.guest(key)
    assert guest.create(limits=pb.Limits(cpus=MORE))
    guest.destroy_all()
    with receiving(house.machine) as server:
        assert ask_for_more(guest)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with agent_with(server, key) as agent:
            for _ in range(MORE - 1):  # one processor each
                await call(agent, "sandbox_create_session")
            refused = await fail(agent, "sandbox_create_session")
            assert (refused["code"], "cpus of [quotas]" in refused["hint"]) == ("too_many_cpus", True)
