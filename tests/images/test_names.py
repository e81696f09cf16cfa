"""Whose images are whose, through the service and through the door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import REMOTE, Caller, Scope, SessionSpec
from k8e.engine.images import Credentials, Image, Report
from k8e.settings import Settings
from tests.core.rig import ALICE, BOB, ROOT, Rig, fault, open_rig, remove_sandboxes
from tests.images.builder import build, entry, make_tar, write_layout
from tests.images.conftest import ignore
from tests.images.registry import PASSWORD, USER, RealRegistry, run_registry

CREDENTIALS = Credentials(USER, PASSWORD)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("private"), htpasswd=True) as running:
        yield running


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    try:
        async with open_rig(tmp_path) as rig:
            yield rig
    finally:
        await remove_sandboxes(tmp_path)


async def pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 10_000):
        yield content[start : start + 10_000]


def archive(tmp_path: Path, content: bytes, name: str = "") -> bytes:
    return write_layout(tmp_path / "archive.tar", build(make_tar(entry("f", content))), name).read_bytes()


async def test_a_private_image_is_for_who_pulled_it(rig: Rig, private: RealRegistry) -> None:
    built = build(make_tar(entry("secret", b"of alice")))
    name = private.push("team/private", built)
    with fault(Kind.DENIED, "image_unauthorized"):
        await rig.service.images.pull(BOB, name, None, ignore)
    pulled = await rig.service.images.pull(ALICE, name, CREDENTIALS, ignore)
    assert (pulled.name, pulled.digest, pulled.owner, pulled.size) == (name, built.digest, ALICE.uid, 8)
    session = await rig.service.sessions.create(ALICE, SessionSpec(image=name))
    assert session.image == name
    for wanted in (name, built.digest, f"{name}@{built.digest}", name.removesuffix(":latest")):
        with fault(Kind.NOT_FOUND, "image_not_found", "image"):
            await rig.service.sessions.create(BOB, SessionSpec(image=wanted))
        with fault(Kind.NOT_FOUND, "image_not_found", "image"):
            await rig.service.images.remove(BOB, wanted)
        assert await rig.service.images.list(BOB, wanted) == []
    assert await rig.service.images.list(BOB) == []
    await rig.service.sessions.create(ALICE, SessionSpec(image=built.digest))
    assert [image.name for image in await rig.service.images.list(ALICE)] == [name]
    assert [image.name for image in await rig.service.images.list(ROOT)] == [name]
    with fault(Kind.DENIED, "image_unauthorized"):
        await rig.service.images.pull(BOB, name, None, ignore)
    await rig.service.images.pull(BOB, name, CREDENTIALS, ignore)
    await rig.service.sessions.create(BOB, SessionSpec(image=name))
    text = json.dumps(rig.read_audit()) + (rig.folder / "state.db").read_bytes().decode("latin-1")
    assert "image_pulled" in text
    assert PASSWORD not in text


async def test_what_sessions_are_made_of_is_not_removed(rig: Rig, tmp_path: Path) -> None:
    await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"1" * 100)), "mine:1", ignore)
    await rig.service.images.add(BOB, pieces(archive(tmp_path, b"1" * 100)), "his:1", ignore)
    session = await rig.create(ALICE, SessionSpec(image="mine:1"))
    with fault(Kind.CONFLICT, "image_in_use"):
        await rig.service.images.remove(ALICE, "mine:1")
    assert await rig.service.images.prune(ALICE) == ([], 0)
    assert await rig.service.images.remove(BOB, "his:1") == 0, "another image still has the layers"
    await rig.service.sessions.destroy(ALICE, session)
    assert await rig.service.images.prune(ALICE, unused_for=3600) == ([], 0)
    assert await rig.service.images.prune(ALICE) == (["mine:1"], 100)
    with fault(Kind.NOT_FOUND, "image_not_found"):
        await rig.service.sessions.create(ALICE, SessionSpec(image="mine:1"))


async def test_a_name_that_means_something_new_lets_the_old_go(rig: Rig, tmp_path: Path) -> None:
    first = await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"old")), "mine", ignore)
    session = await rig.create(ALICE, SessionSpec(image="mine"))
    second = await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"new")), "mine:latest", ignore)
    assert first.digest != second.digest
    assert await rig.engine.images.find(first.digest) is not None, "a session is made of it"
    await rig.service.sessions.destroy(ALICE, session)
    third = await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"newest")), "mine", ignore)
    assert await rig.engine.images.find(first.digest) is None
    assert await rig.engine.images.find(third.digest) is not None


async def test_names_of_imports(rig: Rig, tmp_path: Path) -> None:
    named = archive(tmp_path, b"x", "registry.test/team/x:3")
    assert (await rig.service.images.add(ALICE, pieces(named), "", ignore)).name == "registry.test/team/x:3"
    for bad in ("", "latest", "../../x", "k8e/base", "-v/:/host", "host/../x", "k8e/base:latest"):
        with fault(Kind.INVALID, "invalid_argument", "name"):
            await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"y", bad)), "", ignore)
    for bad in ("host", "k8e/base", "k8e/other", "-v/:/host", "../../x", "A", "x@sha256:" + "0" * 64, "a\0b"):
        with fault(Kind.INVALID, "invalid_argument", "name"):
            await rig.service.images.add(ALICE, pieces(named), bad, ignore)
    with fault(Kind.FAILED, "image_refused"):
        await rig.service.images.add(ALICE, pieces(b"no archive" * 1000), "x", ignore)


@pytest.mark.parametrize("name", ["-v/:/host", "../../x", "A/b", "a\0b", "a\x1b", "", "x" * 600, "Registry.test/x"])
async def test_what_is_no_name_is_refused_wherever_it_comes(rig: Rig, name: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", "image"):
        await rig.service.sessions.create(ALICE, SessionSpec(image=name))
    with fault(Kind.INVALID, "invalid_argument", "image"):
        await rig.service.images.pull(ALICE, name, None, ignore)
    with fault(Kind.INVALID, "invalid_argument", "image"):
        await rig.service.images.remove(ALICE, name)


async def test_the_base_is_built_by_root_for_everybody(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building takes minutes and is shown elsewhere; here it comes from an archive."""
    path = write_layout(tmp_path / "base.tar", build(make_tar(entry("base", b"x"))))

    async def build_base(report: Report) -> Image:
        return await rig.engine.images.add(path, report)

    monkeypatch.setattr(rig.engine.images, "build_base", build_base)
    with fault(Kind.NOT_FOUND, "image_not_found"):
        await rig.service.sessions.create(BOB, SessionSpec(image="k8e/base"))
    with fault(Kind.DENIED, "scope_missing"):
        await rig.service.images.build_base(ALICE, ignore)
    made = await rig.service.images.build_base(ROOT, ignore)
    assert made.name == "k8e/base"
    for wanted in ("k8e/base", "docker.io/k8e/base:latest", made.digest):
        session = await rig.service.sessions.create(BOB, SessionSpec(image=wanted))
        with fault(Kind.CONFLICT, "image_in_use"):
            await rig.service.images.remove(ROOT, "k8e/base")
        await rig.service.sessions.destroy(BOB, session.session_id)
    assert [image.name for image in await rig.service.images.list(BOB)] == ["k8e/base"]
    with fault(Kind.DENIED, "scope_missing"):
        await rig.service.images.remove(BOB, "k8e/base")
    assert (await rig.service.images.prune(ROOT))[0] == [], "it would take minutes to have it again"
    with fault(Kind.INVALID, "invalid_argument"):
        await rig.service.images.pull(ROOT, "k8e/base", None, ignore)
    await rig.service.images.remove(ROOT, "k8e/base")
    assert await rig.service.images.list(ROOT) == []


async def test_tenants_of_the_gateway_do_not_have_this_machine_ask_around(rig: Rig, tmp_path: Path) -> None:
    tenant = Caller(REMOTE, tenant="t", name="key")
    for attempt in (
        rig.service.images.pull(tenant, "localhost:1/x", None, ignore),
        rig.service.images.add(tenant, pieces(b""), "x", ignore),
    ):
        with fault(Kind.DENIED, "scope_missing"):
            await attempt
    admin = replace(tenant, scope=Scope.ADMIN)
    await rig.service.images.add(admin, pieces(archive(tmp_path, b"x")), "theirs", ignore)
    session = await rig.service.sessions.create(tenant, SessionSpec(image="theirs"))
    assert session.image == "theirs"
    with fault(Kind.NOT_FOUND, "image_not_found"):
        await rig.service.sessions.create(Caller(REMOTE, tenant="u", name="key"), SessionSpec(image="theirs"))


async def test_root_gets_images_for_tenants_of_the_gateway(rig: Rig, tmp_path: Path) -> None:
    with fault(Kind.DENIED, "scope_missing"):
        await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"x")), "tool", ignore, tenant="t")
    with fault(Kind.INVALID, "invalid_argument", "tenant"):
        await rig.service.images.add(ROOT, pieces(archive(tmp_path, b"x")), "tool", ignore, tenant="../t")
    given = await rig.service.images.add(ROOT, pieces(archive(tmp_path, b"x")), "tool", ignore, tenant="t")
    assert (given.owner, given.tenant) == (REMOTE, "t")
    tenant = Caller(REMOTE, tenant="t", name="key")
    session = await rig.service.sessions.create(tenant, SessionSpec(image="tool"))
    for caller in (ROOT, ALICE, Caller(REMOTE, tenant="u", name="key"), Caller(1000, tenant="t")):
        with fault(Kind.NOT_FOUND, "image_not_found"):
            await rig.service.sessions.create(caller, SessionSpec(image="tool"))
    with fault(Kind.CONFLICT, "image_in_use"):
        await rig.service.images.remove(ROOT, "tool", tenant="t")
    await rig.service.sessions.destroy(tenant, session.session_id)
    assert await rig.service.images.prune(ROOT, tenant="t") == (["tool:latest"], 1)


async def test_quotas(tmp_path: Path) -> None:
    settings = Settings()
    settings = replace(settings, quotas=replace(settings.quotas, images=2, image_bytes=1000))
    async with open_rig(tmp_path, settings=settings) as rig:
        with fault(Kind.EXHAUSTED, "too_many_image_bytes"):
            await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"x" * 1001)), "big", ignore)
        assert await rig.engine.images.list() == []
        await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"x" * 10)), "a", ignore)
        await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"y" * 10)), "b", ignore)
        with fault(Kind.EXHAUSTED, "too_many_images"):
            await rig.service.images.add(ALICE, pieces(archive(tmp_path, b"z")), "c", ignore)
        await rig.service.images.add(BOB, pieces(archive(tmp_path, b"z")), "c", ignore)


async def test_a_daemon_that_stops_ends_what_is_under_way(rig: Rig) -> None:
    begun = asyncio.Event()

    async def for_ever() -> AsyncIterator[bytes]:
        begun.set()
        await asyncio.Event().wait()
        yield b""

    importing = asyncio.create_task(rig.service.images.add(ALICE, for_ever(), "x", ignore))
    await begun.wait()
    await rig.service.images.close()
    with fault(Kind.UNAVAILABLE, "daemon_stopping"):
        await importing
    work = rig.folder / "image-state" / "oci" / "work"
    assert list(work.iterdir()) == []


async def test_names_survive_the_daemon(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as first:
        await first.service.images.add(ALICE, pieces(archive(tmp_path, b"x")), "mine", ignore)
        session = await first.create(ALICE, SessionSpec(image="mine"))
    try:
        async with open_rig(tmp_path) as second:
            assert [image.name for image in await second.service.images.list(ALICE)] == ["mine:latest"]
            with fault(Kind.CONFLICT, "image_in_use"):
                await second.service.images.remove(ALICE, "mine")
            await second.service.sessions.destroy(ALICE, session)
            assert await second.service.images.remove(ALICE, "mine") == 1
    finally:
        await remove_sandboxes(tmp_path)
