"""Finds the account that an image's `User` names, in the image's own passwd and group, which are not trusted. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_FILE: Final = 1 << 20
_MAX_ID: Final = 65535  # a sandbox has this many ids; see ID_COUNT
_MAX_GROUPS: Final = 64  # of one user, as many as the agent takes
_NUMBER: Final = re.compile(rb"[0-9]{1,10}")
_LONGEST: Final = 4096


class UnknownUser(Exception):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class Account:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # besides that one
    home: str = ""  # empty: there is no line for it
    name: str = ""


@dataclass(frozen=True, slots=True)
class _User:
    name: bytes
    uid: int
    gid: int
    home: bytes


@dataclass(frozen=True, slots=True)
class _Group:
    name: bytes
    gid: int
    members: tuple[bytes, ...]


def find_account(wanted: str, passwd: bytes, group: bytes) -> Account:
    """`wanted`: name or number, perhaps with `:` and a group's; empty is root. As with other runtimes, a name comes
    first, and a number needs no line; its group is then root's."""
    try:
        user, _, told = wanted.encode().partition(b":")
    except UnicodeEncodeError:
        raise UnknownUser("its name is no text") from None
    user = user or b"0"
    users = list(_read_users(passwd))
    found = next((line for line in users if line.name == user), None)
    if found is None and _NUMBER.fullmatch(user):
        found = next((line for line in users if line.uid == int(user)), None)
        if found is None:
            return _check(Account(int(user), _find_group(told, group) if told else 0))
    if found is None:
        raise UnknownUser(f"its /etc/passwd has no user {wanted.partition(':')[0]!r}")
    more = () if told else tuple(line.gid for line in _read_groups(group) if found.name in line.members)
    groups = tuple(dict.fromkeys(gid for gid in more if gid <= _MAX_ID))[:_MAX_GROUPS]
    gid = _find_group(told, group) if told else found.gid
    return _check(Account(found.uid, gid, groups, _clean_home(found.home), found.name.decode(errors="replace")))


def _check(account: Account) -> Account:
    if max(account.uid, account.gid) > _MAX_ID:
        raise UnknownUser(f"its user has the ids {account.uid}:{account.gid}; the highest in a sandbox is {_MAX_ID}")
    return account


def _find_group(wanted: bytes, group: bytes) -> int:
    for line in _read_groups(group):
        if line.name == wanted:
            return line.gid
    if _NUMBER.fullmatch(wanted):
        return int(wanted)
    raise UnknownUser(f"its /etc/group has no group {wanted.decode(errors='replace')!r}")


def _clean_home(home: bytes) -> str:
    text = home.decode(errors="replace")
    usable = text.startswith("/") and len(text) <= _LONGEST and text.isprintable() and ".." not in text.split("/")
    return text if usable else "/"


def _read_users(passwd: bytes) -> Iterator[_User]:
    for line in passwd.split(b"\n"):
        fields = line.split(b":")
        if len(fields) >= 6 and fields[0] and _NUMBER.fullmatch(fields[2]) and _NUMBER.fullmatch(fields[3]):
            yield _User(fields[0], int(fields[2]), int(fields[3]), fields[5])


def _read_groups(group: bytes) -> Iterator[_Group]:
    for line in group.split(b"\n"):
        fields = line.split(b":")
        if len(fields) >= 3 and fields[0] and _NUMBER.fullmatch(fields[2]):
            members = tuple(fields[3].split(b",")) if len(fields) > 3 else ()
            yield _Group(fields[0], int(fields[2]), members)


def with_user(passwd: bytes, account: Account) -> bytes:
    """Adds a line for that account, if there is none."""
    if any(line.uid == account.uid for line in _read_users(passwd)):
        return passwd
    name = _free_name("root" if account.uid == 0 else "user", {line.name for line in _read_users(passwd)})
    return _append(passwd, f"{name}:x:{account.uid}:{account.gid}:{name}:{account.home}:/bin/sh")


def with_group(group: bytes, account: Account) -> bytes:
    if any(line.gid == account.gid for line in _read_groups(group)):
        return group
    name = _free_name("root" if account.gid == 0 else "user", {line.name for line in _read_groups(group)})
    return _append(group, f"{name}:x:{account.gid}:")


def _free_name(name: str, taken: set[bytes]) -> str:
    return next(f"{name}{n or ''}" for n in range(len(taken) + 1) if f"{name}{n or ''}".encode() not in taken)


def _append(content: bytes, line: str) -> bytes:
    gap = b"" if not content or content.endswith(b"\n") else b"\n"
    return content + gap + line.encode() + b"\n"
