from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import Machine, make_folder, share


@pytest.fixture(scope="session")
def shared_machine() -> Iterator[Machine]:
    with share(Machine) as machine:
        yield machine


@pytest.fixture
def machine(shared_machine: Machine, tmp_path: Path) -> Machine:
    """With a home of this test's own."""
    return Machine(shared_machine.folder, tmp_path)


@pytest.fixture
def lone_machine(tmp_path: Path) -> Iterator[Machine]:
    """Nothing runs on it yet."""
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        yield Machine(folder, tmp_path)
