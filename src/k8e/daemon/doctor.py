"""`k8e doctor`: examines the machine and prints what works; runs beside a daemon or without one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from k8e.daemon.paths import Paths, StartRefused
from k8e.daemon.server import load_settings
from k8e.damage import FOLDER, list_damaged

if TYPE_CHECKING:
    from k8e.engine.local.doctor import fixes


def run_doctor(*, as_json: bool, fix: bool = False) -> int:
    """Returns the exit code: 1 when the default runtime would not be safe."""
    from k8e.engine import EngineError
    from k8e.engine.local.doctor import doctor, fixes
    from k8e.settings.file import USUAL, find_file

    file = find_file()
    load_settings()  # with a broken file no daemon would start, so there is nothing to examine
    steps: list[fixes.Step] = []
    try:
        if fix:
            steps = asyncio.run(put_right())
            if not as_json:
                sys.stdout.write(fixes.render(steps))
                sys.stdout.flush()
        report = asyncio.run(doctor.examine_machine())
    except EngineError as error:
        raise StartRefused("doctor_failed", str(error), hint=error.hint or "the daemon log has the details") from error
    state = Paths.from_environment().state_dir
    damaged = list(list_damaged(state))
    if as_json:
        put = {"fixed": [dataclasses.asdict(step) for step in steps]} if fix else {}
        told = {"settings": file and str(file), "damaged": damaged, **put, **report.as_dict()}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"settings: {file or f'defaults, as there is no {USUAL}'}\n\n")
        if damaged:
            names = ", ".join(damaged)
            sys.stdout.write(f"damaged files that were set aside in {state / FOLDER}: {names}\n\n")
        sys.stdout.write(doctor.render(report))
    sys.stdout.flush()
    return 0 if report.safe else 1


async def put_right() -> list[fixes.Step]:
    """Fixes what can be fixed. A state directory that has a database is kept: a daemon will use it again."""
    from k8e.engine.local.doctor.fixes import fix

    return [step async for step in fix(lambda state: Paths(state, state).database.exists())]
