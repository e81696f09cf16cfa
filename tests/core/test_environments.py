from __future__ import annotations

from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.store.environments import Environments, FileEnvironments
from tests.core.environments_contract import CHECKS, ENV, Check
from tests.core.rig import fault


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check: Check, tmp_path: Path) -> None:
    async def open_place() -> Environments:
        return FileEnvironments(tmp_path / "environments")

    await check(open_place)


async def test_without_a_place_nothing_is_kept_and_that_is_said() -> None:
    place = FileEnvironments(None)
    await place.forget("s1")
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await place.keep("s1", ENV)
