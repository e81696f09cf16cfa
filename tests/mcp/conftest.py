"""One daemon with the real engine for each file. Sandboxes are native: what isolates them does not matter here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.machine import Machine
from tests.egress.test_registries import index  # noqa: F401 - a fixture
from tests.gateway.house import House, open_house
from tests.sdk.conftest import serving


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """A daemon without isolation, and its gateway, for tests of authentication."""
    with open_house() as made:
        yield made
