from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doors.dialogue import House, open_house


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as house:
        yield house
