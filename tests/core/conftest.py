from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.core.model import SessionSpec
from tests.core.family import HOSTS, PARENT
from tests.core.rig import ManualClock, Rig, open_rig, remove_sandboxes


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Whatever a test leaves there is gone afterwards."""
    yield tmp_path
    await remove_sandboxes(tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def rig(folder: Path, clock: ManualClock) -> AsyncIterator[Rig]:
    async with open_rig(folder, clock) as rig:
        yield rig


@pytest.fixture
async def family(rig: Rig) -> Rig:
    """With a parent."""
    await rig.create(spec=SessionSpec(session_id=PARENT, allowed_hosts=HOSTS, env={"SECRET": "the parent's"}))
    return rig
