"""A runtime that a machine has must work there. Where it does not, whatever was to be shown with it has failed: to skip
it would make a suite green on a machine on which nothing is confined."""

from __future__ import annotations

import shutil
from typing import Final, NoReturn

import pytest

from k8e.engine.local.runtime.runtime import OWN_BINARIES

_PROGRAMS: Final = {"gvisor": ("runsc",), "native": ("runc", "crun")}


def do_without(runtime: str, reason: object) -> NoReturn:
    """Whoever wanted to use it and could not. Skips only where it is not installed."""
    found = [name for name in _PROGRAMS[runtime] if (OWN_BINARIES / name).exists() or shutil.which(name)]
    if found:
        pytest.fail(f"{runtime} does not work, though {found[0]} is here: {reason}")
    pytest.skip(f"{runtime} is not installed")
