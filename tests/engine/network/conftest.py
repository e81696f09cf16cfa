from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from k8e.engine.local.network.leases import own_ledger
from k8e.engine.local.network.network import Network
from tests.egress.internet import Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.egress.zones import Zone
from tests.engine.network.rig import Place, nft, routing_rules


@pytest.fixture
def machine() -> Iterator[None]:
    """A network of the test's own: whatever it does to rules, addresses and settings, the real machine's stay."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with private_machine():
        yield


@pytest.fixture(scope="module")
def internet(request: pytest.FixtureRequest) -> Iterator[Internet]:
    """With the names of the module's ZONE."""
    zone: Zone = getattr(request.module, "ZONE", {})
    with private_machine(), small_internet() as internet:
        internet.publish(zone)
        yield internet


@pytest.fixture
async def place(internet: Internet) -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory(prefix="k8e-") as folder:
        before = routing_rules()
        place = Place(Path(folder))
        yield place
        last = place.network()
        for sandbox in last.sandboxes():
            await last.remove(sandbox)
        await last.close()
    assert "k8e_" not in nft("list", "tables")
    assert not own_ledger().exists()
    assert routing_rules() == before


@pytest.fixture
async def network(place: Place) -> AsyncIterator[Network]:
    network = place.network()
    yield network
    for sandbox in network.sandboxes():
        await network.remove(sandbox)
    await network.close()
