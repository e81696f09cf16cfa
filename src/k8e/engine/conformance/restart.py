"""Stopped and started: files stay, processes and what is memory do not."""

from __future__ import annotations

from k8e.engine.conformance.subject import Subject, check, comes_true, equal, fails, holds
from k8e.link.model import AGENT


@check()
async def check_a_stopped_one_keeps_its_files_and_nothing_else(subject: Subject) -> None:
    async with subject.made() as name:
        await subject.run(name, "echo kept > file; (setsid sleep 1000 >/dev/null 2>&1 &)")
        sandbox, _ = await subject.engine.attach(name)
        await sandbox.write_file(b"/run/note", b"secret", identity=AGENT)
        await subject.engine.stop(name)
        equal("alive", (await subject.engine.observe(name)).alive, False)
        holds("it is listed", name in await subject.engine.list())
        await fails("attaching to a stopped one", subject.engine.attach(name))
        await subject.engine.stop(name)  # fine to call twice
        await subject.engine.start(name, subject.spec)
        equal("its file", await subject.run(name, "cat file"), "kept\n")
        equal("what was memory", await subject.run(name, "ls /run/note 2>/dev/null; true"), "")
        script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[0]' || true"
        equal("processes", await subject.run(name, script), "0\n")


@check()
async def check_what_runs_is_not_started_again(subject: Subject) -> None:
    async with subject.made() as name:
        await fails("starting one that runs", subject.engine.start(name, subject.spec))
        equal("it works", await subject.run(name, "echo well"), "well\n")


@check()
async def check_the_next_daemon_starts_a_stopped_one(subject: Subject) -> None:
    async with subject.made() as name:
        await subject.run(name, "echo kept > file")
        await subject.engine.stop(name)
        await subject.engine.close()
        follower = subject.again()
        try:
            holds("it is listed", name in await follower.list())
            await follower.start(name, subject.spec)
            equal("its file", await subject.run(name, "cat file", follower), "kept\n")
        finally:
            await follower.close()


@check()
async def check_a_stopped_one_can_be_destroyed(subject: Subject) -> None:
    name = subject.new_name()
    await subject.engine.create(name, subject.spec)
    await subject.engine.stop(name)
    await subject.engine.destroy(name)
    holds("it is gone", name not in await subject.engine.list())
    await fails("starting it", subject.engine.start(name, subject.spec))


@check(needs="kill")
async def check_one_that_died_can_be_stopped_and_started(subject: Subject) -> None:
    assert subject.kill is not None
    async with subject.made() as name:
        await subject.run(name, "echo kept > file && sync")
        await subject.kill(name)

        async def is_dead() -> bool:
            return not (await subject.engine.observe(name)).alive

        await comes_true("it is seen dead", is_dead)
        await subject.engine.stop(name)
        await subject.engine.start(name, subject.spec)
        equal("its file", await subject.run(name, "cat file"), "kept\n")


@check()
async def check_one_that_is_set_aside_is_no_sandbox_any_more(subject: Subject) -> None:
    async with subject.made() as name:
        await subject.run(name, "echo precious > file")
        kept = await subject.engine.set_aside(name)
        try:
            equal("alive", (await subject.engine.observe(name)).alive, False)
            holds("it is not listed", name not in await subject.engine.list())
            await fails("attaching to it", subject.engine.attach(name))
            equal("what is kept of one that is gone", await subject.engine.set_aside(name), "")
        finally:
            await subject.discard(kept)
    equal("damaged files", list(subject.engine.damages()), [])
