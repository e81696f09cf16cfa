"""Questions as conversations: what the resolver wants done, what it is told, what it says in the end."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

import dns.edns
import dns.message
import dns.rcode
import dns.rdata
import pytest

from k8e.engine.local.dns.answers import Finding
from k8e.engine.local.dns.decisions import Rules
from k8e.engine.local.dns.queries import Query, read_query
from k8e.engine.local.dns.resolution import Admit, AskUpstream, Failure, Result, Step, Tell, answer_query
from k8e.policy import HostList


class Conversation:
    """`expect(step)` is what the resolver should want next, `tell(result)` how that went."""

    def __init__(self, name: str, kind: str, rules: Rules) -> None:
        query = read_query(dns.message.make_query(name, kind, use_edns=0).to_wire())
        assert isinstance(query, Query)
        self.rules = rules
        self._steps = answer_query(query, lambda: self.rules)
        self._pending: Result = None

    def expect(self, step: Step) -> Conversation:
        assert self._steps.send(self._pending) == step
        self._pending = None
        return self

    def tell(self, result: Result) -> Conversation:
        self._pending = result
        return self

    def change(self, *hosts: str) -> Conversation:
        self.rules = Rules(HostList.parse(hosts))
        return self

    def end(
        self, *records: str, rcode: dns.rcode.Rcode = dns.rcode.NOERROR, ttl: int | None = None
    ) -> dns.message.Message:
        with pytest.raises(StopIteration) as stop:
            self._steps.send(self._pending)
        reply = stop.value.value
        assert isinstance(reply, dns.message.Message)
        assert reply.rcode() == rcode
        assert sorted(record.to_text() for rrset in reply.answer for record in rrset) == sorted(records)
        assert ttl is None or [rrset.ttl for rrset in reply.answer] == [ttl]
        return reply


def ask(name: str, kind: str = "A", *hosts: str, **rules: object) -> Conversation:
    return Conversation(name, kind, Rules(HostList.parse(hosts), **rules))  # type: ignore[arg-type]


def found(kind: str, *values: str, ttl: int = 60) -> Finding:
    return Finding(True, tuple(dns.rdata.from_text("IN", kind, value) for value in values), ttl)


def admit(hosts: str, name: str, values: Sequence[str], seconds: float = 60.0) -> Admit:
    (entry,) = HostList.parse([hosts]).entries
    return Admit(entry, name, found("AAAA" if ":" in values[0] else "A", *values).addresses, seconds)


def test_a_listed_name() -> None:
    talk = ask("Example.com", "A", "example.com")
    talk.expect(AskUpstream("example.com", 1)).tell(found("A", "8.8.4.1", "8.8.4.2"))
    talk.expect(admit("example.com", "example.com", ["8.8.4.1", "8.8.4.2"])).tell(None)
    talk.end("8.8.4.1", "8.8.4.2", ttl=60)


def test_a_name_on_several_entries_is_opened_for_each() -> None:
    talk = ask("api.example.com", "AAAA", "*.example.com", "api.example.com:8443", "example.com")
    talk.expect(AskUpstream("api.example.com", 28)).tell(found("AAAA", "2606:4700::1"))
    talk.expect(admit("api.example.com:8443", "api.example.com", ["2606:4700::1"]))
    talk.expect(admit("*.example.com", "api.example.com", ["2606:4700::1"]))
    talk.end("2606:4700::1")


@pytest.mark.parametrize(
    "name",
    [
        "evil.com",
        "example.com.evil.com",
        "notexample.com",
        "sub.example.com",
        "com",
        "examplexcom",
        "xn--exmple-cua.com",
    ],
)
@pytest.mark.parametrize("kind", ["A", "AAAA", "TXT", "ANY", "HTTPS", "MX", "SRV", "TYPE65280"])
def test_a_name_that_is_not_listed(name: str, kind: str) -> None:
    talk = ask(name, kind, "example.com")
    talk.expect(Tell(name, "name_not_listed"))
    talk.end(rcode=dns.rcode.NXDOMAIN)


def test_an_empty_list_allows_nothing() -> None:
    ask("example.com").expect(Tell("example.com", "name_not_listed")).end(rcode=dns.rcode.NXDOMAIN)


@pytest.mark.parametrize("name", [r"exa\.mple.com", r"example\000.com", r"example.com\032", r"\255.com"])
def test_what_is_no_host_name_is_told_with_its_bytes_escaped(name: str) -> None:
    ask(name, "A", "example.com", "*.com").expect(Tell(name, "invalid_name")).end(rcode=dns.rcode.NXDOMAIN)


@pytest.mark.parametrize(
    "name", ["metadata.google.internal", "METADATA.GOOGLE.INTERNAL", "metadata.goog", "instance-data.ec2.internal"]
)
def test_metadata_is_refused_whatever_the_list_says(name: str) -> None:
    talk = ask(name, "A", "*.google.internal", "*.internal", "*.goog", "metadata.azure.example")
    talk.expect(Tell(name.lower(), "metadata")).end(rcode=dns.rcode.NXDOMAIN)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "foo.localhost", "box"])
def test_the_machine_itself_is_answered_without_asking_anybody(name: str) -> None:
    ask(name, "A", hostname="box").end("127.0.0.1")
    ask(name, "AAAA", hostname="box").end("::1")
    ask(name, "MX", hostname="box").end()


def test_addresses_are_not_turned_into_names_and_nobody_is_bothered_with_it() -> None:
    ask("1.0.0.127.in-addr.arpa", "PTR").end("localhost.")
    ask("1." + "0." * 31 + "ip6.arpa", "PTR").end("localhost.")
    ask("4.4.8.8.in-addr.arpa", "PTR", "*.arpa").end(rcode=dns.rcode.NXDOMAIN)
    ask("_dns.resolver.arpa", "SVCB").end(rcode=dns.rcode.NXDOMAIN)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "0.0.0.0", "224.0.0.1"]
)
def test_a_listed_name_that_leads_inwards(address: str) -> None:
    talk = ask("rebound.example", "A", "rebound.example")
    talk.expect(AskUpstream("rebound.example", 1)).tell(found("A", address))
    talk.expect(Tell("rebound.example", "address_not_public", address))
    reply = talk.end()
    assert isinstance(reply.options[0], dns.edns.EDEOption)
    assert reply.options[0].code == dns.edns.EDECode.FILTERED


@pytest.mark.parametrize(
    "address",
    [
        "::1",
        "::",
        "fe80::1",
        "fd00::1",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:8.8.4.1",
        "64:ff9b::7f00:1",
        "ff02::1",
    ],
)
def test_and_the_same_in_ipv6(address: str) -> None:
    talk = ask("rebound.example", "AAAA", "rebound.example")
    talk.expect(AskUpstream("rebound.example", 28)).tell(found("AAAA", address))
    talk.expect(Tell("rebound.example", "address_not_public", str(ip_address(address)))).end()


def test_of_a_mixed_answer_the_good_part_is_given() -> None:
    talk = ask("mixed.example", "A", "mixed.example")
    talk.expect(AskUpstream("mixed.example", 1)).tell(found("A", "127.0.0.1", "8.8.4.1", "10.0.0.1"))
    talk.expect(admit("mixed.example", "mixed.example", ["8.8.4.1"]))
    talk.end("8.8.4.1")


def test_a_mirror_of_the_machine_may_be_private_but_not_the_machine() -> None:
    talk = ask("mirror.corp", "A", "mirror.corp:8080", mirrors=frozenset({"mirror.corp"}))
    talk.expect(AskUpstream("mirror.corp", 1)).tell(found("A", "10.0.0.1", "127.0.0.1", "169.254.169.254"))
    talk.expect(admit("mirror.corp:8080", "mirror.corp", ["10.0.0.1"]))
    talk.end("10.0.0.1")


def test_a_private_address_that_is_listed_itself_is_answered_and_keeps_its_own_ports() -> None:
    talk = ask("db.corp", "A", "db.corp:5432", "10.0.0.0/24:443")
    talk.expect(AskUpstream("db.corp", 1)).tell(found("A", "10.0.0.7", "10.0.1.7"))
    talk.end("10.0.0.7")


@pytest.mark.parametrize(("ttl", "seen"), [(0, 1), (1, 1), (90_000, 3600)])
def test_the_kernel_is_told_the_life_that_the_client_sees(ttl: int, seen: int) -> None:
    talk = ask("example.com", "A", "example.com")
    talk.expect(AskUpstream("example.com", 1)).tell(found("A", "8.8.4.1", ttl=ttl))
    talk.expect(admit("example.com", "example.com", ["8.8.4.1"], float(seen)))
    talk.end("8.8.4.1", ttl=seen)


def test_a_name_that_does_not_exist_and_one_without_such_an_address() -> None:
    talk = ask("no.example", "A", "*.example")
    talk.expect(AskUpstream("no.example", 1)).tell(Finding(False)).end(rcode=dns.rcode.NXDOMAIN)
    talk = ask("v6only.example", "A", "*.example")
    talk.expect(AskUpstream("v6only.example", 1)).tell(Finding(True)).end()


def test_upstream_fails() -> None:
    talk = ask("example.com", "A", "example.com")
    reply = talk.expect(AskUpstream("example.com", 1)).tell(Failure("cable is cut")).end(rcode=dns.rcode.SERVFAIL)
    assert isinstance(reply.options[0], dns.edns.EDEOption)
    assert reply.options[0].text == "cable is cut"


def test_the_kernel_cannot_be_told() -> None:
    talk = ask("example.com", "A", "example.com")
    talk.expect(AskUpstream("example.com", 1)).tell(found("A", "8.8.4.1"))
    talk.expect(admit("example.com", "example.com", ["8.8.4.1"])).tell(Failure("no")).end(rcode=dns.rcode.SERVFAIL)


def test_the_list_changes_while_upstream_is_asked() -> None:
    talk = ask("example.com", "A", "example.com")
    talk.expect(AskUpstream("example.com", 1)).change("other.com").tell(found("A", "8.8.4.1"))
    talk.expect(Tell("example.com", "name_not_listed")).end(rcode=dns.rcode.NXDOMAIN)


def test_the_list_changes_while_the_kernel_is_told() -> None:
    talk = ask("example.com", "A", "example.com")
    talk.expect(AskUpstream("example.com", 1)).tell(found("A", "8.8.4.1"))
    talk.expect(admit("example.com", "example.com", ["8.8.4.1"])).change()
    talk.expect(Tell("example.com", "name_not_listed")).end(rcode=dns.rcode.NXDOMAIN)


@pytest.mark.parametrize(
    "kind", ["HTTPS", "SVCB", "MX", "NS", "SOA", "CAA", "PTR", "CNAME", "DNSKEY", "NAPTR", "TYPE65280"]
)
def test_of_a_listed_name_other_types_are_empty_and_not_asked_for(kind: str) -> None:
    reply = ask("example.com", kind, "example.com").end()
    assert isinstance(reply.options[0], dns.edns.EDEOption)


def test_any_is_answered_with_as_little_as_possible() -> None:
    ask("example.com", "ANY", "example.com").end('"RFC8482" ""')


@pytest.mark.parametrize("kind", ["AXFR", "IXFR", "MAILB"])
def test_whole_zones_are_refused(kind: str) -> None:
    ask("example.com", kind, "example.com").end(rcode=dns.rcode.REFUSED)


def test_the_root_is_refused() -> None:
    ask(".", "NS", "example.com").end(rcode=dns.rcode.REFUSED)


def test_text_of_a_listed_name_is_passed_on() -> None:
    talk = ask("example.com", "TXT", "example.com")
    talk.expect(AskUpstream("example.com", 16)).tell(found("TXT", '"hello"')).end('"hello"')


def test_services_of_a_listed_name_lead_to_listed_names_only() -> None:
    talk = ask("_https._tcp.example.com", "SRV", "example.com", "*.cdn.example")
    talk.expect(AskUpstream("_https._tcp.example.com", 33))
    talk.tell(found("SRV", "1 1 443 a.cdn.example.", "1 1 443 evil.com.", "1 1 443 metadata.google.internal."))
    talk.end("1 1 443 a.cdn.example.")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_https._tcp.example.com", "A"),
        ("_https._tcp.example.com", "TXT"),
        ("_https._udp.example.com", "SRV"),
        ("x._tcp.example.com", "SRV"),
        ("_" + "x" * 16 + "._tcp.example.com", "SRV"),
        ("_a._b._tcp.example.com", "SRV"),
        ("_https._tcp.evil.com", "SRV"),
    ],
)
def test_nothing_else_below_a_listed_name_passes_as_its_service(name: str, kind: str) -> None:
    ask(name, kind, "example.com").expect(Tell(name, "name_not_listed")).end(rcode=dns.rcode.NXDOMAIN)


def test_what_a_search_list_makes_of_a_name_is_not_told_again() -> None:
    search = ("corp.example", "lab.example")
    ask("evil.com.lab.example", search=search, refused={"evil.com"}).end(rcode=dns.rcode.NXDOMAIN)
    ask("example.com.corp.example", "A", "example.com", search=search).end(rcode=dns.rcode.NXDOMAIN)
    # But a name is not hidden by looking like one.
    for name, refused in (("evil.com.lab.example", "other.com"), ("evil.com.net", "evil.com"), ("corp.example", "")):
        talk = ask(name, search=search, refused={refused})
        talk.expect(Tell(name, "name_not_listed")).end(rcode=dns.rcode.NXDOMAIN)
