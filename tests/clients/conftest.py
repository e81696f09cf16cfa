from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import Machine
from tests.clients.programs import fetch_programs
from tests.clients.user import User
from tests.sdk.conftest import serving


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """The first run on a machine downloads them, and shows it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return fetch_programs()


@pytest.fixture(scope="module")
def machine(programs: Path) -> Iterator[Machine]:
    """A daemon with the real engine, and the runtime that it takes here."""
    with serving() as made:
        yield made


@pytest.fixture
def user(machine: Machine, programs: Path, tmp_path: Path) -> User:
    return User(machine, programs, tmp_path / "home")
