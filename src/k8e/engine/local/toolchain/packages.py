"""The system packages that sandboxes need, and how they are installed where there is apt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k8e.engine import EngineError
from k8e.engine.local.system.tool import find_tool, run_tool

TABLE = Path(__file__).with_name("packages.txt")
_DEADLINE = 600.0
_QUIETLY = {"DEBIAN_FRONTEND": "noninteractive"}


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    # engine; engine-optional: for some of what it does; build, test, cilium: only who builds or tests this project
    # needs it
    purpose: str
    signs: tuple[str, ...]  # programs or paths; one of them says that it is there

    @property
    def there(self) -> bool:
        return any(os.path.exists(sign) if sign.startswith("/") else find_tool(sign) for sign in self.signs)


def parse_table(text: str) -> tuple[Package, ...]:
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return tuple(Package(name, purpose, tuple(signs)) for name, purpose, *signs in lines)


def missing_packages(purpose: str = "engine", table: Sequence[Package] | None = None) -> list[Package]:
    known = parse_table(TABLE.read_text()) if table is None else table
    return [package for package in known if package.purpose == purpose and not package.there]


async def install_packages(packages: Sequence[Package], *options: str) -> None:
    """EngineError when one is still missing afterwards. apt-get installs nothing when it does not know one of the
    names: then each is tried by itself, so that one that this distribution lacks does not keep the others away."""
    names = [package.name for package in packages]
    by_hand = f"install what Debian calls: {' '.join(names)}"
    if find_tool("apt-get") is None:
        raise EngineError("packages", "there is no apt-get here", by_hand)
    if os.geteuid() != 0:
        raise EngineError("packages", "only root can install them", f"sudo apt-get install {' '.join(names)}")
    command = ("install", "-y", "-qq", "--no-install-recommends", *options, "--")
    causes = {}
    try:
        await run_apt(*command, *names)
    except EngineError:
        # Most likely it knows no packages yet, or only ones that have gone.
        try:
            await update_lists()
            await run_apt(*command, *names)
        except EngineError as error:
            for name in names:
                causes[name] = await _install_one(command, name) if len(names) > 1 else error.cause
    if still := [package.name for package in packages if not package.there]:
        told = [f"{name}: {causes[name]}" if causes.get(name) else f"{name} is missing" for name in still]
        rest = f"{'; '.join(told)}; apt-get has done what it could"
        raise EngineError("packages", rest, f"install what Debian calls: {' '.join(still)}")


async def _install_one(command: Sequence[str], name: str) -> str:
    try:
        await run_apt(*command, name)
    except EngineError as error:
        return error.cause
    return ""


async def update_lists() -> None:
    await run_apt("update", "-qq")


async def run_apt(*words: str, tool: str = "apt-get", capture: bool = False) -> str:
    found = find_tool(tool)
    if found is None:
        raise EngineError("packages", f"there is no {tool} here", "install them as your distribution does")
    return await run_tool(found, *words, deadline=_DEADLINE, env=_QUIETLY, capture=capture)
