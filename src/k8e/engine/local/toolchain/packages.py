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
    # engine; engine-optional: for some of what it does; build, test: only who builds or tests this project needs it
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


async def install_packages(packages: Sequence[Package]) -> None:
    """EngineError when one is still missing afterwards."""
    names = [package.name for package in packages]
    by_hand = f"install what Debian calls: {' '.join(names)}"
    apt = find_tool("apt-get")
    if apt is None:
        raise EngineError("packages", "there is no apt-get here", by_hand)
    if os.geteuid() != 0:
        raise EngineError("packages", "only root can install them", f"sudo apt-get install {' '.join(names)}")
    command = (apt, "install", "-y", "-qq", "--no-install-recommends", "--", *names)
    try:
        await run_tool(*command, deadline=_DEADLINE, env=_QUIETLY)
    except EngineError:
        # Most likely it knows no packages yet, or only ones that have gone.
        await run_tool(apt, "update", "-qq", deadline=_DEADLINE, env=_QUIETLY)
        await run_tool(*command, deadline=_DEADLINE, env=_QUIETLY)
    if still := [package.name for package in packages if not package.there]:
        raise EngineError("packages", f"apt-get has nothing to install, and yet {' '.join(still)} is missing", by_hand)
