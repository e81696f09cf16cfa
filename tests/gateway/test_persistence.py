"""Persistent sessions over gRPC: stopped and started as at the other doors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest

from k8e.doors.grpc import sandbox_pb2 as pb
from tests.cli.machine import wait_until
from tests.gateway.house import Guest, House, open_house

MEMORY = 256 << 20


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """In which a tenant can have one such session at work, and as many as they like that are stopped."""
    with open_house(f"[quotas]\nmemory = {MEMORY}\n") as made:
        yield made


@pytest.fixture(scope="module")
def acme(house: House) -> Guest:
    return house.tenant("acme")


def make(guest: Guest, name: str, **more: object) -> None:
    guest.create(session_id=name, persistent=True, limits=pb.Limits(memory=MEMORY), **more)


def stop(guest: Guest, name: str) -> pb.Session:
    session: pb.Session = guest.call("StopSession", pb.StopSessionRequest(session_id=name)).session
    return session


def test_quotas_hold_for_what_is_started_and_the_log_says_who_did_it(house: House, acme: Guest) -> None:
    make(acme, "first")
    code, detail = acme.refused(
        "CreateSession", pb.CreateSessionRequest(persistent=True, limits=pb.Limits(memory=MEMORY))
    )
    assert (code, detail and detail.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_much_memory")
    assert stop(acme, "first").phase == "stopped"
    make(acme, "second")
    code, detail = acme.refused("StartSession", pb.StartSessionRequest(session_id="first"))
    assert (code, detail and detail.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_much_memory")
    assert detail is not None
    assert detail.retry_after > 0
    assert acme.call("GetSession", pb.GetSessionRequest(session_id="first")).session.phase == "stopped"
    stop(acme, "second")
    assert acme.call("StartSession", pb.StartSessionRequest(session_id="first")).session.phase == "active"
    listed = acme.call("ListSessions", pb.ListSessionsRequest()).sessions
    assert {one.session_id: one.phase for one in listed} == {"first": "active", "second": "stopped"}
    log = house.machine.folder / "s" / "audit.log"

    def is_told() -> bool:
        told = [json.loads(line) for line in log.read_text().splitlines()]
        seen = {(one["event"], one.get("session")) for one in told if one.get("caller") == "key:acme"}
        return {("session_stopped", "first"), ("session_stopped", "second"), ("session_started", "first")} <= seen

    wait_until(is_told)
    acme.destroy_all()


def test_variables_that_are_no_text_and_secrets_come_back_as_they_were(acme: Guest) -> None:
    make(acme, "exact", env={"A": "é"}, env_bytes={"B": b"\xff\xfe"}, secrets={"C": "s"}, secrets_bytes={"D": b"\xfd"})
    script = "printf %s%s%s%s $A $B $C $D"
    assert acme.run("exact", script).stdout == "é".encode() + b"\xff\xfes\xfd"
    assert list(stop(acme, "exact").secret_keys) == ["C", "D"]
    code, detail = acme.refused("StartSession", pb.StartSessionRequest(session_id="exact", secrets={"C": "s"}))
    assert detail is not None
    assert (code, detail.code, detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "secrets_missing", "secrets")
    assert "D" in detail.error
    both = pb.StartSessionRequest(session_id="exact", secrets={"C": "s"}, secrets_bytes={"C": b"t", "D": b"x"})
    code, detail = acme.refused("StartSession", both)
    assert (code, detail and detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "secrets.C")
    again = pb.StartSessionRequest(
        session_id="exact", env_bytes={"A": b"\xe9"}, secrets={"C": "t"}, secrets_bytes={"D": b"\xfc"}
    )
    acme.call("StartSession", again)
    assert acme.run("exact", script).stdout == b"\xe9\xff\xfet\xfc"
    acme.destroy_all()


def test_a_session_is_made_as_it_was_described(acme: Guest) -> None:
    little = pb.Limits(memory=MEMORY)
    acme.create(session_id="like-this", limits=little, labels={"team": "blue"}, more_hosts=["more.example"])
    session = acme.call("GetSession", pb.GetSessionRequest(session_id="like-this")).session
    assert dict(session.labels) == {"team": "blue"}
    assert {"more.example"} < set(session.allowed_hosts)  # on top of the usual ones
    assert not session.persistent
    both = pb.CreateSessionRequest(more_hosts=["a.example"], allowed_hosts=["b.example"])
    code, detail = acme.refused("CreateSession", both)
    assert (code, detail and detail.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument")
    code, detail = acme.refused("CreateSession", pb.CreateSessionRequest(labels={"no name": "x"}))
    assert (code, detail and detail.field) == (grpc.StatusCode.INVALID_ARGUMENT, "labels")
    acme.destroy_all()
