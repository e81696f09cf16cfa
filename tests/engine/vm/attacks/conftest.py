from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from k8e.engine import Runtime
from k8e.engine.local.vm.runtime import VmOptions
from tests.egress.conftest import place
from tests.egress.internet import Internet, small_internet
from tests.egress.namespaces import private_machine
from tests.egress.rig import Site, open_site

__all__ = ["internet", "place", "site"]


# The others are those of every runtime, and for a soak.
OWN = ("test_vmm.py", "test_wire.py")
collect_ignore = (
    []
    if os.environ.get("K8E_SOAK")
    else [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in OWN]
)


@pytest.fixture(scope="module")
def internet(request: pytest.FixtureRequest, virtual: VmOptions) -> Iterator[Internet]:
    """As in tests/egress, but that the guest is there first: it is downloaded."""
    with private_machine(), small_internet() as internet:
        internet.publish(getattr(request.module, "ZONE", {}))
        yield internet


@pytest.fixture(scope="module")
async def site(internet: Internet, place: tuple[Path, Path], virtual: VmOptions) -> AsyncIterator[Site]:
    async with open_site(internet, Runtime.KATA, place, virtual) as site:
        yield site
