"""runsc (gVisor) from this machine's package sources; `k8e doctor --fix` and scripts/setup both use this.

Distributions also have a runsc of 2022, which knows no systrap: one from before 2024 is neither taken nor installed. On
Debian 12 a later one is in backports, which are then enabled, at the address that the machine has for Debian already.

`python -m k8e.engine.local.toolchain.runsc` installs it, as root, where there is no current one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import sys
from pathlib import Path

from k8e.engine import EngineError, Runtime
from k8e.engine.local.runtime.runtime import find_runtimes, read_release_date
from k8e.engine.local.toolchain.packages import Package, install_packages, run_apt, update_lists

OLDEST = "20240101"
BACKPORTS = Path("/etc/apt/sources.list.d/k8e-backports.sources")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGE = Package("runsc", "engine", ("runsc",))
BUILD = "`make runsc` in a checkout builds the current one where Go is installed"


def is_current(version: str) -> bool:
    """One that tells no day was not made by a distribution: the administrator's own choice."""
    return (read_release_date(version) or OLDEST) >= OLDEST


async def has_current() -> bool:
    for runtime in await find_runtimes(Runtime.GVISOR):
        with contextlib.suppress(EngineError, OSError):
            if is_current(await runtime.version()):
                return True
    return False


async def install_runsc() -> None:
    """EngineError when the package sources have none, or only an old one."""
    if os.geteuid() != 0:
        raise EngineError("runsc", "only root can install it", "run it again as root")
    suite = find_backports()
    options = ("-t", suite) if suite else ()
    if suite and not await asyncio.to_thread(BACKPORTS.exists):
        await enable_backports(suite)
    version = await find_candidate(*options)
    if not version:
        await update_lists()
        version = await find_candidate(*options)
    if not version:
        raise EngineError("runsc", "this machine's package sources have none", BUILD)
    if not is_current(version):
        raise EngineError("runsc", f"this machine's package sources have {version} only, which is too old", BUILD)
    await install_packages([PACKAGE], *options)


def find_backports() -> str:
    """The suite in which this distribution has a current one, where its own is old."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        return ""
    return "bookworm-backports" if (system.get("ID"), system.get("VERSION_CODENAME")) == ("debian", "bookworm") else ""


async def find_candidate(*options: str) -> str:
    told = await run_apt(*options, "policy", PACKAGE.name, tool="apt-cache", capture=True)
    match = re.search(r"^\s*Candidate:\s*(\d\S*)", told, re.MULTILINE)
    return match[1] if match else ""


async def enable_backports(suite: str) -> None:
    release = suite.removesuffix("-backports")
    targets = await run_apt(
        "indextargets", "--format", "$(RELEASE)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages", capture=True
    )
    match = re.search(rf"^{release}\|main\|(\S+)$", targets, re.MULTILINE)
    if match is None:
        raise EngineError("runsc", f"no package source of this machine has {release}", BUILD)
    await asyncio.to_thread(write_source, suite, match[1])
    try:
        await update_lists()
    except BaseException:
        # A mirror without that suite would make every later update on this machine fail.
        os.unlink(BACKPORTS)
        raise


def write_source(suite: str, uri: str) -> None:
    lines = ["Types: deb", f"URIs: {uri}", f"Suites: {suite}", "Components: main"]
    lines += [f"Signed-By: {KEYRING}"] if KEYRING.exists() else []
    BACKPORTS.write_text("\n".join(lines) + "\n")


async def provide() -> bool:
    """Whether it had to be installed."""
    if await has_current():
        return False
    await install_runsc()
    return True


def main() -> int:
    try:
        asyncio.run(provide())
    except (EngineError, OSError) as error:
        sys.stderr.write(f"runsc: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
