"""Made, used, found again by the next daemon, ended: whatever state a sandbox is in, and however often it is asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from k8e.engine import Observation, Runtime, Usage
from k8e.engine.conformance.subject import GONE, Subject, check, comes_true, equal, fails, holds, run_script
from k8e.link.model import AGENT, ExecSpec


@check()
async def check_reports_tell_what_works_and_why_not(subject: Subject) -> None:
    reports = await subject.engine.probe()
    order = list(Runtime)
    known = [report.runtime for report in reports]
    equal("runtimes, the strongest first and each once", known, sorted(set(known), key=order.index))
    for report in reports:
        equal(f"{report.runtime.value} works or says why not", report.available, not report.reason)
        holds(f"{report.runtime.value} works or has a hint", report.available or bool(report.hint))
    chosen = next((report for report in reports if report.runtime is subject.spec.runtime), None)
    holds("the runtime that is used here is one of them", chosen is not None and chosen.available)
    for report in reports:
        equal(f"{report.runtime.value}, asked for alone", await subject.engine.choose(report.runtime), report)
    strongest = next(report for report in reports if report.available)
    equal("the strongest that works", await subject.engine.choose(), strongest)


@check()
async def check_a_runtime_that_does_not_work_is_refused(subject: Subject) -> None:
    works = {report.runtime for report in await subject.engine.probe() if report.available}
    for runtime in set(Runtime) - works:
        name, spec = subject.new_name(), replace(subject.spec, runtime=runtime)
        await fails(f"creating with {runtime.value}", subject.engine.create(name, spec))
        await fails(f"the edition with {runtime.value}", subject.engine.edition(spec))
        holds("nothing is left of it", name not in await subject.engine.list())


@check()
async def check_an_image_that_is_not_there_is_refused(subject: Subject) -> None:
    name = subject.new_name()
    spec = replace(subject.spec, image="sha256:" + "0" * 64)
    await fails("creating of an image that is not there", subject.engine.create(name, spec))
    holds("nothing is left of it", name not in await subject.engine.list())


@check()
async def check_created_is_listed_and_works_and_destroyed_is_not(subject: Subject) -> None:
    async with subject.made() as name:
        holds("it is listed", name in await subject.engine.list())
        equal("seen", await subject.engine.observe(name), Observation(alive=True, oom_kills=0))
        equal("a command", await subject.run(name, "echo well"), "well\n")
    holds("it is not listed any more", name not in await subject.engine.list())
    equal("a destroyed one", await subject.engine.observe(name), GONE)
    await fails("attaching to a destroyed one", subject.engine.attach(name))


@check()
async def check_what_it_takes_is_measured(subject: Subject) -> None:
    async with subject.made() as name:
        before = await subject.engine.measure(name)
        holds("it takes memory", before.memory > 0)
        await subject.run(name, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
        after = await subject.engine.measure(name)
        holds("its CPU time grows", after.cpu_seconds > before.cpu_seconds)
    equal("a destroyed one", await subject.engine.measure(name), Usage(0.0, 0))


@check()
async def check_one_that_never_was(subject: Subject) -> None:
    name = subject.new_name()
    equal("seen", await subject.engine.observe(name), GONE)
    await fails("attaching", subject.engine.attach(name))
    await fails("stopping", subject.engine.stop(name))
    await fails("starting", subject.engine.start(name, subject.spec))
    await fails("a list of hosts", subject.engine.set_egress(name, subject.spec.egress))
    await fails("binding", subject.engine.bind(name, ()))
    await subject.engine.destroy(name)
    holds("none of that made one", name not in await subject.engine.list())


@check()
async def check_destroy_twice_and_at_once(subject: Subject) -> None:
    name = subject.new_name()
    await subject.engine.create(name, subject.spec)
    await asyncio.gather(*(subject.engine.destroy(name) for _ in range(3)))
    await subject.engine.destroy(name)
    holds("it is gone", name not in await subject.engine.list())


@check()
async def check_a_second_create_fails_and_the_first_lives_on(subject: Subject) -> None:
    async with subject.made() as name:
        await subject.run(name, "echo mine > file")
        await fails("a second one of that name", subject.engine.create(name, subject.spec))
        holds("the first is alive", (await subject.engine.observe(name)).alive)
        equal("the first's file", await subject.run(name, "cat file"), "mine\n")


@check()
async def check_several_creates_at_once_have_one_winner(subject: Subject) -> None:
    name = subject.new_name()
    attempts = [subject.engine.create(name, subject.spec) for _ in range(3)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    try:
        equal("winners", sum(result is None for result in results), 1)
        equal("it works", await subject.run(name, "echo well"), "well\n")
    finally:
        await subject.engine.destroy(name)


@check()
async def check_a_name_can_be_used_again(subject: Subject) -> None:
    name = subject.new_name()
    for _ in range(2):
        await subject.engine.create(name, subject.spec)
        equal("files of the one before", await subject.run(name, "ls -A /workspace"), "")
        await subject.run(name, "touch /workspace/file")
        await subject.engine.destroy(name)


@check()
async def check_a_cancelled_create_leaves_nothing(subject: Subject) -> None:
    for turns in (1, 10, 40):
        name = subject.new_name()
        task = asyncio.create_task(subject.engine.create(name, subject.spec))
        await asyncio.wait({task}, timeout=0.002 * turns)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if result is None:  # it was quicker
            await subject.engine.destroy(name)

        async def is_gone(name: str = name) -> bool:
            return name not in await subject.engine.list()

        await comes_true("a cancelled create cleans up", is_gone)
        equal("alive", (await subject.engine.observe(name)).alive, False)


@check()
async def check_destroyed_while_it_is_being_created(subject: Subject) -> None:
    for turns in (1, 10, 40):
        name = subject.new_name()
        task = asyncio.create_task(subject.engine.create(name, subject.spec))
        await asyncio.wait({task}, timeout=0.002 * turns)
        await subject.engine.destroy(name)
        await asyncio.gather(task, return_exceptions=True)
        await subject.engine.destroy(name)  # of one that was made after all
        holds("it is gone", name not in await subject.engine.list())
        equal("alive", (await subject.engine.observe(name)).alive, False)


@check()
async def check_everybody_has_the_same_way_in(subject: Subject) -> None:
    async with subject.made() as name:
        ways = await asyncio.gather(*(subject.engine.attach(name) for _ in range(5)))
        equal("ways in", len({id(sandbox) for sandbox, _ in ways}), 1)


@check()
async def check_a_place_to_work_is_the_default_users(subject: Subject) -> None:
    async with subject.made() as name:
        sandbox, place = await subject.engine.attach(name)
        holds("the default user is not root", bool(place.user.uid))
        names = dict(place.env)
        holds("PATH, HOME and LANG are set", {b"PATH", b"HOME", b"LANG"} <= set(names))
        equal("HOME", names[b"HOME"], place.home)
        script = 'touch "$PWD/file" "$HOME/other" && echo "$PWD $(id -u) $(stat -c %u "$PWD/file")"'
        user = place.user.uid
        equal("where commands start", await subject.run(name, script), f"{place.workdir.decode()} {user} {user}\n")
        status = await run_script(sandbox, replace(place, workdir=place.workspace), "touch there")
        equal("writing to the workspace", status, (0, b"", b""))


@check()
async def check_run_is_memory(subject: Subject) -> None:
    """Core keeps there what must reach no file of the machine."""
    async with subject.made() as name:
        sandbox, _ = await subject.engine.attach(name)
        await sandbox.write_file(b"/run/note", b"secret", mode=0o600, identity=AGENT)
        equal("its content", await sandbox.read_file(b"/run/note", identity=AGENT), b"secret")
        equal("what kind of file system it is", await subject.run(name, "stat -f -c %T /run"), f"{subject.run_kind}\n")


@check(needs="apart")
async def check_what_the_agent_keeps_in_run_is_its_own(subject: Subject) -> None:
    async with subject.made() as name:
        sandbox, place = await subject.engine.attach(name)
        await sandbox.write_file(b"/run/note", b"secret", mode=0o600, identity=AGENT)
        code, _, _ = await run_script(sandbox, place, "cat /run/note")
        holds("the default user cannot read it", code != 0)


@check()
async def check_the_next_daemon_finds_sandboxes_and_their_commands(subject: Subject) -> None:
    async with subject.made() as name:
        sandbox, place = await subject.engine.attach(name)
        words = (b"sh", b"-c", b"echo begun; read word; echo $word")
        process = await sandbox.start(ExecSpec(words, place.env, place.workdir, place.user, detached=True))
        await subject.engine.close()
        follower = subject.again()
        try:
            holds("it is listed", name in await follower.list())
            holds("it is alive", (await follower.observe(name)).alive)
            found, same = await follower.attach(name)
            equal("place", same, place)
            command = await found.attach(process.id)
            await command.write(b"to the end\n")
            await command.close_stdin()
            output = b""
            while chunk := await command.stdout.read():
                output += chunk
            command.discard()
            equal("its command went on", (output, (await command.wait()).exit_code), (b"begun\nto the end\n", 0))
        finally:
            await follower.close()
        equal("the first one finds it as well", await subject.run(name, "echo well"), "well\n")


@check()
async def check_the_next_daemon_can_destroy_it(subject: Subject) -> None:
    name = subject.new_name()
    await subject.engine.create(name, subject.spec)
    await subject.engine.close()
    follower = subject.again()
    try:
        await follower.destroy(name)
        holds("it is gone", name not in await follower.list())
    finally:
        await follower.close()
    equal("alive", (await subject.engine.observe(name)).alive, False)


@check(needs="kill")
async def check_a_killed_one_is_dead_and_still_listed(subject: Subject) -> None:
    assert subject.kill is not None
    async with subject.made() as name:
        await subject.engine.attach(name)
        await subject.kill(name)

        async def is_dead() -> bool:
            return not (await subject.engine.observe(name)).alive

        await comes_true("it is seen dead", is_dead)
        holds("there is still something to clean up", name in await subject.engine.list())
        await fails("attaching to a dead one", subject.engine.attach(name))
    equal("alive", (await subject.engine.observe(name)).alive, False)


@check(needs="oom")
async def check_kills_for_want_of_memory_are_counted(subject: Subject) -> None:
    assert subject.starve is not None
    async with subject.made() as name, subject.made() as other:
        await subject.starve(name)

        async def is_counted() -> bool:
            return (await subject.engine.observe(name)).oom_kills > 0

        await comes_true("the kill is counted", is_counted)
        counted = (await subject.engine.observe(name)).oom_kills
        equal("asked again", (await subject.engine.observe(name)).oom_kills, counted)
        equal("another one", await subject.engine.observe(other), Observation(alive=True, oom_kills=0))


@check()
async def check_images_that_are_not_there(subject: Subject) -> None:
    equal("one that is not there", await subject.engine.images.find("sha256:" + "0" * 64), None)
    for image in await subject.engine.images.list():
        equal(f"{image.digest} is found", await subject.engine.images.find(image.digest), image)


@check()
async def check_editions_of_two_runtimes_differ(subject: Subject) -> None:
    works = [report.runtime for report in await subject.engine.probe() if report.available]
    editions = [await subject.engine.edition(replace(subject.spec, runtime=runtime)) for runtime in works]
    equal("editions", len(set(editions)), len(works))


@check()
async def check_an_edition_is_the_same_for_the_same(subject: Subject) -> None:
    edition = await subject.engine.edition(subject.spec)
    holds("it says something", bool(edition))
    equal("asked again", await subject.engine.edition(subject.spec), edition)
    follower = subject.again()
    try:
        equal("asked of the next daemon", await follower.edition(subject.spec), edition)
    finally:
        await follower.close()
