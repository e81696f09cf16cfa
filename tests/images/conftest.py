from __future__ import annotations

import os
from pathlib import Path

import pytest

from k8e.engine.images import Progress
from k8e.engine.local.images import LocalImages, Store
from k8e.engine.local.layout import Layout


@pytest.fixture(autouse=True)
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the local engine needs root")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "s", tmp_path / "r")


@pytest.fixture
def images(layout: Layout) -> LocalImages:
    return LocalImages(layout, store=Store(layout, fresh=0))


def ignore(_: Progress) -> None:
    """For who does not care how far it is."""
