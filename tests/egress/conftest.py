from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from k8e.engine import Runtime
from tests.egress.internet import Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.egress.rig import Site, open_site
from tests.egress.zones import Zone
from tests.engine.answers import plant_answers
from tests.engine.rig import place_for_engine


@pytest.fixture(scope="module")
def internet(request: pytest.FixtureRequest) -> Iterator[Internet]:
    """With the names of the module's ZONE."""
    if os.geteuid() != 0:
        pytest.skip("namespaces without a user namespace need root")
    zone: Zone = getattr(request.module, "ZONE", {})
    with private_machine(), small_internet() as internet:
        internet.publish(zone)
        yield internet


@pytest.fixture(scope="module")
def place(internet: Internet) -> Iterator[tuple[Path, Path]]:
    """For the engines of both runtimes, one after the other: what one prepared the other need not."""
    with place_for_engine() as place:
        plant_answers(place[0])
        yield place


@pytest.fixture(scope="module", params=[Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def site(request: pytest.FixtureRequest, internet: Internet, place: tuple[Path, Path]) -> AsyncIterator[Site]:
    async with open_site(internet, request.param, place) as site:
        yield site
