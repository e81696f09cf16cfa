"""The user of one command, where its caller names another than the sandbox's default user."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from k8e.core.checks import HOST
from k8e.core.errors import Fault, Kind
from k8e.core.model import Session
from k8e.engine import Place
from k8e.engine.accounts import Account, UnknownUser, find_account
from k8e.link.errors import AgentError, Code
from k8e.link.model import Identity, Sandbox

ROOT: Final = 0
_MAX_FILE: Final = 64 << 10


async def place_user(sandbox: Sandbox, place: Place, session: Session, wanted: str) -> Place:
    """The place as that user finds it. The sandbox's own passwd and group say who that is: they can only choose among
    the ids of the sandbox, which is no boundary of the machine.

    Of a chosen user only root can have capabilities, in an image: as it would if it were the image's own user. The
    tools of the image `host` are the machine's, and no command needs capabilities there.
    """
    account = await _find(sandbox, wanted)
    user = Identity(account.uid, account.gid, account.groups)
    if session.shape.powerless and not _is_within(user, place.user):
        raise Fault(
            Kind.DENIED,
            "user_refused",
            "commands of a powerless session run as its default user",
            hint="Leave out the user, or create a session that is not powerless.",
            field="user",
        )
    capable = account.uid == ROOT and session.image != HOST and not session.shape.powerless
    return replace(
        place,
        user=user,
        home=_home(account),
        env=tuple((name, _own(account).get(name, value)) for name, value in place.env),
        capable=capable,
    )


def _is_within(user: Identity, default: Identity) -> bool:
    """Whether it is the default user, with no groups but its own."""
    return (user.uid, user.gid) == (default.uid, default.gid) and {*user.groups} <= {*default.groups}


async def _find(sandbox: Sandbox, wanted: str) -> Account:
    passwd, group = [await _read(sandbox, path) for path in (b"/etc/passwd", b"/etc/group")]
    try:
        return await asyncio.to_thread(find_account, wanted, passwd, group)  # the sandbox chooses how long it takes
    except UnknownUser as error:
        raise Fault(
            Kind.INVALID,
            "user_not_found",
            "the sandbox does not have this user",
            detail=str(error),
            hint="Name a user or a number of its /etc/passwd, such as root.",
            field="user",
        ) from error


async def _read(sandbox: Sandbox, path: bytes) -> bytes:
    try:
        return await sandbox.read_file(path, limit=_MAX_FILE)
    except AgentError as error:
        if error.code is Code.TOO_BIG:
            raise Fault(
                Kind.INVALID,
                "user_not_found",
                f"users are found in a {path.decode()} of at most {_MAX_FILE} bytes",
                detail=str(error),
                hint="Make the file smaller, or leave out the user.",
                field="user",
            ) from error
        if error.code is not Code.NOT_FOUND:
            raise
        return b""


def _home(account: Account) -> bytes:
    return (account.home or "/").encode()


def _own(account: Account) -> dict[bytes, bytes]:
    name = (account.name or str(account.uid)).encode()
    return {b"HOME": _home(account), b"USER": name, b"LOGNAME": name}
