from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gateway.house import House, open_house


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """One daemon for each file."""
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with open_house() as house:
        yield house
