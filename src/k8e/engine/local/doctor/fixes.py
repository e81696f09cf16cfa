"""Fixes what can be fixed without a person: `k8e doctor --fix`.

Installs missing packages and a current gVisor, makes the tools layer, and removes what dead engines left that will not
be started again. Never touches what a living engine has, of any daemon, nor what a daemon that does not run now will
find again when it does.
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

from k8e.engine import EngineError
from k8e.engine.local.engine import LocalEngine
from k8e.engine.local.engine_locks import ENGINES, dead_engine, known_engines
from k8e.engine.local.layout import Layout
from k8e.engine.local.network.table import Table
from k8e.engine.local.runtime.cgroup import hierarchies
from k8e.engine.local.system.tool import find_tool
from k8e.engine.local.toolchain import runsc, tools_layer
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
    packages: tuple[str, ...] = ()  # that were installed


Claims = Callable[[Path], bool]  # whether a daemon will start an engine in that state directory again


async def fix(claims: Claims, folder: Path = ENGINES, table: Sequence[Package] | None = None) -> AsyncIterator[Step]:
    """Yields each step when it has been tried."""
    if os.geteuid() != 0:
        raise EngineError("doctor", "only root can put things right", "run it again as root")
    async for step in _install(await asyncio.to_thread(missing_packages, "engine", table)):
        yield step
    if table is None:
        async for step in _fix_toolchain():
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


async def _install(packages: Sequence[Package]) -> AsyncIterator[Step]:
    """A step for those that are there now, and one for those that are not."""
    if not packages:
        return
    cause = ""
    try:
        await install_packages(packages)
    except EngineError as error:
        cause = "; ".join(filter(None, (error.cause, error.hint)))
    if there := tuple(package.name for package in packages if package.there):
        yield Step(f"install {' '.join(there)}", True, packages=there)
    if missing := [package.name for package in packages if not package.there]:
        yield Step(f"install {' '.join(missing)}", False, cause)


async def _fix_toolchain() -> AsyncIterator[Step]:
    try:
        if await runsc.provide():
            yield Step("install runsc (gVisor)", True, packages=(runsc.PACKAGE.name,))
    except EngineError as error:
        detail = "; ".join(filter(None, (f"sandboxes run on native only: {error.cause}", error.hint)))
        yield Step("install runsc (gVisor)", False, detail)
    before = await asyncio.to_thread(tools_layer.read_layer)
    what = "make the tools layer, which sandboxes have pip and tsx from"
    try:
        layer = await asyncio.to_thread(lambda: tools_layer.install(retry=True))
    except (tools_layer.ToolsFailed, OSError) as error:
        yield Step(what, False, str(error))
        return
    if before is None or before.path != layer.path or layer.missing:
        yield Step(what, not layer.missing, "; ".join(layer.missing))


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
        async for step in _remove_engine(engine):
            yield step
        if not await engine.list():
            (folder / tag).unlink(missing_ok=True)


async def remove_engine(layout: Layout) -> AsyncIterator[Step]:
    """Removes all that an engine has there: `k8e uninstall`. No daemon may run there."""
    async for step in _remove_engine(LocalEngine(layout.state, layout.run)):
        yield step


async def _remove_engine(engine: LocalEngine) -> AsyncIterator[Step]:
    for sandbox in await engine.list():
        yield await _remove_sandbox(engine, sandbox)
    await engine.close()
    if not await engine.list():
        yield await asyncio.to_thread(_remove_rest, engine.layout)


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
