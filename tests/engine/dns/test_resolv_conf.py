from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine.local.dns.resolv_conf import Configuration, ResolvConf, Server, resolv_conf_for_sandbox


def test_what_matters_is_read_and_the_rest_passed_over() -> None:
    configuration = Configuration.parse(
        "# nameserver 192.0.2.9\n"
        "; another comment\n"
        "nameserver 192.0.2.1\n"
        "nameserver\tfe80::1%eth0   # a comment behind it\n"
        "nameserver nonsense\n"
        " nameserver 192.0.2.8\n"
        "nameserver 2001:db8::1\n"
        "nameserver 192.0.2.4\n"
        "domain old.example\n"
        "search Corp.Example. lab.example .\n"
        "options timeout:3 attempts:4 rotate use-vc ndots:2 edns0 trust-ad nonsense ndots:x\n"
        "sortlist 192.0.2.0\n"
    )
    assert [str(server) for server in configuration.servers] == [
        "192.0.2.1:53",
        "[fe80::1%eth0]:53",
        "[2001:db8::1]:53",
    ]
    assert configuration.search == ("corp.example", "lab.example")
    assert (configuration.timeout, configuration.attempts, configuration.rotate, configuration.tcp) == (
        3,
        4,
        True,
        True,
    )


@pytest.mark.parametrize("text", ["", "\n\n", "search example.com\n", "nameserver\nsearch\noptions\ndomain\n"])
def test_without_a_server_the_machine_itself_is_asked(text: str) -> None:
    assert Configuration.parse(text).servers == (Server(ip_address("127.0.0.1")),)


def test_options_stay_within_reason() -> None:
    configuration = Configuration.parse("options timeout:0 attempts:999 ndots:999999999999")
    assert (configuration.timeout, configuration.attempts, configuration.ndots) == (1, 5, 15)


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    assert Configuration.parse(text).servers


def test_a_name_with_a_dot_is_asked_as_it_is_first_and_a_short_one_last() -> None:
    configuration = Configuration(search=("a.example", "b.example"), ndots=2)
    assert list(configuration.candidates("x.y.z")) == ["x.y.z"]
    assert list(configuration.candidates("x.y")) == ["x.y", "x.y.a.example", "x.y.b.example"]
    assert list(configuration.candidates("x")) == ["x.a.example", "x.b.example", "x"]
    assert list(Configuration().candidates("x")) == ["x"]


def test_the_file_is_read_again_when_it_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 192.0.2.1\n")
    file = ResolvConf(path)
    first = file.current()
    assert file.current() is first
    path.write_text("nameserver 192.0.2.2\nsearch example.com\n")
    assert str(file.current().servers[0].address) == "192.0.2.2"
    # As network tools do it: a new file in the place of the old one, here of the same size and time.
    status = path.stat()
    other = tmp_path / "other"
    other.write_text("nameserver 192.0.2.3\nsearch example.com\n")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    assert str(file.current().servers[0].address) == "192.0.2.3"
    path.unlink()
    assert file.current().servers == Configuration().servers
    path.write_text("nameserver 192.0.2.4\n")
    assert str(file.current().servers[0].address) == "192.0.2.4"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("192.0.2.1", "192.0.2.1:53"),
        ("192.0.2.1:5353", "192.0.2.1:5353"),
        ("2001:db8::1", "[2001:db8::1]:53"),
        ("[2001:db8::1]", "[2001:db8::1]:53"),
        ("[fe80::1%eth0]:5353", "[fe80::1%eth0]:5353"),
    ],
)
def test_servers_are_written_with_or_without_a_port(text: str, shown: str) -> None:
    assert str(Server.parse(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example.com",
        "192.0.2.1:",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "[::1",
        "[::1]x",
        "192.0.2.1:\N{ARABIC-INDIC DIGIT FIVE}",
    ],
)
def test_what_is_no_server_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Server.parse(text)


def test_a_sandbox_asks_one_server_and_tries_no_suffixes() -> None:
    own = Configuration.parse(resolv_conf_for_sandbox([ip_address("10.0.0.1"), ip_address("fd00::1")]))
    assert [str(server.address) for server in own.servers] == ["10.0.0.1"]
    assert own.search == ()
