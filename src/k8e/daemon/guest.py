"""`k8e image build-guest`: builds the guest of virtual machines; runs beside a daemon or without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from k8e.daemon.paths import StartRefused
from k8e.daemon.server import require_root


def build(without: Sequence[str], *, check: bool = False) -> dict[str, Any]:
    """`check`: builds nothing, and compares every file of the one that is there with its hash."""
    from k8e.engine import EngineError
    from k8e.engine.local.vm.guest import GUEST_FOLDER, load_guest
    from k8e.engine.local.vm.guest_builder import build_host_guest

    require_root()
    try:
        guest = load_guest(GUEST_FOLDER, whole=True) if check else asyncio.run(build_host_guest(GUEST_FOLDER, without))
    except EngineError as error:
        said = error.cause if check else f"the guest cannot be built: {error.cause}"
        raise StartRefused("guest_failed", said, hint=error.hint) from error
    return {"guest": str(guest.folder), "kernel": guest.version, "digest": guest.digest}
