"""The account that an image's `User` names, also with passwd and group files that no person would write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.engine.accounts import Account, UnknownUser, find_account, with_group, with_user
from tests.engine.tiny_images import GROUP, PASSWD

WORKER = Account(1234, 1235, (50, 77), "/home/worker", "worker")


@pytest.mark.parametrize(
    ("wanted", "account"),
    [
        ("", Account(0, 0, (), "/root", "root")),
        ("root", Account(0, 0, (), "/root", "root")),
        ("worker", WORKER),
        ("1234", WORKER),
        ("worker:staff", Account(1234, 50, (), "/home/worker", "worker")),
        ("worker:99", Account(1234, 99, (), "/home/worker", "worker")),
        ("1234:0", Account(1234, 0, (), "/home/worker", "worker")),
        ("4321", Account(4321, 0)),
        ("4321:worker", Account(4321, 1235)),
        (":50", Account(0, 50, (), "/root", "root")),
    ],
)
def test_a_user_is_found_by_name_or_number(wanted: str, account: Account) -> None:
    assert find_account(wanted, PASSWD, GROUP) == account


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("nobody-knows", "no user 'nobody-knows'"),
        ("worker:nothing", "no group 'nothing'"),
        ("-1", "no user"),
        ("0x0", "no user"),
        ("65536", "the highest in a sandbox is 65535"),
        ("worker:65536", "the highest"),
        ("99999999999", "no user"),
        ("\ud800", "no text"),
    ],
)
def test_what_is_nobody_is_said(wanted: str, why: str) -> None:
    with pytest.raises(UnknownUser, match=why):
        find_account(wanted, PASSWD, GROUP)


def test_a_name_comes_before_a_number() -> None:
    passwd = PASSWD + b"1:x:7:8::/seven:/bin/sh\n"
    assert find_account("1", passwd, b"").uid == 7


@pytest.mark.parametrize("home", ["", "relative", "/with\x07bell", "/" + "x" * 5000, "/a/../../etc"])
def test_a_home_that_cannot_be_one_is_the_root(home: str) -> None:
    assert find_account("odd", f"odd:x:5:5:gecos:{home}:/bin/sh\n".encode(), b"").home == "/"


def test_lines_that_are_none_are_passed_over() -> None:
    passwd = b"\n::::::\nshort:x:1\nname:x:minus:0::/:\n\xff\xfe:x:5:5::/five:\nx:x:99999999999:0::/:\n"
    assert find_account("5", passwd, b"\n:\n").home == "/five"
    assert find_account("0", passwd, b"") == Account(0, 0)


def test_a_user_without_a_line_gets_one() -> None:
    account = Account(4321, 4322, home="/home/user")
    assert with_user(PASSWD, account) == PASSWD + b"user:x:4321:4322:user:/home/user:/bin/sh\n"
    assert with_group(GROUP, account) == GROUP + b"user:x:4322:\n"
    assert with_user(b"", Account(0, 0, home="/root")) == b"root:x:0:0:root:/root:/bin/sh\n"
    assert with_user(b"user:x:1:1::/:", account).endswith(b"\nuser1:x:4321:4322:user1:/home/user:/bin/sh\n")
    assert with_user(PASSWD, WORKER) == PASSWD


@given(st.text(), st.binary(), st.binary())
def test_no_file_is_too_strange(wanted: str, passwd: bytes, group: bytes) -> None:
    try:
        account = find_account(wanted, passwd, group)
    except UnknownUser:
        return
    assert 0 <= account.uid <= 65535
    assert 0 <= account.gid <= 65535
    assert account.home[:1] in ("", "/")
    named = with_user(passwd, account)
    assert with_user(named, account) == named
