"""Through the service: sessions have interpreters that wait, and nobody who runs code has to know."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from k8e.core.model import Caller, Language, RunResult, RunSpec, SessionSpec
from k8e.core.sandbox.programs import MAX_WORD
from k8e.core.service import Service
from k8e.core.sessions import interpreters
from k8e.core.sessions.interpreters import BASH, NODE, PYTHON, suits
from k8e.core.store.store import Store
from k8e.engine import Limits, Runtime
from k8e.engine.local.engine import LocalEngine
from k8e.link.model import ExecSpec, Rlimit, TerminalSize
from k8e.settings import PoolSettings
from tests.engine.answers import plant_answers
from tests.engine.rig import eventually, find_report
from tests.parking.conftest import make_folder
from tests.runtimes import do_without

ALICE = Caller(1000)
LIMITS = Limits(cpus=2.0)
PATIENCE = 60.0

SUITABLE = [
    (*PYTHON, b"print(1)"),
    (*NODE, b"console.log(1)"),
    (*BASH, b"echo 1"),
    (*BASH, b"-1"),
    (*PYTHON, b""),
    (*PYTHON, b"-1"),
    (*PYTHON, b"import os; print(os.environ, maps, process)"),
    (*PYTHON, b"x" * MAX_WORD),
    (*NODE, b"procedure(); topic(); steps()"),
]
UNSUITABLE = [
    (b"bash", b"-c", b"echo 1"),
    (b"bash", b"-c", b"--", b"cat /proc/self/status"),
    (b"bash", b"-c", b"--", b"echo", b"argument"),
    (b"tsx", b"-e", b"console.log(1)"),
    (*PYTHON, b"print(1)", b"argument"),
    (b"python3", b"-Ic", b"print(1)"),
    (b"/usr/bin/python3", b"-c", b"print(1)"),
    (*PYTHON, b"x" * (MAX_WORD + 1)),
    (*PYTHON, b"open('/proc/self/maps')"),
    (*PYTHON, b"import psutil"),
    (*PYTHON, b"import os; os.system('ps aux')"),
    (*NODE, b"process.title = 'x'"),
    (*NODE, b"-1"),
    (*NODE, b"\\-1"),
]


@pytest.mark.parametrize("argv", SUITABLE, ids=lambda argv: argv[-1][:20].decode())
def test_what_may_be_handed_over(argv: tuple[bytes, ...]) -> None:
    assert suits(ExecSpec(argv))
    assert not suits(ExecSpec(argv, terminal=TerminalSize()))
    assert not suits(ExecSpec(argv, rlimits=(Rlimit(7, 1, 1),)))
    assert suits(ExecSpec(argv, keep_capabilities=True))


@pytest.mark.parametrize("argv", UNSUITABLE, ids=lambda argv: b" ".join(argv)[:20].decode())
def test_what_may_not(argv: tuple[bytes, ...]) -> None:
    assert not suits(ExecSpec(argv))


@contextlib.asynccontextmanager
async def serve(pool: PoolSettings | None = None) -> AsyncIterator[Service]:
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")
    folder = make_folder()
    plant_answers(folder / "s")
    engine = LocalEngine(folder / "s", folder / "r")
    store = await Store.open(folder / "state.db")
    service = Service(engine, store, pool=pool)
    try:
        await service.recover()
        report = await find_report(engine, Runtime.NATIVE)
        if not report.available:
            do_without("native", report.reason)
        service.keep_up()
        yield service
    finally:
        await service.close()
        for sandbox in await engine.list():
            await engine.destroy(sandbox)
        await engine.close()
        await store.close()
        shutil.rmtree(folder, ignore_errors=True)


async def run(
    service: Service, session: str, code: str, language: Language = Language.PYTHON
) -> tuple[RunResult, bool]:
    before = service.metrics.parked.get("handed_over")
    result = await service.runs.run(ALICE, RunSpec(session, code, language=language, timeout=30))
    return result, service.metrics.parked.get("handed_over") > before


async def run_parked(service: Service, session: str, code: str, language: Language = Language.PYTHON) -> RunResult:
    """Again and again until one was handed over."""
    async with asyncio.timeout(PATIENCE):
        while True:
            result, handed_over = await run(service, session, code, language)
            if handed_over:
                return result
            await asyncio.sleep(0.3)


async def test_node_programs_without_a_pause_find_one() -> None:
    async with serve() as service:
        spec = SessionSpec(runtime=Runtime.NATIVE, limits=LIMITS)
        session = (await service.sessions.create(ALICE, spec)).session_id
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):  # the first of these parks another, and they take turns
                handed_over = False
                while not handed_over:
                    result, handed_over = await run(service, session, "console.log(process.pid)", Language.NODE)
                    assert (result.stderr, result.exit_code) == (b"", 0)


async def test_a_session_has_one_waiting_and_the_next_behind_it() -> None:
    async with serve() as service:
        spec = SessionSpec(runtime=Runtime.NATIVE, limits=LIMITS, env={"WHO": "me"})
        session = (await service.sessions.create(ALICE, spec)).session_id
        code = "import os, sys; print(os.environ['WHO'], os.getcwd(), sys.argv); sys.exit(3)"
        for _ in range(3):
            result = await run_parked(service, session, code)
            assert (result.stdout, result.stderr, result.exit_code) == (b"me /workspace ['-c']\n", b"", 3)
        result = await run_parked(service, session, "console.log(process.env.WHO)", Language.NODE)
        assert (result.stdout, result.exit_code) == (b"me\n", 0)
        # With a variable of its own, and with what it asks about itself, a run goes the plain way.
        for plain in (
            RunSpec(session, "import os; print(os.environ['X'])", language=Language.PYTHON, env={"X": "1"}),
            RunSpec(session, "print(len(open('/proc/self/stat').read()) > 9 and 1)", language=Language.PYTHON),
        ):
            before = service.metrics.parked.get("handed_over")
            assert (await service.runs.run(ALICE, plain)).stdout == b"1\n"
            assert service.metrics.parked.get("handed_over") == before
        # What a program installs, the next one finds, whoever runs it.
        module = "import site; open(site.getsitepackages()[0] + '/mine.py', 'w').write('x = 42')"
        assert (await run(service, session, module))[0].exit_code == 0
        assert (await run(service, session, "import mine; print(mine.x)"))[0].stdout == b"42\n"
        assert (await run_parked(service, session, "import mine; print(mine.x)")).stdout == b"42\n"


async def test_the_first_ones_wait_while_another_caller_waits_for_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[bool] = []
    park_one = interpreters.park_one
    monkeypatch.setattr(interpreters, "_COURTESY", 1 << 20)
    async with serve() as service:

        async def look(*given: Any) -> bool:
            busy.append(service._pool.busy)
            return await park_one(*given)

        monkeypatch.setattr(interpreters, "park_one", look)
        with service._pool.foreground():
            session = await service.sessions.create(ALICE, SessionSpec(runtime=Runtime.NATIVE, limits=LIMITS))
            (watch,) = service._interpreters._watches.values()

            async def has_waited() -> bool:
                return watch.courtesy < 1 << 20

            await eventually(has_waited, "its turn came, and was put off")
            assert busy == []
        await run_parked(service, session.session_id, "print(1)")
        assert busy
        assert not any(busy)


async def test_a_warm_sandbox_has_them_before_its_session() -> None:
    async with serve(PoolSettings()) as service:
        spec = SessionSpec()  # the usual kind, of which there always is one
        async with asyncio.timeout(PATIENCE):
            await service.sessions.destroy(ALICE, (await service.sessions.create(ALICE, spec)).session_id)
            while not service.metrics.warm.value:
                await asyncio.sleep(0.1)
        for language, code in (
            (Language.BASH, "echo 1"),
            (Language.PYTHON, "print(1)"),
        ):
            session = (await service.sessions.create(ALICE, spec)).session_id
            if not service.metrics.claims.get("warm"):
                pytest.fail("the session was not made from a warm sandbox")
            result, handed_over = await run(service, session, code, language)
            assert (result.stdout, handed_over) == (b"1\n", True)
            async with asyncio.timeout(PATIENCE):
                while not service.metrics.warm.value:
                    await asyncio.sleep(0.1)
