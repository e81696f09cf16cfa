from collections.abc import AsyncIterator

import pytest

from tests.link.fake_agent import Stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.close()
