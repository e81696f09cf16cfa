"""Files that several sandboxes see: a parent's workspace, and directories of the machine."""

from __future__ import annotations

import os
from dataclasses import replace

from k8e.engine import Mount, Shape
from k8e.engine.conformance.subject import Subject, check, equal, fails, holds


@check()
async def check_a_shared_workspace_is_live_in_both_directions(subject: Subject) -> None:
    async with subject.made() as owner:
        await subject.run(owner, "echo first > one")
        async with subject.made(shares=owner) as other:
            equal("what was there", await subject.run(other, "cat /workspace/one"), "first\n")
            await subject.run(other, "echo second > /workspace/two; echo more >> /workspace/one")
            equal("what came later", await subject.run(owner, "cat one two"), "first\nmore\nsecond\n")
        equal("what is left without the other", await subject.run(owner, "cat one two"), "first\nmore\nsecond\n")


@check()
async def check_the_workspace_of_one_that_is_not_there_cannot_be_shared(subject: Subject) -> None:
    name = subject.new_name()
    spec = replace(subject.spec, shares=subject.new_name())
    await fails("sharing of nothing", subject.engine.create(name, spec))
    holds("nothing is left of it", name not in await subject.engine.list())


@check(needs="mounts")
async def check_a_directory_of_the_machine_is_shown(subject: Subject) -> None:
    assert subject.directory is not None
    mounts = make_mounts(subject)
    async with subject.made(shape=Shape(mounts=mounts)) as name:
        await look_at_mount(subject, name)


@check(needs="mounts")
async def check_one_with_slots_is_bound_and_like_one_created_with_mounts(subject: Subject) -> None:
    assert subject.directory is not None
    mounts = make_mounts(subject)
    async with subject.made(shape=Shape(mounts=mounts).unbound) as name:
        await subject.engine.bind(name, mounts)
        await look_at_mount(subject, name)


@check(needs="mounts")
async def check_a_directory_that_is_not_there_is_refused(subject: Subject) -> None:
    (mount,) = make_mounts(subject)
    shape = Shape(mounts=(replace(mount, source=f"{mount.source}/absent"),))
    name = subject.new_name()
    await fails("showing it", subject.engine.create(name, replace(subject.spec, shape=shape)))
    holds("nothing is left of it", name not in await subject.engine.list())


def make_mounts(subject: Subject) -> tuple[Mount, ...]:
    assert subject.directory is not None
    (subject.directory / "file").write_text("of the machine\n")
    owner = os.stat(subject.directory).st_uid
    return (Mount(os.fspath(subject.directory), "/project", owner, writable=True),)


async def look_at_mount(subject: Subject, name: str) -> None:
    assert subject.directory is not None
    equal("its file", await subject.run(name, "cat /project/file"), "of the machine\n")
    await subject.run(name, "echo inside > /project/new")
    path = subject.directory / "new"
    equal("what was written inside, out here", path.read_text(), "inside\n")
    equal("whose it is", path.stat().st_uid, os.stat(subject.directory).st_uid)
    path.unlink()
