from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.egress.namespaces import private_machine


@pytest.fixture
def machine() -> Iterator[None]:
    """A network of the test's own: whatever it does to rules, addresses and settings, the real machine's stay."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with private_machine():
        yield
