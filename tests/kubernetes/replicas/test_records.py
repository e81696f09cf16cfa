"""The store's contract on objects of a real API server, and what happens when others write them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator

import pytest

from k8e.core.errors import Kind
from k8e.core.model import Phase
from k8e.core.store.mirrored import MirroredStore
from k8e.core.store.store import Store
from k8e.engine.kubernetes.api import Api
from k8e.replicas.objects import ObjectMirror, SandboxRecord
from tests.core.rig import fault
from tests.core.store_contract import CHECKS, SESSION, Check, make_session
from tests.kubernetes.engine.rig import Site


@pytest.fixture
def gateway() -> str:
    """Records of other tests are another gateway's."""
    return secrets.token_hex(8)


@pytest.fixture
async def api(site: Site, gateway: str) -> AsyncIterator[Api]:
    api = Api(site.kubectl.namespace, site.kubeconfig)
    yield api
    await api.close()
    site.kubectl("delete", "sandboxrecords", "-l", f"k8e.dev/gateway={gateway}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check: Check, api: Api, gateway: str) -> None:
    async def open_store() -> Store:
        return await MirroredStore.load(ObjectMirror(api, gateway))

    await check(open_store)


async def test_people_see_the_session(site: Site, api: Api, gateway: str) -> None:
    store = await MirroredStore.load(ObjectMirror(api, gateway))
    await store.insert_session(SESSION)
    await store.close()
    shown = site.kubectl("get", "sandboxrecords", "-l", f"k8e.dev/gateway={gateway}")
    assert shown.splitlines()[0].split() == ["NAME", "SESSION", "TENANT", "PHASE", "RUNTIME", "AGE"]
    assert shown.splitlines()[1].split()[:5] == ["k8e-s1", "one", "default", "creating", "gvisor"]


async def test_a_change_by_a_person_is_replaced(site: Site, api: Api, gateway: str) -> None:
    store = await MirroredStore.load(ObjectMirror(api, gateway, term=5))
    await store.insert_session(SESSION)
    patch = {"metadata": {"annotations": {"note": "x"}}}
    site.kubectl("patch", "sandboxrecord/k8e-s1", "--type=merge", "--patch", json.dumps(patch))
    await store.set_phase("s1", Phase.ACTIVE)
    site.kubectl("delete", "sandboxrecord/k8e-s1")
    await store.set_phase("s1", Phase.STOPPED)
    found = await api.get(SandboxRecord, "k8e-s1")
    assert found is not None
    assert (found.spec or {})["content"]["sessions"][0]["phase"] == "stopped"
    site.kubectl("patch", "sandboxrecord/k8e-s1", "--type=merge", "--patch", json.dumps(patch))
    await store.forget_session("s1")
    assert await api.get(SandboxRecord, "k8e-s1") is None
    await store.close()


async def test_a_later_leader_ends_this_one(api: Api, gateway: str) -> None:
    ended: list[bool] = []
    old = await MirroredStore.load(ObjectMirror(api, gateway, term=1, fenced=lambda: ended.append(True)))
    await old.insert_session(SESSION)
    await old.insert_session(make_session("s2", "two"))
    new = await MirroredStore.load(ObjectMirror(api, gateway, term=2))
    await new.set_phase("s1", Phase.ACTIVE)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await old.set_phase("s1", Phase.DESTROYING)
    assert ended
    found = await api.get(SandboxRecord, "k8e-s1")
    assert found is not None
    assert (found.spec or {})["content"]["sessions"][0]["phase"] == "active"
    with pytest.raises(Exception, match="later leader"):
        await MirroredStore.load(ObjectMirror(api, gateway, term=1))
    old._late.clear()
    await old.close()
    await new.close()
