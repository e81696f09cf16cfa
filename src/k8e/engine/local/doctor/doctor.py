"""Finds out what works on this machine, by doing it: `k8e doctor`.

For every runtime a sandbox is started and each of its controls is tried (controls/). The machine is safe when the
runtime that sandboxes get by default holds them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from k8e.engine import EngineError, Limits, Runtime, RuntimeReport, SandboxSpec
from k8e.engine.local.doctor.controls import CONTROLS, Broken, Control, Untested
from k8e.engine.local.doctor.decoys import Decoys, plant_decoys
from k8e.engine.local.doctor.remote_host import NameServer, RemoteHost, name_server, open_remote_host
from k8e.engine.local.doctor.subject import Subject
from k8e.engine.local.engine import LocalEngine
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.vm.runtime import VmOptions
from k8e.engine.report import Check, Examination, Report, Verdict
from k8e.link.errors import LinkError

# Small, so that every limit is soon reached; as much as gVisor needs for itself.
LIMITS = Limits(cpus=0.5, memory=96 << 20, pids=64, disk=64 << 20, inodes=8192, open_files=512)
# Of its own, so that a daemon that clears up does not take the doctor's sandboxes for lost ones.
STATE_DIR = Path("/var/lib/k8e/doctor")
RUN_DIR = Path("/run/k8e-doctor")
_CHECK_DEADLINE = 30.0
_VM_LIMITS = replace(LIMITS, cpus=1.0, memory=256 << 20)  # a kernel has to boot in them
_PATIENCE = 8  # times as long, where everything is emulated

Progress = Callable[[Runtime, Check], None]


def _ignore(runtime: Runtime, check: Check) -> None:
    pass


async def examine(
    engine: LocalEngine, progress: Progress = _ignore, limits: Limits = LIMITS, remote: RemoteHost | None = None
) -> Report:
    began = time.monotonic()
    reports = await engine.probe()
    await asyncio.to_thread(engine.layout.state.mkdir, mode=0o711, parents=True, exist_ok=True)
    async with plant_decoys(engine.layout.state) as decoys, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_examine_runtime(engine, report, decoys, limits, progress, remote)) for report in reports
        ]
    return Report(tuple(task.result() for task in tasks), time.monotonic() - began)


async def _examine_runtime(
    engine: LocalEngine,
    report: RuntimeReport,
    decoys: Decoys,
    limits: Limits,
    progress: Progress,
    remote: RemoteHost | None,
) -> Examination:
    if not report.available:
        return Examination(report)
    checks: list[Check] = []
    if report.runtime in (Runtime.KATA, Runtime.FIRECRACKER):
        limits = _VM_LIMITS
    try:
        async with open_subject(engine, report.runtime, decoys, limits, remote) as subject:
            for control in CONTROLS:
                checks.append(await try_control(control, subject, patience=_PATIENCE if report.emulated else 1))
                progress(report.runtime, checks[-1])
    except EngineError as error:
        checks.append(Check("start and end", Verdict.FAILED, "started and ended a sandbox", str(error), error.hint))
        progress(report.runtime, checks[-1])
    return Examination(report, tuple(checks))


@contextlib.asynccontextmanager
async def open_subject(
    engine: LocalEngine, runtime: Runtime, decoys: Decoys, limits: Limits = LIMITS, remote: RemoteHost | None = None
) -> AsyncIterator[Subject]:
    name = f"doctor-{runtime.value}-{secrets.token_hex(4)}"
    await engine.create(name, SandboxSpec(runtime, limits=limits))
    try:
        sandbox, place = await engine.attach(name)
        yield Subject(
            name,
            runtime,
            limits,
            sandbox,
            place,
            decoys,
            engine.layout.cgroup,
            observe=functools.partial(engine.observe, name),
            set_egress=functools.partial(engine.set_egress, name),
            remote=remote,
        )
    finally:
        await engine.destroy(name)


async def try_control(control: Control, subject: Subject, patience: float = 1) -> Check:
    """`patience`: how much longer than usual it may take."""
    verdict, hint = Verdict.FAILED, control.hint
    try:
        async with asyncio.timeout(_CHECK_DEADLINE * patience):
            found = await control.check(subject)
        verdict, hint = Verdict.OK, ""
    except Untested as reason:
        verdict, found, hint = Verdict.SKIPPED, str(reason), ""
    except Broken as fault:
        found = str(fault)
    except TimeoutError:
        found = "could not be tried: no answer in time"
    except (LinkError, EngineError, OSError, ValueError, LookupError) as error:
        # What comes back from a sandbox may be anything; that it is not what it should be says enough.
        found = f"could not be tried: {type(error).__name__}: {error}"
    return Check(control.name, verdict, control.tried, found, hint)


async def examine_machine(
    progress: Progress = _ignore,
    state_dir: Path = STATE_DIR,
    run_dir: Path = RUN_DIR,
    engine: type[LocalEngine] = LocalEngine,
) -> Report:
    """Examines with an engine of its own, so that it needs no daemon and disturbs none. One at a time on a machine."""
    if os.geteuid() != 0:
        raise EngineError("doctor", "only root can start sandboxes", "run it again as root")
    async with _own_engine(state_dir, run_dir, engine) as (own, remote):
        return await examine(own, progress, remote=remote)


@contextlib.asynccontextmanager
async def _own_engine(
    state_dir: Path, run_dir: Path, kind: type[LocalEngine]
) -> AsyncIterator[tuple[LocalEngine, RemoteHost | None]]:
    with open(f"{run_dir}.lock", "w") as lock:  # noqa: ASYNC230 - an empty file in memory
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        async with name_server() as names:
            engine = kind(state_dir, run_dir, nameservers=(names.server,), virtual=VmOptions(emulation=True))
            try:
                await _clear(engine)  # after one that was killed
                async with _find_remote_host(engine, names) as remote:
                    yield engine, remote
            finally:
                await _clear(engine)
                await engine.close()
                await asyncio.to_thread(Cgroups(engine.layout.cgroup).remove_all)
                for folder in (state_dir, run_dir):
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def _find_remote_host(engine: LocalEngine, names: NameServer) -> AsyncIterator[RemoteHost | None]:
    """None where there can be no network: then no sandbox can be created either, and says why."""
    try:
        wire = await engine.reserve_wire("doctor-far-end")
    except EngineError:
        yield None
        return
    async with open_remote_host(wire) as remote:
        names.address = remote.address
        yield remote


async def _clear(engine: LocalEngine) -> None:
    for name in await engine.list():
        await engine.destroy(name)
