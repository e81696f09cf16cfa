"""Fixes what can be fixed without a person: `k8e doctor --fix`.

Installs missing packages, and removes what dead engines left that will not be started again. Never touches what a
living engine has, of any daemon, nor what a daemon that does not run now will find again when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e.engine import EngineError, Runtime
from k8e.engine.local.engine import LocalEngine
from k8e.engine.local.engine_locks import ENGINES, dead_engine, known_engines
from k8e.engine.local.layout import Layout
from k8e.engine.local.network.table import Table
from k8e.engine.local.runtime.cgroup import hierarchies
from k8e.engine.local.runtime.runtime import find_runtimes
from k8e.engine.local.system.tool import find_tool
from k8e.engine.local.toolchain.packages import Package, install_packages, missing_packages

_TAGGED = re.compile(r"k8e-([0-9a-f]{8})")
_OURS = (
    "sandboxes",
    "images",
    "agents",
    "clients.json",
)  # in a state directory; other files there are not ours
_RUNTIMES = ("gvisor", "native")  # of a run directory


@dataclass(frozen=True, slots=True)
class Step:
    what: str
    done: bool
    detail: str = ""  # why not, and what to do


Claims = Callable[[Path], bool]  # whether a daemon will start an engine in that state directory again


async def fix(claims: Claims, folder: Path = ENGINES, table: Sequence[Package] | None = None) -> AsyncIterator[Step]:
    """Yields each step when it has been tried."""
    if os.geteuid() != 0:
        raise EngineError("doctor", "only root can put things right", "run it again as root")
    async for step in _fix_packages(table):
        yield step
    for tag in await asyncio.to_thread(known_engines, folder):
        async for step in _fix_engine(tag, claims, folder):
            yield step
    for tag in await asyncio.to_thread(_unknown_tags, folder):
        yield Step(
            f"groups k8e-{tag} of an engine that {folder} does not know",
            False,
            "left alone, as it may be alive; when it is not, remove /sys/fs/cgroup/**/k8e-" + tag,
        )


async def _fix_packages(table: Sequence[Package] | None) -> AsyncIterator[Step]:
    if missing := await asyncio.to_thread(missing_packages, "engine", table):
        yield await _install(missing)
    if table is None and not await find_runtimes(Runtime.GVISOR):
        hint = "on Debian 12 it is in bookworm-backports, which scripts/setup enables; `make runsc` builds one"
        yield await _install([Package("runsc", "engine", ("runsc",))], hint)


async def _install(packages: Sequence[Package], hint: str = "") -> Step:
    what = f"install {' '.join(package.name for package in packages)}"
    try:
        await install_packages(packages)
    except EngineError as error:
        return Step(what, False, "; ".join(filter(None, (error.cause, hint or error.hint))))
    return Step(what, True)


async def _fix_engine(tag: str, claims: Claims, folder: Path) -> AsyncIterator[Step]:
    with dead_engine(tag, folder) as layout:
        if layout is None:
            return
        engine = LocalEngine(layout.state, layout.run)
        left = await engine.list()
        if claims(layout.state):
            # Not closed either: that would put away what a daemon that starts at this moment counts on.
            if left:
                what = f"{len(left)} sandboxes in {layout.state}"
                yield Step(what, False, "left to their daemon, which does not run: the next one goes on with them")
            return
        for sandbox in left:
            yield await _remove_sandbox(engine, sandbox)
        await engine.close()
        if not await engine.list():
            yield await asyncio.to_thread(_remove_rest, layout)
            (folder / tag).unlink(missing_ok=True)


async def _remove_sandbox(engine: LocalEngine, sandbox: str) -> Step:
    what = f"remove sandbox {sandbox} in {engine.layout.state}"
    try:
        await engine.destroy(sandbox)
    except (EngineError, OSError) as error:
        return Step(what, False, str(error))
    return Step(what, True)


def _remove_rest(layout: Layout) -> Step:
    """Removes what an engine makes for all its sandboxes, and its directories when nothing else is in them."""
    try:
        if find_tool("nft"):
            table = Table(f"k8e_{layout.tag}")
            table.remove()
            table.close()
        for path in (*(layout.state / name for name in _OURS), *(layout.run / name for name in _RUNTIMES)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (layout.state, layout.run):
            with contextlib.suppress(OSError):
                path.rmdir()
    except (OSError, EngineError) as error:
        return Step(f"remove the engine in {layout.state}", False, str(error))
    return Step(f"remove the engine in {layout.state}", True)


def _unknown_tags(folder: Path) -> list[str]:
    known = set(known_engines(folder))
    found = set()
    for hierarchy in hierarchies():
        with contextlib.suppress(OSError):
            found |= {match[1] for name in os.listdir(hierarchy) if (match := _TAGGED.fullmatch(name))}
    return sorted(found - known)


def render(steps: Sequence[Step]) -> str:
    if not steps:
        return "Nothing to put right.\n\n"
    lines = []
    for step in steps:
        lines.append(f"  {'done' if step.done else 'not done':<10}{step.what}")
        if step.detail:
            lines.append(f"            {step.detail}")
    return "Put right:\n" + "\n".join(lines) + "\n\n"
