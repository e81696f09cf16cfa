"""What people may write, the one form it gets, and what they are told when it is nothing."""

from __future__ import annotations

import pytest

from k8e.policy import HostList, InvalidEntry, canonical_name, is_metadata_name
from k8e.policy.hosts import MAX_ENTRIES


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("example.com", "example.com"),
        ("Example.COM.", "example.com"),
        ("example.com:8443", "example.com:8443"),
        ("*.Example.com", "*.example.com"),
        ("*.com", "*.com"),
        ("*", "*"),
        ("intranet", "intranet"),
        ("_service._tcp.example.com", "_service._tcp.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("*.bücher.example:444", "*.xn--bcher-kva.example:444"),
        ("straße.example", "xn--strae-oqa.example"),  # not strasse: transitional processing is off
        ("example。com", "example.com"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1/32", "192.0.2.1"),
        ("192.0.2.1:22", "192.0.2.1:22"),
        ("192.0.2.0/24", "192.0.2.0/24"),
        ("192.0.2.0/24:22", "192.0.2.0/24:22"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:8443", "[2001:db8::1]:8443"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("[2001:db8::/32]:8443", "[2001:db8::/32]:8443"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("[::ffff:c000:201]:22", "192.0.2.1:22"),
        ("::ffff:192.0.2.0/120", "192.0.2.0/24"),
    ],
)
def test_an_entry_has_one_form(text: str, canonical: str) -> None:
    hosts = HostList.parse([text])
    assert hosts.texts == (canonical,)
    assert HostList.parse(hosts.texts) == hosts


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "empty"),
        (".", "empty"),
        (" example.com", "space"),
        ("exam\0ple.com", "control"),
        ("example.com\n", "control"),
        ("example\u200b.com", "control"),
        ("a.example,b.example", "comma"),
        ("https://example.com/", "URL"),
        ("example.com/path", "path"),
        ("user@example.com", "user"),
        ("user:password@example.com", "user"),
        ("example.com?x", "URL"),
        ("example.com#x", "URL"),
        ("example.com\\x", "URL"),
        ("exam%70le.com", "escape"),
        ("fe80::1%eth0", "zone"),
        ("*.", "every host"),
        ("*:443", "every host"),
        ("**", "first label"),
        ("*.*.example.com", "first label"),
        ("www.*.com", "first label"),
        ("*example.com", "first label"),
        ("example..com", "empty label"),
        (".example.com", "empty label"),
        ("example.com..", "empty label"),
        ("-example.com", "'-'"),
        ("example-.com", "'-'"),
        ("a" * 64 + ".com", "64 characters"),
        ("a." * 126 + "ab", "254 characters"),
        ("exa$mple.com", "'$'"),
        ("x" * 600, "600 characters"),
        ("\N{SNOWMAN WITHOUT SNOW}\N{COMBINING ACUTE ACCENT}.com", "not a host name"),
        ("example.com:", "no port"),
        ("example.com:0", "no port"),
        ("example.com:0443", "no port"),
        ("example.com:65536", "no port"),
        ("example.com:+1", "no port"),
        ("example.com:٤٤٣", "no port"),
        (":443", "no host"),
        ("[2001:db8::1", "brackets"),
        ("[192.0.2.1]:80", "brackets"),
        ("[2001:db8::1]443", "follows"),
        ("[2001:db8::]/32", "follows"),
        ("2001:db8::1::2", "no address"),
        # Resolvers read all of these as 127.0.0.1 or some other address.
        ("127.1", "number"),
        ("2130706433", "number"),
        ("0x7f000001", "number"),
        ("0x7f.1", "number"),
        ("017700000001", "number"),
        ("0177.0.0.1", "number"),
        ("192.0.2.01", "number"),
        ("192.0.2.1.", "number"),
        ("192.0.2.256", "number"),
        ("192.0.2", "number"),
        ("*.192.0.2.1", "number"),
        ("\uff11\uff19\uff12.0.2.1", "number"),
        ("192。0。2。1", "number"),
        ("192.0.2.0/24/8", "length of a block"),
        ("192.0.2.0/33", "length of a block"),
        ("192.0.2.0/024", "length of a block"),
        ("192.0.2.0/255.255.255.0", "length of a block"),
        ("192.0.2.0/", "length of a block"),
        ("2001:db8::/129", "length of a block"),
        ("192.0.2/24", "no address"),
        ("192.0.2.1/24", "bits beyond"),
        ("2001:db8::1/32", "bits beyond"),
        ("127.0.0.1", "machine itself"),
        ("127.0.0.0/8:8080", "machine itself"),
        ("[::1]:8080", "machine itself"),
        ("::ffff:127.0.0.1", "machine itself"),
        ("64:ff9b::127.0.0.1", "machine itself"),
        ("localhost", "machine itself"),
        ("*.LocalHost.", "machine itself"),
        ("169.254.1.0/24", "link-local"),
        ("fe80::/64", "link-local"),
        ("169.254.169.254", "metadata"),
        ("[fd00:ec2::254]:80", "metadata"),
        ("100.100.100.200", "metadata"),
        ("2002:a9fe:a9fe::1", "metadata"),
        ("Metadata.Google.internal.", "metadata"),
        ("metadata", "metadata"),
        ("0.0.0.0", "no address of a host"),
        ("::", "no address of a host"),
        ("224.0.0.1", "no address of a host"),
        ("255.255.255.255", "no address of a host"),
        ("ff02::1", "no address of a host"),
    ],
)
def test_what_is_no_entry_is_refused_with_cause_and_hint(text: str, cause: str) -> None:
    with pytest.raises(InvalidEntry) as caught:
        HostList.parse(["example.com", text])
    assert cause in caught.value.cause
    assert caught.value.hint
    assert text.startswith(caught.value.text.removesuffix("..."))


def test_a_block_with_host_bits_is_told_the_right_block() -> None:
    with pytest.raises(InvalidEntry) as caught:
        HostList.parse(["10.1.2.3/16"])
    assert caught.value.hint == "write 10.1.0.0/16 or 10.1.2.3"


def test_a_list_is_bounded() -> None:
    texts = [f"h{number}.example" for number in range(MAX_ENTRIES)]
    full = HostList.parse([*texts, *texts])
    assert len(full.entries) == MAX_ENTRIES
    with pytest.raises(InvalidEntry, match="more than"):
        HostList.parse([*texts, "one-more.example"])
    with pytest.raises(InvalidEntry, match="more than"):
        full.plus(HostList.parse(["one-more.example"]))


def test_names_asked_for_may_begin_with_a_hyphen() -> None:
    assert canonical_name("-r3.Example.com.") == "-r3.example.com"


def test_metadata_names_and_what_is_under_them() -> None:
    for name in ("metadata.google.internal", "metadata", "x.metadata.google.internal", "instance-data.ec2.internal"):
        assert is_metadata_name(name)
    for name in ("google.internal", "metadata.example.com", "xmetadata", "notmetadata.google.internal"):
        assert not is_metadata_name(name)
