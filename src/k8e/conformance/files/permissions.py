"""File operations act with the ids they were asked to act with, and with no privilege beside them."""

from __future__ import annotations

from collections.abc import Awaitable

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, equal, prepare, refused
from k8e.link.errors import Code
from k8e.link.model import AGENT, Identity


def attempts(subject: Subject, who: Identity) -> dict[str, Awaitable[object]]:
    """Returns every operation that an unprivileged user may try on root's private files."""
    sandbox, secret, closed = subject.sandbox, subject.inside(b"root", b"secret"), subject.inside(b"root", b"closed")
    public, new = subject.inside(b"root", b"public"), subject.inside(b"root", b"new")
    return {
        "read": sandbox.read_file(secret, identity=who),
        "append": sandbox.write_file(secret, b"x", append=True, identity=who),
        "append to what may only be read": sandbox.write_file(public, b"x", append=True, identity=who),
        "create": sandbox.write_file(new, b"x", identity=who),
        "replace": sandbox.write_file(secret, b"x", identity=who),
        "read inside": sandbox.read_file(closed + b"/inner", identity=who),
        "write inside": sandbox.write_file(closed + b"/inner", b"x", identity=who),
        "list": sandbox.list_dir(closed, identity=who),
        "stat inside": sandbox.stat(closed + b"/inner", identity=who),
        "mkdir": sandbox.mkdir(new, identity=who),
        "mkdir inside": sandbox.mkdir(closed + b"/new", identity=who),
        "move away": sandbox.move(public, subject.inside(b"stolen"), identity=who),
        "move over": sandbox.move(subject.inside(b"mine"), public, identity=who),
        "remove": sandbox.remove(public, identity=who),
        "remove recursively": sandbox.remove(closed, recursive=True, identity=who),
        "watch": sandbox.watch(closed, identity=who),
    }


@check()
async def check_other_peoples_files_are_denied(subject: Subject) -> None:
    script = """
umask 022; mkdir root; cd root; echo secret > secret; chmod 600 secret; echo public > public
mkdir closed; echo inner > closed/inner; chmod 700 closed
"""
    await prepare(subject, "sh", "-c", script, identity=AGENT)
    await prepare(subject, "touch", "mine")
    for what, attempt in attempts(subject, subject.user).items():
        await refused(what, attempt, Code.DENIED)
    for name in (b"secret", b"public", b"closed"):
        path = subject.inside(b"root", name)
        await refused("chmod", subject.sandbox.chmod(path, 0o777, identity=subject.user), Code.DENIED)
    shown = await prepare(subject, "sh", "-c", "cd root; cat secret public closed/inner; ls", identity=AGENT)
    equal("root's things afterwards", shown, b"secret\npublic\ninner\nclosed\npublic\nsecret\n")
    await prepare(subject, "rm", "-r", "root", identity=AGENT)


@check()
async def check_public_files_are_read_by_everybody(subject: Subject) -> None:
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"public", mode=0o644)
    for who in (AGENT, subject.user, Identity(uid=54_321, gid=54_321)):
        equal(f"content for {who.uid}", await subject.sandbox.read_file(path, identity=who), b"public")


@check()
async def check_new_things_belong_to_their_maker(subject: Subject) -> None:
    for who, owner in ((subject.user, (subject.user.uid, subject.user.gid)), (AGENT, (0, 0))):
        name = b"%d" % (who.uid or 0)
        await subject.sandbox.write_file(subject.inside(name + b"-file"), b"x", identity=who)
        await subject.sandbox.write_file(subject.inside(name + b"-append"), b"x", append=True, identity=who)
        await subject.sandbox.mkdir(subject.inside(name + b"-dir", b"below"), identity=who)
        entries = await subject.sandbox.list_dir(subject.directory, recursive=True)
        owners = {(entry.uid, entry.gid) for entry in entries if entry.name.startswith(name + b"-")}
        equal(f"owners of what {who.uid} made", owners, {owner})


@check()
async def check_group_gives_access(subject: Subject) -> None:
    # The gid of a request counts as the process's own group would.
    who = Identity(uid=54_321, gid=subject.user.gid)
    await prepare(subject, "sh", "-c", "echo shared > file; chmod 640 file; mkdir -m 750 dir; touch dir/x")
    equal("content", await subject.sandbox.read_file(subject.inside(b"file"), identity=who), b"shared\n")
    equal("entries", len(await subject.sandbox.list_dir(subject.inside(b"dir"), identity=who)), 1)
    stranger = Identity(uid=54_321, gid=54_321)
    await refused("read", subject.sandbox.read_file(subject.inside(b"file"), identity=stranger), Code.DENIED)


@check()
async def check_agent_is_itself_again_after_acting_for_somebody(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "umask 077; echo secret > secret", identity=AGENT)
    secret = subject.inside(b"secret")
    for _ in range(10):
        await refused("read", subject.sandbox.read_file(secret, identity=subject.user), Code.DENIED)
        equal("root's own read", await subject.sandbox.read_file(secret), b"secret\n")
        equal("uid of the next command", await prepare(subject, "id", "-u", identity=AGENT), b"0\n")
    await prepare(subject, "rm", "secret", identity=AGENT)
