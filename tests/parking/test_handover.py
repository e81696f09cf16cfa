"""Which runs are handed over, that what takes one is a command like any other, and that nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Any

import pytest

from k8e.core.sessions.interpreters import BASH, NODE, PAUSE, PYTHON, Kind, plan
from k8e.link.errors import AgentError, Code, NotStarted, Stage
from k8e.link.model import Cause, ExecSpec, Identity, Rlimit, Scope, TerminalSize
from tests.parking.conftest import Bed
from tests.parking.parked import clear, find_parked, park_alone, wait_until_gone
from tests.parking.programs import Program

HELLO = {PYTHON: "print('hello')", NODE: "console.log('hello')", BASH: "echo hello"}
KINDS = pytest.mark.parametrize("kind", [PYTHON, NODE, BASH], ids=["python", "node", "bash"])


class TestFitting:
    async def test_one_that_makes_no_copies_is_used_once(self, bed: Bed) -> None:
        """Node warns of certificates that it cannot read when it starts, which copies would not print."""
        await clear(bed, "node")
        place = replace(bed.place, env=(*bed.place.env, (b"NODE_EXTRA_CA_CERTS", b"/no/such")))
        await bed.sandbox.park(plan(NODE, place, ()), place.loader)
        env = plan(NODE, place, ()).env
        assert len(await find_parked(bed, "node")) == 1
        first, handed_over = await bed.run(NODE, HELLO[NODE], parked=True, env=env)
        second, again = await bed.run(NODE, HELLO[NODE], parked=True, env=env)
        assert (first.stdout, handed_over, again) == (b"hello\n", True, False)
        assert b"/no/such" in first.stderr
        assert first == second

    async def test_nobody_who_did_not_ask_gets_one(self, bed: Bed) -> None:
        await bed.park(PYTHON)
        assert (await bed.run(PYTHON, "print(1)", parked=False))[1] is False
        assert (await bed.run(PYTHON, "print(1)", parked=True))[1] is True

    @pytest.mark.parametrize(
        "change",
        [
            {"env": ((b"PATH", b"/usr/bin"),)},
            {"umask": 0o077},
            {"identity": Identity(0, 0)},
            {"identity": Identity(1000, 1000, (4,))},
            {"rlimits": (Rlimit(7, 100, 100),)},
            {"terminal": TerminalSize(), "stdin": True},
            {"keep_capabilities": True},
            {"argv": (b"python3", b"-c", b"print(1)", b"more")},
            {"argv": (b"python3", b"-Sc", b"print(1)")},
            {"argv": (b"/usr/bin/python3", b"-c", b"print(1)")},
        ],
        ids=lambda change: "-".join(change),
    )
    async def test_whatever_is_different_goes_the_plain_way(self, native_bed: Bed, change: dict[str, object]) -> None:
        bed = native_bed
        if not await find_parked(bed, "python3"):
            await bed.park(PYTHON)
        ended, handed_over = await bed.run(PYTHON, "print(1)", parked=True, **change)
        assert (ended.stdout.strip(), handed_over) == (b"1", False)
        assert await find_parked(bed, "python3")

    async def test_one_that_keeps_capabilities_is_for_who_keeps_them(self, native_bed: Bed) -> None:
        bed = native_bed
        root: dict[str, Any] = {"identity": Identity(0, 0), "keep_capabilities": True}
        place = replace(bed.place, user=root["identity"], capable=True)
        await bed.sandbox.park(plan(PYTHON, place, ()), place.loader)
        code = "import os; os.chown('/etc/passwd', 7, 7); print(os.stat('/etc/passwd').st_uid)"
        for change in ({**root, "keep_capabilities": False}, {**root, "identity": Identity(1000, 1000)}):
            assert (await bed.run(PYTHON, code, parked=True, **change))[1] is False
        ended, handed_over = await bed.run(PYTHON, code, parked=True, **root)
        assert (ended.stdout, handed_over) == (b"7\n", True)

    async def test_what_is_handed_over_may_differ(self, native_bed: Bed) -> None:
        for change in ({"cwd": b"/tmp"}, {"timeout": 5.0}, {"window": 1 << 20}, {"drain": 1.0}, {"stdin": True}):
            await native_bed.park(PYTHON)
            process = await native_bed.sandbox.start(
                replace(native_bed.spec(PYTHON, Program("print(1)"), parked=True), **change)
            )
            assert process.handed_over
            assert (await native_bed.finish(process, b""))[0].stdout == b"1\n"

    async def test_another_of_a_kind_takes_the_place_of_the_first(self, native_bed: Bed) -> None:
        before = await park_alone(native_bed, PYTHON)
        other = replace(native_bed.place, env=(*native_bed.place.env, (b"OTHER", b"1")))
        await native_bed.sandbox.park(plan(PYTHON, other, ()), other.loader)
        async with asyncio.timeout(20):
            while len(found := await find_parked(native_bed, "python3")) > 2:
                await asyncio.sleep(0.02)
        assert not set(found) & set(before)
        assert not (await native_bed.run(PYTHON, "print(1)", parked=True))[1]
        assert (await native_bed.run(PYTHON, "print(1)", parked=True, env=other.env))[1]

    async def test_one_that_nobody_needs_goes_after_its_time(self, native_bed: Bed) -> None:
        await clear(native_bed, "python3")
        await native_bed.park(PYTHON, keep=0.2)
        await wait_until_gone(native_bed, "python3")
        assert (await native_bed.run(PYTHON, "print(1)", parked=True))[1] is False

    async def test_what_the_loader_does_not_know_is_not_parked(self, native_bed: Bed) -> None:
        place = native_bed.place
        for argv in ((b"dash", b"-c", b"0" * 32), (b"perl", b"-e", b"0" * 32), (b"cat", b"-n", b"0" * 32)):
            with pytest.raises(AgentError) as caught:
                await native_bed.sandbox.park(ExecSpec(argv, place.env, identity=place.user), place.loader)
            assert caught.value.code is Code.UNSUPPORTED
        with pytest.raises(AgentError):
            spec = ExecSpec((b"no-such", b"-c", b"0" * 32), place.env, identity=place.user)
            await native_bed.sandbox.park(spec, place.loader)

    async def test_nobody_sees_it_among_the_commands(self, native_bed: Bed) -> None:
        before = await native_bed.sandbox.commands()
        await native_bed.park(PYTHON)
        assert await native_bed.sandbox.commands() == before

    @pytest.mark.parametrize("kind", [PYTHON, NODE], ids=["python", "node"])
    async def test_of_many_at_once_one_gets_it(self, bed: Bed, kind: Kind) -> None:
        """At a time: a template may have the next copy for one that comes later."""
        await park_alone(bed, kind)
        say = "print" if kind == PYTHON else "console.log"
        runs = await asyncio.gather(*(bed.run(kind, f"{say}({n})", parked=True) for n in range(8)))
        assert [ended.stdout for ended, _ in runs] == [b"%d\n" % n for n in range(8)]
        assert any(handed_over for _, handed_over in runs)


class TestChanges:
    """What a fresh interpreter would start with by now."""

    SITE = "import site; print(site.getsitepackages()[0])"

    async def check(self, bed: Bed, change: str, undo: str, kind: Kind = PYTHON) -> None:
        await bed.park(kind)
        assert (await bed.command("sh", "-ec", change)).exit_code == 0
        try:
            ended, handed_over = await bed.run(kind, HELLO[kind], parked=True)
        finally:
            assert (await bed.command("sh", "-ec", undo)).exit_code == 0
            await asyncio.sleep(PAUSE)  # as the service does: until then nobody could rely on what was changed
        assert ended.stdout.endswith(b"hello\n")
        assert not handed_over

    async def test_a_new_module_in_site_packages(self, bed: Bed) -> None:
        site = (await bed.run(PYTHON, self.SITE, parked=False))[0].stdout.decode().strip()
        await self.check(bed, f"echo > {site}/new_one.py", f"rm {site}/new_one.py")

    async def test_code_that_runs_at_every_start(self, native_bed: Bed) -> None:
        site = (await native_bed.run(PYTHON, self.SITE, parked=False))[0].stdout.decode().strip()
        pth = f"{site}/k8e_tools.pth"
        await self.check(
            native_bed,
            f"cp -p {pth} /tmp/saved; echo 'import sys; print(\"at start\")' >> {pth}",
            f"cp -p /tmp/saved {pth}",
        )

    async def test_a_user_site_that_was_not_there(self, native_bed: Bed) -> None:
        code = "import site; print(site.getusersitepackages())"
        place = (await native_bed.run(PYTHON, code, parked=False))[0].stdout.decode().strip()
        await self.check(native_bed, f"mkdir -p {place}", f"rmdir {place}")

    async def test_another_python_first_on_the_path(self, native_bed: Bed) -> None:
        venv = "/home/user/.venv/bin"
        await self.check(
            native_bed,
            f"mv {venv}/python3 {venv}/saved; ln -s /usr/bin/python3 {venv}/python3",
            f"mv {venv}/saved {venv}/python3",
        )

    async def test_another_virtual_environment(self, native_bed: Bed) -> None:
        config = "/home/user/.venv/pyvenv.cfg"
        await self.check(native_bed, f"cp {config} /tmp/saved; echo >> {config}", f"cp /tmp/saved {config}")

    async def test_another_node_first_on_the_path(self, native_bed: Bed) -> None:
        node = "/home/user/.local/bin/node"
        await self.check(native_bed, f"ln -s /usr/bin/node {node}", f"rm {node}", NODE)

    async def test_what_matters_to_nobody_changes_nothing(self, native_bed: Bed) -> None:
        await native_bed.park(PYTHON)
        await native_bed.command("sh", "-c", "echo x > /workspace/file; mkdir -p /tmp/dir; rm /workspace/file")
        assert (await native_bed.run(PYTHON, "print(1)", parked=True))[1]


class TestTrouble:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV])
    @pytest.mark.parametrize("which", ["template", "copy"])
    async def test_one_that_was_killed_or_stopped(self, bed: Bed, number: int, which: str) -> None:
        template, copy = await park_alone(bed, PYTHON)
        pid = template if which == "template" else copy
        assert (await bed.command("kill", f"-{int(number)}", pid)).exit_code == 0
        program = Program("print('x', input())", b"in\n")
        ended, handed_over = await bed.run(PYTHON, program, parked=True)
        assert (ended.stdout, ended.exit_code) == (b"x in\n", 0)
        if which == "template":  # its copy was there already, and may have been asked first; the next one never is
            assert handed_over or number != signal.SIGSTOP
            ended, handed_over = await bed.run(PYTHON, program, parked=True)
        assert (ended.stdout, ended.exit_code, handed_over) == (b"x in\n", 0, False)
        await wait_until_gone(bed, "python3")

    async def test_nothing_runs_twice_whoever_kills_it_when(self, native_bed: Bed) -> None:
        """The killer aims at whatever python3 is there, the moment the run is asked for."""
        await native_bed.command("rm", "-f", "/tmp/runs")
        code = "import os; f = os.open('/tmp/runs', os.O_APPEND | os.O_CREAT | os.O_WRONLY); os.write(f, b'x')"
        reported = 0
        for number in range(18):
            template, copy = await park_alone(native_bed, PYTHON)
            pid = copy if number % 3 else template
            delay = number * 0.0005
            (ended, handed_over), _ = await asyncio.gather(
                native_bed.run(PYTHON, code, parked=True),
                native_bed.command("sh", "-c", f"sleep {delay}; kill -9 {pid}"),
            )
            # A run that was handed over is the parked process, and may be killed like any command.
            assert ended.exit_code == 0 or (handed_over and ended.signal == signal.SIGKILL), ended
            reported += ended.exit_code == 0
        runs = len((await native_bed.command("cat", "/tmp/runs")).stdout)
        assert reported <= runs <= 18

    async def test_others_cannot_look_into_it(self, bed: Bed) -> None:
        for pid in await park_alone(bed, PYTHON):
            for path in ("fd/1", "mem", "fd/63"):
                assert (await bed.command("sh", "-c", f": > /proc/{pid}/{path}")).exit_code != 0
        assert (await bed.run(PYTHON, "print(1)", parked=True))[1]

    async def test_a_directory_that_does_not_exist(self, bed: Bed) -> None:
        await bed.park(PYTHON)
        with pytest.raises(NotStarted) as caught:
            await bed.run(PYTHON, Program("print(1)", cwd="/no/such"), parked=True)
        assert (caught.value.stage, caught.value.code) == (Stage.CWD, Code.NOT_FOUND)

    async def test_a_program_of_the_length_that_linux_just_takes(self, native_bed: Bed) -> None:
        await native_bed.park(PYTHON)
        text = "x = '" + "y" * 120_000 + "'; print(len(x))"
        assert (await native_bed.run(PYTHON, text, parked=True))[0].stdout == b"120000\n"


class TestCommand:
    """From OPENED on."""

    async def test_its_timeout_ends_the_whole_tree(self, bed: Bed) -> None:
        await bed.park(PYTHON)
        code = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '4321']); time.sleep(600)"
        process = await bed.sandbox.start(replace(bed.spec(PYTHON, Program(code), parked=True), timeout=0.5, grace=0.1))
        assert process.handed_over
        _, outcome = await bed.finish(process)
        assert (outcome.cause, outcome.signal) == (Cause.TIMEOUT, signal.SIGTERM)
        assert (await bed.command("pgrep", "-f", "^sleep 4321")).exit_code == 1

    async def test_the_time_it_waited_does_not_count(self, native_bed: Bed) -> None:
        await native_bed.park(PYTHON)
        await asyncio.sleep(1.5)
        process = await native_bed.sandbox.start(native_bed.spec(PYTHON, Program("print(1)"), parked=True))
        _, outcome = await native_bed.finish(process)
        assert process.handed_over
        assert outcome.wall_seconds < 1.5

    async def test_signals_reach_it(self, bed: Bed) -> None:
        await bed.park(PYTHON)
        code = (  # not signal.pause: a signal between its own look for one and its wait would be found by neither
            "import signal, sys, time\nsignal.signal(10, lambda *a: sys.exit(42))\nprint('on', flush=True)\n"
            "while True: time.sleep(0.05)"
        )
        process = await bed.sandbox.start(bed.spec(PYTHON, Program(code), parked=True))
        assert await process.stdout.read() == b"on\n"
        await process.signal(signal.SIGUSR1, Scope.PROCESS)
        ended, _ = await bed.finish(process)
        assert ended.exit_code == 42

    async def test_end_ends_it(self, bed: Bed) -> None:
        await bed.park(NODE)
        process = await bed.sandbox.start(bed.spec(NODE, Program("setTimeout(() => {}, 1e6)"), parked=True))
        assert process.handed_over
        await process.end(0.5)
        _, outcome = await bed.finish(process)
        assert (outcome.cause, outcome.signal) == (Cause.ENDED, signal.SIGTERM)

    async def test_it_can_be_left_and_found_again(self, native_bed: Bed) -> None:
        bed = native_bed
        await bed.park(PYTHON)
        code = "import sys; print('one', flush=True); sys.stdin.read(); print('two')"
        process = await bed.sandbox.start(replace(bed.spec(PYTHON, Program(code), parked=True), stdin=True))
        assert await process.stdout.read() == b"one\n"
        await process.detach()
        (info,) = (info for info in await bed.sandbox.commands() if info.id == process.id)
        assert (info.running, info.name) == (True, b"python3")
        again = await bed.sandbox.attach(process.id, stdout_from=4)
        assert again.handed_over
        await again.close_stdin()
        assert (await bed.finish(again))[0].stdout == b"two\n"

    async def test_much_input_at_once_arrives_whole(self, bed: Bed) -> None:
        await bed.park(PYTHON)
        content = bytes(range(256)) * 2000
        code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
        waited, handed_over = await bed.run(PYTHON, Program(code, content), parked=True)
        fresh, _ = await bed.run(PYTHON, Program(code, content), parked=False)
        assert handed_over
        assert waited == fresh
