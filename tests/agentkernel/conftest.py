from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.house import House
from tests.cli.machine import make_folder


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Nothing runs here: for commands that need no daemon."""
    with make_folder() as folder:
        yield House(folder, tmp_path)
        assert not (folder / "r").exists(), "a daemon was started"
