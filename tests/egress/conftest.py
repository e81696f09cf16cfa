from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from k8e.engine import Runtime
from tests.egress.internet import Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.egress.rig import Site, open_site
from tests.egress.zones import Zone


@pytest.fixture(scope="module")
def internet(request: pytest.FixtureRequest) -> Iterator[Internet]:
    """With the names of the module's ZONE."""
    if os.geteuid() != 0:
        pytest.skip("namespaces without a user namespace need root")
    zone: Zone = getattr(request.module, "ZONE", {})
    with private_machine(), small_internet() as internet:
        internet.publish(zone)
        yield internet


@pytest.fixture(scope="module", params=[Runtime.GVISOR, Runtime.NATIVE], ids=lambda runtime: runtime.value)
async def site(request: pytest.FixtureRequest, internet: Internet) -> AsyncIterator[Site]:
    async with open_site(internet, request.param) as site:
        yield site
