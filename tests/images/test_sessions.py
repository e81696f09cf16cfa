"""Sessions of images: through the service, on the local engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from k8e.core.errors import Kind
from k8e.core.model import Language, RunSpec, SessionSpec
from k8e.core.service import Service
from k8e.core.store.store import Store
from k8e.engine import Runtime
from k8e.engine.local import LocalEngine
from k8e.settings import PoolSettings
from tests.core.rig import ALICE, fault
from tests.engine.answers import plant_answers
from tests.engine.rig import LIMITS, find_report
from tests.engine.tiny_images import busybox_layer
from tests.engine.toolbox_image import toolbox_layer
from tests.images.builder import build, write_layout
from tests.images.conftest import ignore
from tests.parking.conftest import make_folder
from tests.runtimes import do_without

PATIENCE = 60.0


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[Service]:
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")
    folder = make_folder()
    plant_answers(folder / "s")
    engine = LocalEngine(folder / "s", folder / "r")
    engine._images.store._fresh_for = 0.0  # else what was just imported is kept for a while, whatever its name
    store = await Store.open(folder / "state.db")
    service = Service(engine, store, pool=PoolSettings(min=1, max=2))
    try:
        await service.recover()
        report = await find_report(engine, Runtime.NATIVE)
        if not report.available:
            do_without("native", report.reason)
        yield service
    finally:
        await service.close()
        for sandbox in await engine.list():
            await engine.destroy(sandbox)
        await engine.close()
        await store.close()
        shutil.rmtree(folder, ignore_errors=True)


async def add(service: Service, tmp_path: Path, name: str, layer: bytes, **config: Any) -> str:
    archive = write_layout(tmp_path / f"{name}.tar", build(layer, how="plain", config=config)).read_bytes()

    async def pieces() -> AsyncIterator[bytes]:
        yield archive

    return (await service.images.add(ALICE, pieces(), f"{name}:1", ignore)).digest


@contextlib.asynccontextmanager
async def session_of(service: Service, image: str) -> AsyncIterator[str]:
    session = await service.sessions.create(ALICE, SessionSpec(runtime=Runtime.NATIVE, image=image, limits=LIMITS))
    try:
        yield session.session_id
    finally:
        await service.sessions.destroy(ALICE, session.session_id)


def ready(service: Service, digest: str) -> int:
    return sum(len(names) for kind, names in service._pool._ready.items() if kind.image == digest)


async def wait_for_one(service: Service, digest: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not ready(service, digest):
            await service._pool.review()
            await asyncio.sleep(0.1)


async def test_commands_run_where_and_as_whom_the_image_says(service: Service, tmp_path: Path) -> None:
    config = {"WorkingDir": "/home/worker", "User": "worker", "Env": ["PATH=/bin", "COLOUR=green"]}
    await add(service, tmp_path, "small", busybox_layer(), **config)
    async with session_of(service, "small:1") as session:
        script = RunSpec(session, argv=(b"sh", b"-c", b"id -u; pwd; echo $COLOUR $HOME; touch mine; ls -l mine"))
        result = await service.runs.run(ALICE, script)
        assert result.stdout.startswith(b"1234\n/home/worker\ngreen /home/worker\n-rw-r--r--"), result
        result = await service.runs.run(ALICE, RunSpec(session, argv=(b"pwd",), workdir="/tmp"))
        assert result.stdout == b"/tmp\n"


async def test_a_command_may_have_another_user(service: Service, tmp_path: Path) -> None:
    config = {"User": "worker", "Env": ["PATH=/bin", "USER=worker"]}
    await add(service, tmp_path, "small", busybox_layer(), **config)
    show = b"id -u; id -g; echo $HOME $USER; touch /tmp/$USER && chown 7 /tmp/$USER && echo capable; true"
    async with session_of(service, "small:1") as session:
        for user, expected in (
            ("", b"1234\n1235\n/home/worker worker\n"),
            ("root", b"0\n0\n/root root\ncapable\n"),
            ("65534", b"65534\n0\n/ 65534\n"),
        ):
            spec = RunSpec(session, argv=(b"sh", b"-c", show), user=user)
            assert (await service.runs.run(ALICE, spec)).stdout == expected
        long = b"id -u # " + b"x" * (1 << 20)
        result = await service.runs.run(ALICE, RunSpec(session, argv=(b"sh", b"-c", long), user="root"))
        assert (result.stdout, result.stderr) == (b"0\n", b"")


@pytest.mark.parametrize("runtime", [Runtime.NATIVE, Runtime.GVISOR], ids=lambda runtime: str(runtime.value))
async def test_users_and_long_programs_with_the_machines_tools(service: Service, runtime: Runtime) -> None:
    (report,) = [report for report in (await service.status(ALICE)).runtimes if report.runtime is runtime]
    if not report.available:
        do_without(runtime.value, report.reason)
    padding = "x" * (1 << 20)
    session = (await service.sessions.create(ALICE, SessionSpec(runtime=runtime, limits=LIMITS))).session_id

    async def run(code: str, language: Language = Language.BASH, user: str = "") -> tuple[int | None, bytes]:
        result = await service.runs.run(ALICE, RunSpec(session, code, language, user=user))
        return result.exit_code, result.stdout

    try:
        # Those tools need no capabilities: root has none.
        powers = "id -u; echo $HOME $USER; grep CapEff /proc/self/status"
        none = b"CapEff:\t0000000000000000\n"
        assert await run(powers, user="root") == (0, b"0\n/root root\n" + none)
        assert await run(powers, user="nobody") == (0, b"65534\n/nonexistent nobody\n" + none)
        assert await run(f"id -u # {padding}", user="root") == (0, b"0\n")
        assert await run(f"print(__name__) # {padding}", Language.PYTHON) == (0, b"__main__\n")
        assert await run(f"console.log(__filename) // {padding}", Language.NODE) == (0, b"[eval]\n")
        typed = "const x: number = 6; enum E { A = 7 }; console.log(x * E.A, __filename) // "
        assert await run(typed + padding, Language.TS) == (0, b"42 [eval]\n")
        await run("echo old > file; ln file other; stat -c %i file > inode; echo kept > kept; chmod 400 kept")
        await service.files.write(ALICE, session, "file", b"new\n", append=False)
        assert await run("cat other; stat -c %i file | cmp - inode") == (0, b"new\n")
        with fault(Kind.DENIED, "permission_denied"):
            await service.files.write(ALICE, session, "kept", b"x", append=False)
    finally:
        await service.sessions.destroy(ALICE, session)


@pytest.mark.parametrize("language", [Language.PYTHON, Language.NODE, Language.BASH, Language.TS])
async def test_a_language_that_the_image_lacks_is_said(service: Service, tmp_path: Path, language: Language) -> None:
    await add(service, tmp_path, "small", busybox_layer(), Env=["PATH=/bin"])
    async with session_of(service, "small:1") as session:
        with fault(Kind.UNAVAILABLE, "program_not_found", "argv"):
            await service.runs.run(ALICE, RunSpec(session, "1", language=language))


async def test_warm_sandboxes_of_an_image_serve_its_sessions(service: Service, tmp_path: Path) -> None:
    digest = await add(service, tmp_path, "large", toolbox_layer(), Env=["PATH=/usr/bin"])
    before = service.metrics.claims.get("warm")
    for _ in range(2):  # a kind is kept ready from its second session on
        async with session_of(service, "large:1"):
            pass
    await wait_for_one(service, digest)
    async with session_of(service, "large:1") as session:
        assert service.metrics.claims.get("warm") == before + 1
        handed_over = service.metrics.parked.get("handed_over")
        code = "import os; os.chown('/var', 7, 7); print(os.getuid(), os.stat('/var').st_uid, os.getcwd())"
        result = await service.runs.run(ALICE, RunSpec(session, code, language=Language.PYTHON))
        assert result.stdout == b"0 7 /workspace\n"
        assert service.metrics.parked.get("handed_over") == handed_over + 1
        assert (await service.runs.run(ALICE, RunSpec(session, "stat -c %u /var"))).stdout == b"7\n"
    await wait_for_one(service, digest)
    await service._pool.settle()
    assert await service.images.remove(ALICE, "large:1") > 1 << 20, "its layers go with the sandboxes that waited"
    assert not ready(service, digest)
    with fault(Kind.NOT_FOUND, "image_not_found"):
        await service.sessions.create(ALICE, SessionSpec(image="large:1"))
