"""Variables of persistent sessions in Secrets of a real API server, with the rights of the manifests and no more."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator

import pytest

from k8e.core.errors import Kind
from k8e.core.store.environments import Environments
from k8e.core.store.mirrored import MirroredStore
from k8e.engine.kubernetes.api import Api
from k8e.replicas.environments import SecretEnvironments
from k8e.replicas.objects import ObjectMirror
from tests.core.environments_contract import CHECKS, ENV, Check
from tests.core.rig import fault
from tests.core.store_contract import SESSION, make_session
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.kubectl import Kubectl


@pytest.fixture
def gateway() -> str:
    return secrets.token_hex(8)


@pytest.fixture
async def api(site: Site, gateway: str) -> AsyncIterator[Api]:
    api = Api(site.kubectl.namespace, site.kubeconfig)
    yield api
    await api.close()
    site.kubectl("delete", "sandboxrecords,secrets", "-l", f"k8e.dev/gateway={gateway}")


async def open_place(api: Api, gateway: str, *, sessions: bool = False) -> SecretEnvironments:
    mirror = ObjectMirror(api, gateway)
    store = await MirroredStore.load(mirror)
    if sessions and not await store.sessions():
        await store.insert_session(SESSION)
        await store.insert_session(make_session("s2", "two"))
    await store.close()
    return SecretEnvironments(api, gateway, mirror)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(check: Check, api: Api, gateway: str) -> None:
    async def open_next() -> Environments:
        return await open_place(api, gateway, sessions=True)

    await check(open_next)


async def test_a_secret_goes_with_its_record(site: Site, api: Api, gateway: str) -> None:
    """By the cluster's garbage collector, whichever gateway runs."""
    place = await open_place(api, gateway, sessions=True)
    await place.keep("s1", ENV)
    await place.keep("s2", ENV)
    found = site.kubectl.get("secret/k8e-s1")
    assert (found["type"], found["metadata"]["ownerReferences"][0]["name"]) == ("k8e.dev/environment", "k8e-s1")
    site.kubectl("delete", "sandboxrecord/k8e-s1")
    site.kubectl("wait", "--for=delete", "secret/k8e-s1", "--timeout=60s")
    assert await place.recall("s1") == ()
    assert await place.recall("s2") == ENV


async def test_a_session_that_is_not_on_record_has_none(api: Api, gateway: str) -> None:
    place = await open_place(api, gateway)
    with fault(Kind.UNAVAILABLE, "state_unavailable"):
        await place.keep("s1", ENV)
    assert await place.recall("s1") == ()


async def test_damage_is_told_and_replaced(site: Site, api: Api, gateway: str) -> None:
    place = await open_place(api, gateway, sessions=True)
    await place.keep("s1", ENV)
    for content in (b"A=1\0", b""):
        patch = json.dumps({"data": {"environment": base64.b64encode(content).decode()}})
        site.kubectl("patch", "secret/k8e-s1", "--type=merge", "--patch", patch)
        assert await place.recall("s1") == ()
        (told,) = place.damages.take()
        assert told.path == f"secret:{site.kubectl.namespace}/k8e-s1"
        await place.keep("s1", ENV)
        assert await place.recall("s1") == ENV


async def test_another_secret_of_the_name_is_neither_read_nor_changed(site: Site, api: Api, gateway: str) -> None:
    place = await open_place(api, gateway, sessions=True)
    site.kubectl("create", "secret", "generic", "k8e-s1", "--from-literal=environment=x")
    before = site.kubectl.get("secret/k8e-s1")["metadata"]["resourceVersion"]
    try:
        with fault(Kind.UNAVAILABLE, "state_unavailable"):
            await place.keep("s1", ENV)
        with fault(Kind.UNAVAILABLE, "state_unavailable"):
            await place.recall("s1")
        with fault(Kind.UNAVAILABLE, "state_unavailable"):
            await place.forget("s1")
        assert site.kubectl.get("secret/k8e-s1")["metadata"]["resourceVersion"] == before
    finally:
        site.kubectl("delete", "secret/k8e-s1")


def test_the_account_cannot_list_secrets(site: Site) -> None:
    assert "cannot list" in Kubectl(site.cluster, site.kubectl.namespace, site.kubeconfig).refused("get", "secrets")
