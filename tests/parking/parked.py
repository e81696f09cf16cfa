"""The interpreters that wait in a sandbox, as its processes show them."""

from __future__ import annotations

import asyncio

from k8e.core.sessions.interpreters import Kind
from tests.parking.conftest import Bed


async def find_parked(bed: Bed, name: str) -> list[str]:
    """Pids of those that wait, whose program is a placeholder; the oldest first: a template, then its copy."""
    found = await bed.command("sh", "-c", f"pgrep -f '^{name} -[ce]( --)? [0-9a-f]{{32}}$' || true")
    return sorted(found.stdout.decode().split(), key=int)


async def clear(bed: Bed, name: str) -> None:
    """Ends all that earlier tests have parked."""
    await bed.command("sh", "-c", f"pkill -9 -f '^{name} -[ce]( --)? [0-9a-f]{{32}}$' || true")
    await wait_until_gone(bed, name)


async def park_alone(bed: Bed, kind: Kind) -> list[str]:
    """Parks one and returns its pid, and that of its copy."""
    name = kind[0].decode()
    await clear(bed, name)
    await bed.park(kind)
    return await find_parked(bed, name)


async def wait_until_gone(bed: Bed, name: str) -> None:
    async with asyncio.timeout(20):
        while await find_parked(bed, name):
            await asyncio.sleep(0.02)
