"""`k8e doctor`: examines the machine and prints what works; runs beside a daemon or without one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from k8e.daemon.paths import Paths, StartRefused
from k8e.daemon.server import load_settings
from k8e.damage import FOLDER, list_damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8e.engine.local.doctor import fixes
    from k8e.engine.report import Report

    Install = Callable[[list[fixes.Step]], Iterator[fixes.Step]]


def run_doctor(*, as_json: bool, fix: bool = False, install: Install | None = None) -> int:
    """Returns the exit code: 1 when the default runtime would not be safe. `install` is called after other fixes, with
    their steps."""
    from k8e.engine import EngineError
    from k8e.engine.local.doctor import doctor, fixes

    load_settings()  # with a broken file no daemon would start, so there is nothing to examine
    steps: list[fixes.Step] = []
    try:
        if fix:
            steps = asyncio.run(put_right())
            if install is not None:
                steps += install(steps)
            if not as_json:
                sys.stdout.write(fixes.render(steps))
                sys.stdout.flush()
        report = asyncio.run(doctor.examine_machine())
    except EngineError as error:
        raise StartRefused("doctor_failed", str(error), hint=error.hint or "the daemon log has the details") from error
    put = {"fixed": [dataclasses.asdict(step) for step in steps]} if fix else {}
    return _tell(report, as_json, put)


def run_cluster_doctor(*, as_json: bool) -> int:
    """The same for a cluster."""
    from k8e.daemon.kubernetes import examine
    from k8e.engine import EngineError

    try:
        report = examine(Paths.from_environment(), load_settings().kubernetes)
    except EngineError as error:
        raise StartRefused("doctor_failed", str(error), hint=error.hint or "docs/kubernetes.md") from error
    return _tell(report, as_json, {})


def _tell(report: Report, as_json: bool, put: dict[str, Any]) -> int:
    from k8e.engine.report import render
    from k8e.settings.file import USUAL, find_file

    file = find_file()
    state = Paths.from_environment().state_dir
    damaged = list(list_damaged(state))
    if as_json:
        told = {"settings": file and str(file), "damaged": damaged, **put, **report.as_dict()}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"settings: {file or f'defaults, as there is no {USUAL}'}\n\n")
        if damaged:
            names = ", ".join(damaged)
            sys.stdout.write(f"damaged files that were set aside in {state / FOLDER}: {names}\n\n")
        sys.stdout.write(render(report))
    sys.stdout.flush()
    return 0 if report.safe else 1


async def put_right() -> list[fixes.Step]:
    """Fixes what can be fixed. A state directory that has a database is kept: a daemon will use it again."""
    from k8e.engine.local.doctor.fixes import fix

    return [step async for step in fix(lambda state: Paths(state, state).database.exists())]
