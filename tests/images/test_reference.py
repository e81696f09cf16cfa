"""Names of images: one canonical form, and none that means another image to another tool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine.local.images.authentication import Challenge, parse_challenge
from k8e.engine.reference import InvalidReference, Reference, parse_reference

HEX = "0123456789abcdef" * 4

GOOD = {
    "python": ("docker.io/library/python:latest", "python:latest"),
    "python:3.12-alpine": ("docker.io/library/python:3.12-alpine", "python:3.12-alpine"),
    "k8e/base": ("docker.io/k8e/base:latest", "k8e/base:latest"),
    "docker.io/library/python:3": ("docker.io/library/python:3", "python:3"),
    "index.docker.io/python": ("docker.io/library/python:latest", "python:latest"),
    "localhost/a": ("localhost/a:latest",) * 2,
    "localhost:5000/a/b_c/d__e/f-g.h:T.a-g_1": ("localhost:5000/a/b_c/d__e/f-g.h:T.a-g_1",) * 2,
    "registry.example.com/a@sha256:" + HEX: ("registry.example.com/a@sha256:" + HEX,) * 2,
    "registry.example.com:443/a:1@sha256:" + HEX: ("registry.example.com:443/a:1@sha256:" + HEX,) * 2,
    "127.0.0.1:5000/x": ("127.0.0.1:5000/x:latest",) * 2,
    "[::1]:5000/x": ("[::1]:5000/x:latest",) * 2,
    "a.b/c": ("a.b/c:latest",) * 2,
}

BAD = [
    "",
    "-v/:/host",
    "-v",
    "../../x",
    "../x",
    "a/../b",
    "a/./b",
    "a//b",
    "/a",
    "a/",
    "/",
    "A",
    "a/B",
    "Registry.example.com/a",
    "EXAMPLE.com:5000/a",
    "a:",
    "a:b:c",
    "a@",
    "a@sha256:12",
    "a@md5:" + HEX,
    "a@sha256:" + HEX.upper(),
    "a:tag@",
    ":tag",
    "@sha256:" + HEX,
    "a b",
    "a\nb",
    "a\0b",
    "a\x1b[31mb",
    "a:t\u202eg",
    "\u0430bc",
    "a_",
    "_a",
    "a..b/c",
    "-a.b/c",
    "a.b:/c",
    "a.b:0/c",
    "a.b:65536/c",
    "a.b:\uff11/c",
    "a.b:-1/c",
    "user@a.b/c",
    "user:pw@a.b/c",
    "https://a.b/c",
    "0177.0.0.1/x",
    "127.1/x",
    "2130706433:80/x",
    "1.2.3.4.5/x",
    "a.1/x",
    "[::1/x",
    "[::1]x/y",
    "[0:0:0:0:0:0:0:1]/x",
    "[fe80::1%eth0]/x",
    "a" * 600,
    "a/" + "b" * 256,
    "a:" + "t" * 129,
    "sha256:" + HEX,
]


@pytest.mark.parametrize("text", GOOD)
def test_what_people_write(text: str) -> None:
    found = parse_reference(text)
    assert (str(found), found.short) == GOOD[text]
    assert parse_reference(str(found)) == found == parse_reference(found.short)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidReference) as caught:
        parse_reference(text)
    assert str(caught.value).isprintable()


@given(st.text(max_size=80) | st.text("ab:/@.-_[]1", max_size=30))
def test_whatever_gets_through_is_harmless_and_canonical(text: str) -> None:
    try:
        found = parse_reference(text)
    except InvalidReference:
        return
    canonical = str(found)
    assert canonical.isascii()
    assert canonical.isprintable()
    assert not canonical.startswith(("-", "/", "."))
    assert not {"..", ".", ""} & set(canonical.partition("@")[0].split("/"))
    assert parse_reference(canonical) == found


def test_which_registries_are_on_this_machine() -> None:
    def loopback(host: str) -> bool:
        return Reference(host, "x").loopback

    assert all(map(loopback, ("localhost", "localhost:5000", "127.0.0.1:5000", "127.9.9.9", "[::1]:5000")))
    assert not any(map(loopback, ("docker.io", "10.0.0.1", "localhost.example.com", "[::2]", "example.com:127")))


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ('Bearer realm="https://a/t",service="s",scope="repository:x:pull,push"', "bearer"),
        ('bearer realm="https://a/t"', "bearer"),
        ("Basic realm=x", "basic"),
        ("Basic", "basic"),
        ('Negotiate, Basic realm="x"', None),
        ('Digest realm="x", nonce="y", Basic realm="z"', "basic"),
        ('Bearer realm=""', None),
        ("Bearer", None),
        ("", None),
        ("=" * 9000, None),
        ('Bearer realm="unended', None),
    ],
)
def test_what_registries_want_to_see(header: str, wanted: str | None) -> None:
    found = parse_challenge(header)
    assert (found.scheme if found else None) == wanted


def test_the_parts_of_a_challenge() -> None:
    found = parse_challenge('Bearer realm="https://a/t?x=\\"1\\"", service=s , scope="repository:x:pull,push"')
    values = {"realm": 'https://a/t?x="1"', "service": "s", "scope": "repository:x:pull,push"}
    assert found == Challenge("bearer", values)


@given(st.text(max_size=200))
def test_no_header_is_too_strange(header: str) -> None:
    parse_challenge(header)
