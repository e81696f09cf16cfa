"""The text of a refusal, and what a daemon that starts again makes of what was written down."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from k8e.damage import Damaged
from k8e.engine import EngineError
from k8e.engine.local.network.addresses import Pool
from k8e.engine.local.network.admissions import Admissions
from k8e.engine.local.network.netlink.elements import Found, mark_bytes, target_key
from k8e.engine.local.network.record import EgressRecord, restore
from k8e.engine.local.network.refusals import TOO_MANY, RefusalContext, explain
from k8e.policy import HostList

WIRE = Pool().wire(9)
AROUND = RefusalContext(
    hosts=HostList.parse(["one.com", "two.com:8443", "192.0.2.0/24"]),
    known=lambda address: {"45.90.31.1": "one.com", "45.90.31.9": "gone.com"}.get(str(address), ""),
    is_machine=lambda address: str(address) in ("192.168.1.5", "10.203.0.0"),
    pool=(ip_network("10.203.0.0/16"), ip_network("fd6b:3865:6e65::/48")),
)
TCP, UDP = 6, 17


@pytest.mark.parametrize(
    ("address", "protocol", "reason"),
    [
        ("45.90.31.2", TCP, "address_not_listed"),
        ("45.90.31.1", TCP, "port_not_listed"),
        ("45.90.31.9", TCP, "address_not_listed"),
        ("192.0.2.7", TCP, "port_not_listed"),
        ("45.90.31.1", UDP, "protocol_not_allowed"),
        ("169.254.169.254", TCP, "metadata"),
        ("fd00:ec2::254", UDP, "metadata"),
        ("192.168.1.5", TCP, "machine"),
        ("10.203.0.0", TCP, "machine"),
        ("10.203.0.3", TCP, "other_sandbox"),
        ("fd6b:3865:6e65::3", TCP, "other_sandbox"),
        ("169.254.7.7", TCP, "address_forbidden"),
        ("224.0.0.1", UDP, "address_forbidden"),
        ("2606:4700::1", TCP, "address_not_listed"),
    ],
)
def test_the_reason_is_the_first_thing_that_would_have_to_change(address: str, protocol: int, reason: str) -> None:
    assert explain(ip_address(address), protocol, 22, AROUND) == reason


def test_what_is_allowed_and_refused_all_the_same_was_one_too_many() -> None:
    assert explain(ip_address("192.0.2.7"), TCP, 80, AROUND) == TOO_MANY
    assert explain(ip_address("45.90.31.1"), TCP, 443, replace(AROUND, is_open=lambda *_: True)) == TOO_MANY
    assert explain(ip_address("45.90.31.1"), TCP, 443, replace(AROUND, hosts=HostList.parse(["*"]))) == TOO_MANY
    assert explain(ip_address("192.0.2.7"), UDP, 80, AROUND) == "protocol_not_allowed"


def full_state() -> Admissions:
    hosts = HostList.parse(["one.com", "two.com", "192.0.2.0/24"])
    state, _ = Admissions(WIRE).adopt(hosts, 0.0)
    for name in ("one.com", "two.com"):
        (entry,) = hosts.entries_for_name(name)
        state.take(state.admit(entry, [ip_address("45.90.31.1"), ip_address("2a0b:4340::1")], 100.0, 0.0))
    return state


def in_kernel(state: Admissions, now: float) -> list[Found]:
    return [
        Found(target_key(*target), b"", mark_bytes(each.mark), 0, int((each.end - now) * 1000))
        for target, each in state.openings.items()
    ]


def test_what_was_written_down_and_is_in_force_is_known_again(tmp_path: Path) -> None:
    state = full_state()
    EgressRecord.of(state).save(tmp_path / "egress.json")
    record = EgressRecord.load(tmp_path / "egress.json")
    found = restore(WIRE, record, in_kernel(state, 0.0), state.marks.values(), 0.0)
    assert (found.unknown, found.dead) == ((), ())
    assert found.admissions.hosts == state.hosts
    assert found.admissions.marks == state.marks
    assert {target: each.mark for target, each in found.admissions.openings.items()} == {
        target: each.mark for target, each in state.openings.items()
    }
    after, change = found.admissions.adopt(state.hosts, 0.0)
    assert not change.dead
    assert not change.closed
    assert after.marks == state.marks


def test_what_is_not_explained_is_to_be_removed() -> None:
    state = full_state()
    stranger = WIRE.mark(4000)
    odd = Found(target_key(ip_address("45.90.99.9"), 443), b"", mark_bytes(stranger), 0, 5000)
    found = restore(WIRE, EgressRecord.of(state), [*in_kernel(state, 0.0), odd], [*state.marks.values(), stranger], 0.0)
    assert found.unknown == (odd,)
    assert found.dead == (stranger,)


def test_marks_that_are_not_in_force_are_not_taken_for_it() -> None:
    """Rules were flushed, or are another edition's."""
    state = full_state()
    found = restore(WIRE, EgressRecord.of(state), [], [], 0.0)
    assert found.admissions.marks == {}
    _, change = found.admissions.adopt(state.hosts, 0.0)
    assert len(change.live) == 1, "the block's; names have none until they lead somewhere"


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"hosts": 3, "marks": []}', '{"hosts": [], "marks": [["x", []]]}']
)
def test_a_record_that_cannot_be_read_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "egress.json").write_text(content)
    with pytest.raises(Damaged):
        EgressRecord.load(tmp_path / "egress.json")


def test_a_record_with_what_is_no_entry_says_so() -> None:
    with pytest.raises(EngineError) as raised:
        restore(WIRE, EgressRecord(("http://one.com/",), ()), [], [], 0.0)
    assert raised.value.control == "network record"
