"""The small internet itself: what a machine reaches that nothing is refused. Without this a refusal means nothing."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator

import dns.flags
import dns.message
import dns.query
import dns.rcode
import pytest

from tests.egress.internet import HOST4, NAME_SERVER, OTHER_NAME_SERVER, Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.sandboxes import needs_root

pytestmark = needs_root


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with private_machine(), small_internet() as internet:
        yield internet


def get(address: str, port: int, path: str = "/") -> dict[str, object]:
    with socket.create_connection((address, port), timeout=20) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return dict(json.loads(connection.makefile("rb").read().partition(b"\r\n\r\n")[2]))


@pytest.mark.parametrize(
    "address",
    ["45.90.31.1", "8.8.8.8", "10.1.2.3", "192.168.1.1", "169.254.169.254", "100.100.100.200", "2606:4700::1",
     "fd00:ec2::254", "2a0b:4340:9::1", "168.63.129.16"],
)  # fmt: skip
def test_every_address_is_somebody(internet: Internet, address: str) -> None:
    internet.clear()
    assert get(address, 80)["address"] == address
    notes = internet.notes()
    assert (address, 80) in notes.connections
    assert ("tcp", address, 80) in notes.packets


def test_the_machine_has_only_this_way_out(internet: Internet) -> None:
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
    assert {link["ifname"] for link in links} == {"lo", "uplink0"}
    routes = json.loads(subprocess.run(["ip", "-j", "route"], capture_output=True, check=True).stdout)
    assert {route["dev"] for route in routes} == {"uplink0"}


def test_tls(internet: Internet) -> None:
    context = ssl.create_default_context(cafile=str(internet.authority))
    with (
        socket.create_connection(("45.90.31.1", 443), timeout=20) as connection,
        context.wrap_socket(connection, server_hostname="allowed.com") as tls,
    ):
        tls.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b'"port": 443' in tls.makefile("rb").read()


@pytest.mark.parametrize("address", ["45.90.31.1", "2606:4700::1"])
def test_udp_is_echoed_from_the_same_address(internet: Internet, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(20)
        client.connect((address, 9999))
        client.send(b"hello")
        assert client.recv(100) == b"hello"


def test_icmp_is_answered(internet: Internet) -> None:
    internet.clear()
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as client:
        client.settimeout(20)
        client.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("45.90.31.1", 0))
        assert client.recvfrom(100)[1][0] == "45.90.31.1"
    assert ("icmp", "45.90.31.1", 0) in internet.notes().packets


def ask(name: str, kind: str = "A", server: str = NAME_SERVER, tcp: bool = False) -> dns.message.Message:
    query = dns.message.make_query(name, kind)
    return (dns.query.tcp if tcp else dns.query.udp)(query, server, timeout=20)


def answers(message: dns.message.Message) -> list[str]:
    return [item.to_text() for rrset in message.answer for item in rrset]


def test_names(internet: Internet) -> None:
    internet.publish(
        {
            "plain.com": {"A": ["45.90.31.1"], "AAAA": ["2a0b:4340:9::1"], "TXT": ['"text"']},
            "one.com": {"CNAME": "two.com"},
            "two.com": {"CNAME": "plain.com"},
            "robin.com": {"A": ["45.90.31.1", "45.90.31.2"]},
            "turns.com": {"turns": [["45.90.31.1"], ["127.0.0.1"]], "ttl": 1},
            "broken.com": {"rcode": "SERVFAIL"},
            "big.com": {"A": ["45.90.31.1"], "truncate": True},
            "svc.com": {"HTTPS": ['1 . alpn="h2" ipv4hint="45.90.31.1"']},
        }
    )
    internet.clear()
    assert answers(ask("Plain.com")) == ["45.90.31.1"]
    assert answers(ask("plain.com", "AAAA", OTHER_NAME_SERVER, tcp=True)) == ["2a0b:4340:9::1"]
    assert answers(ask("one.com")) == ["two.com.", "plain.com.", "45.90.31.1"]
    assert sorted(answers(ask("robin.com"))) == ["45.90.31.1", "45.90.31.2"]
    assert [answers(ask("turns.com")) for _ in range(3)] == [["45.90.31.1"], ["127.0.0.1"], ["127.0.0.1"]]
    assert ask("broken.com").rcode() is dns.rcode.SERVFAIL
    assert ask("nobody.com").rcode() is dns.rcode.NXDOMAIN
    assert ask("big.com").flags & dns.flags.TC
    assert answers(ask("big.com", tcp=True)) == ["45.90.31.1"]
    assert len(answers(ask("plain.com", "ANY"))) == 3
    assert "h2" in answers(ask("svc.com", "HTTPS"))[0]
    notes = internet.notes()
    assert ("Plain.com", "A", "udp") in notes.questions
    assert ("plain.com", "AAAA", "tcp") in notes.questions
    assert "nobody.com" in notes.names


def test_nothing_is_noted_that_was_not_sent(internet: Internet) -> None:
    internet.clear()
    assert internet.notes().packets == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("203.0.113.9", 4242))
        assert sender.getsockname()[0] == "0.0.0.0"
    assert internet.notes().packets == [("udp", "203.0.113.9", 4242)]
    assert HOST4 not in str(internet.notes())
