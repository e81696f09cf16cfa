from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.house import House
from tests.agentkernel.machine import Kernel
from tests.cli.machine import make_folder, share


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Nothing runs here: for commands that need no daemon."""
    with make_folder() as folder:
        yield House(folder, tmp_path)
        assert not (folder / "r").exists(), "a daemon was started"


@pytest.fixture(scope="session")
def shared_kernel() -> Iterator[Kernel]:
    with share(Kernel) as kernel:
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel, tmp_path: Path) -> Kernel:
    """With a home of this test's own."""
    return Kernel(shared_kernel.folder, tmp_path)


@pytest.fixture
def lone_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """Nothing runs on it yet."""
    if os.geteuid() != 0:
        pytest.skip("the daemon needs root")
    with make_folder() as folder:
        yield Kernel(folder, tmp_path)
