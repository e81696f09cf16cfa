"""Templates: each program gets a copy of an interpreter that has started up, and is as alone as in one of its own."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace

import pytest

from k8e.core.sessions.interpreters import BASH, NODE, PAUSE, PYTHON, Kind
from k8e.engine import Runtime
from k8e.link.model import Cause, ExecSpec, Identity, Process, Scope
from tests.parking.conftest import Bed
from tests.parking.parked import find_parked, park_alone, wait_until_gone
from tests.parking.programs import Program
from tests.parking.test_handover import TestChanges


@pytest.mark.parametrize("kind", [PYTHON, BASH, NODE], ids=["python", "bash", "node"])
async def test_every_program_gets_a_copy_of_its_own(bed: Bed, kind: Kind) -> None:
    template, copy = await park_alone(bed, kind)
    code = {
        PYTHON: "import os; print(os.getpid(), os.getppid(), os.getsid(0))",
        BASH: "echo $$ $PPID",
        NODE: "console.log(process.pid, process.ppid)",
    }[kind]
    seen = []
    for _ in range(5):
        process = await bed.sandbox.start(bed.spec(kind, Program(code), parked=True))
        ended, _ = await bed.finish(process)
        assert (process.handed_over, process.copied, ended.stderr, ended.exit_code) == (True, True, b"", 0)
        pid, parent, *session = ended.stdout.decode().split()
        assert (str(process.pid), *session) == (pid, *(pid for _ in session))
        seen.append((pid, parent))
    assert len({pid for pid, _ in seen} | {template}) == 6
    assert seen[0][0] == copy
    assert len({parent for _, parent in seen}) == 1
    assert (await find_parked(bed, kind[0].decode()))[0] == template


async def test_a_copy_knows_nothing_of_the_one_before(bed: Bed) -> None:
    await park_alone(bed, PYTHON)
    code = (
        "import os, sys, random, threading, tempfile, uuid; "
        "assert not hasattr(sys, 'mark') and 'MARK' not in os.environ and os.umask(0) == 0o22; "
        "sys.mark = os.environ['MARK'] = 'x'; os.chdir('/'); os.nice(1); "
        "assert threading.main_thread().native_id == os.getpid() == threading.get_native_id(); "
        "print(random.random(), uuid.uuid4(), uuid.uuid1(), tempfile.mktemp(), os.urandom(8).hex(), os.nice(0))"
    )
    runs = [await bed.run(PYTHON, code, parked=True) for _ in range(3)]
    assert all(handed_over and ended.exit_code == 0 for ended, handed_over in runs), runs
    values = [ended.stdout.split() for ended, _ in runs]
    assert all(len(set(column)) == 3 for column in list(zip(*values, strict=True))[:-1]), values
    assert {row[-1] for row in values} == {b"1"}


async def test_a_copy_of_node_knows_nothing_of_the_one_before(bed: Bed) -> None:
    """It is made before Node has an isolate, threads or loops: what is random is so for each, and clocks begin anew."""
    await park_alone(bed, NODE)
    code = (
        "const c = require('crypto'); if (globalThis.mark) throw 1; globalThis.mark = 1; process.chdir('/'); "
        "new (require('worker_threads').Worker)('1', {eval: true}).on('exit', (e) => console.log("
        "e, Math.random(), c.randomUUID(), c.randomBytes(8).toString('hex'), process.pid, performance.timeOrigin))"
    )
    before = time.time()
    runs = [await bed.run(NODE, code, parked=True) for _ in range(3)]
    assert all(handed_over and ended.exit_code == 0 for ended, handed_over in runs), runs
    values = [ended.stdout.split() for ended, _ in runs]
    assert all(len(set(column)) == 3 for column in list(zip(*values, strict=True))[1:]), values
    assert all(float(row[-1]) / 1000 > before - 1 for row in values), (before, values)


async def test_what_a_program_leaves_behind_stays_with_it(bed: Bed) -> None:
    """The supervisor of a template has one program's tree at a time: what outlives one ends the template, and neither
    the next program nor its time limit reaches it."""
    await park_alone(bed, PYTHON)
    leave = "import subprocess; p = subprocess.Popen(['setsid', 'sleep', '4322'], stdout=-3, stderr=-3); print(p.pid)"
    ended, handed_over = await bed.run(PYTHON, leave, parked=True)
    assert handed_over
    await wait_until_gone(bed, "python3")
    await bed.park(PYTHON)
    late = replace(bed.spec(PYTHON, Program("import time; time.sleep(600)"), parked=True), timeout=0.3, grace=0.1)
    _, outcome = await bed.finish(await bed.sandbox.start(late))
    assert outcome.cause is Cause.TIMEOUT
    assert (await bed.command("kill", ended.stdout.decode().strip())).exit_code == 0


LEAVE = "sleep 4323 </dev/null >/dev/null 2>&1 & echo $!; read line"


async def start_and_leave(bed: Bed) -> tuple[Process, str]:
    """A program that a copy has taken and that waits for a line, and the pid of what it will leave behind."""
    process = await bed.sandbox.start(bed.spec(BASH, Program(LEAVE, b""), parked=True))
    assert process.copied
    return process, (await process.stdout.read()).decode().strip()


@pytest.mark.parametrize("how", ["a signal", "killed", "stopped"])
async def test_what_a_program_leaves_behind_outlives_the_template(bed: Bed, how: str) -> None:
    """As it outlives an interpreter that was started for it."""
    template, _ = await park_alone(bed, BASH)
    process, left = await start_and_leave(bed)
    if how == "a signal":
        await process.signal(signal.SIGKILL, Scope.PROCESS)
    else:
        await bed.command("kill", "-KILL" if how == "killed" else "-STOP", template)
    ended, _ = await bed.finish(process, None if how == "a signal" else b"\n")
    assert (ended.exit_code, ended.signal) == ((None, signal.SIGKILL) if how == "a signal" else (0, None))
    await bed.run(BASH, "echo", parked=True)  # if it waits for another copy it waits no longer after this
    await wait_until_gone(bed, "bash")
    assert (await bed.command("kill", left)).exit_code == 0


async def test_a_template_ends_after_many_copies(native_bed: Bed) -> None:
    bed = native_bed
    template, _ = await park_alone(bed, BASH)
    for _ in range(255):
        assert (await bed.run(BASH, "echo", parked=True))[1]
    assert (await find_parked(bed, "bash"))[0] == template
    process, left = await start_and_leave(bed)
    await bed.finish(process, b"\n")
    await wait_until_gone(bed, "bash")
    assert (await bed.command("kill", left)).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        "os.setpriority(os.PRIO_PROCESS, pid, 5)",
        "resource.prlimit(pid, resource.RLIMIT_NOFILE, (99, 99))",
        "resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))",
        "os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})",
        "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    ],
    ids=["nice", "files", "core", "affinity", "policy"],
)
@pytest.mark.parametrize("which", ["template", "copy"])
async def test_what_other_programs_change_of_it_reaches_no_program(bed: Bed, change: str, which: str) -> None:
    parked = await park_alone(bed, PYTHON)
    pid = parked[which == "copy"]
    done = await bed.command("python3", "-c", f"import os, resource; pid = {pid}; {change}")
    if bed.runtime is Runtime.GVISOR and done.exit_code:
        pytest.skip("gVisor does not change that of another process")
    assert done.exit_code == 0, done
    code = (
        "import os, resource; print(os.nice(0), os.sched_getaffinity(0), os.sched_getscheduler(0), "
        "*(resource.getrlimit(number) for number in range(16)))"
    )
    fresh, _ = await bed.run(PYTHON, code, parked=False)
    for _ in range(2):  # the first copy was there before
        assert (await bed.run(PYTHON, code, parked=True))[0] == fresh


async def test_own_code_at_start_up_runs_for_each_program(native_bed: Bed) -> None:
    """What it depends on is not known, so no two programs have one start."""
    bed = native_bed
    site = (await bed.run(PYTHON, TestChanges.SITE, parked=False))[0].stdout.decode().strip()
    for name, content in (("own.pth", "import sys; sys.mark = 1"), ("usercustomize.py", "mark = 1")):
        await bed.command("sh", "-c", f"echo '{content}' > {site}/{name}")
        try:
            await bed.run(PYTHON, "pass", parked=False)  # which compiles it
            await asyncio.sleep(PAUSE)
            assert len(await park_alone(bed, PYTHON)) == 1
        finally:
            await bed.command("rm", f"{site}/{name}")
            await asyncio.sleep(PAUSE)
    assert len(await park_alone(bed, PYTHON)) == 2


async def test_what_start_up_prints_is_in_every_output(native_bed: Bed) -> None:
    bed = native_bed
    site = (await bed.run(PYTHON, TestChanges.SITE, parked=False))[0].stdout.decode().strip()
    await bed.command("sh", "-c", f"echo 'import os; os.write(1, b\"at start \")' > {site}/loud.pth")
    try:
        await asyncio.sleep(PAUSE)
        assert len(await park_alone(bed, PYTHON)) == 1
        waited, handed_over = await bed.run(PYTHON, "print(1)", parked=True)
        assert (waited.stdout[:9], handed_over) == (b"at start ", True)
        assert (await bed.run(PYTHON, "print(1)", parked=False))[0] == waited
    finally:
        await bed.command("rm", f"{site}/loud.pth")
        await asyncio.sleep(PAUSE)


async def test_four_that_were_parked_alike_wait_beside_each_other(native_bed: Bed) -> None:
    oldest, _ = await park_alone(native_bed, PYTHON)
    for _ in range(4):
        await native_bed.park(PYTHON)
    async with asyncio.timeout(20):
        while len(found := await find_parked(native_bed, "python3")) > 8:
            await asyncio.sleep(0.02)
    assert oldest not in found
    held = [native_bed.spec(PYTHON, Program("input()", b""), parked=True) for _ in range(4)]
    running = [await native_bed.sandbox.start(spec) for spec in held]
    assert all(process.copied for process in running)
    for process in running:
        await native_bed.finish(process, b"\n")


async def test_the_time_limit_of_a_program_that_has_ended_ends_nothing(native_bed: Bed) -> None:
    """Such a program may be over before its supervisor hears that its time counts: here root has stopped that."""
    bed = native_bed
    template, _ = await park_alone(bed, BASH)
    parent = (await bed.command("ps", "-o", "ppid=", "-p", template)).stdout.decode().strip()

    async def signal_parent(name: str) -> None:
        words = (b"kill", f"-{name}".encode(), parent.encode())
        spec = ExecSpec(words, bed.place.env, identity=Identity(0, 0), stdin=False)
        assert (await bed.finish(await bed.sandbox.start(spec)))[0].exit_code == 0

    brief = replace(bed.spec(BASH, Program("echo on"), parked=True), timeout=0.3)
    await signal_parent("STOP")
    process = await bed.sandbox.start(brief)
    assert (await process.stdout.read(), await process.stdout.read()) == (b"on\n", b"")
    await signal_parent("CONT")
    ended, _ = await bed.finish(process)
    assert (process.copied, ended.exit_code) == (True, 0)
    await bed.command("sleep", "0.6")
    assert (await find_parked(bed, "bash"))[0] == template
    again = await bed.sandbox.start(brief)
    await bed.finish(again)
    assert again.copied
