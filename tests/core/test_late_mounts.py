"""Sessions with directories of the machine, in sandboxes that were made ahead: whose they are is bound when they are
claimed. (What is shown then is the engine's: tests/engine/test_slots.py.)"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.core.errors import Kind
from k8e.core.model import REMOTE, Caller, SessionSpec
from k8e.core.sessions.interpreters import BASH
from k8e.core.sessions.mounts import check_shape, check_slots
from k8e.core.store.records import read_shape, write_shape
from k8e.engine import EngineError, Mount, MountRefused, Place, Shape
from k8e.link.model import ExecSpec, Identity, Sandbox
from tests.core.rig import ALICE, BOB, fault
from tests.core.test_pool import count, open_pool, ready, settle
from tests.sandboxes import needs_root

PROJECT = Mount("/srv/project", "/workspace", ALICE.uid, writable=True, kept=(".git",))
HOME = Mount("/srv/home", "/home/user", ALICE.uid, hidden=(".ssh",))
SPEC = SessionSpec(shape=Shape(mounts=(PROJECT,), read_only=True, powerless=True))
UNBOUND = SessionSpec(shape=Shape(slots=("/workspace",), read_only=True, powerless=True))


@needs_root
async def test_one_kind_is_for_all_projects(folder: Path) -> None:
    async with open_pool(folder, number=1) as rig:
        await rig.service.warm.reserve(ALICE, "codex", UNBOUND, 1)
        await settle(rig)
        (name,) = ready(rig)
        other = replace(PROJECT, source="/srv/other", kept=(), owner=BOB.uid)
        session = await rig.create(BOB, replace(SPEC, shape=replace(SPEC.shape, mounts=(other,))))
        assert rig.sandbox_of(session) == name
        assert rig.engine.bound == {name: (other,)}
        assert count(rig, 'k8e_pool_claims_total{start="warm"} 1')
        shown = await rig.service.sessions.get(BOB, session)
        assert shown.shape == Shape(mounts=(other,), read_only=True, powerless=True), "as if it were made for it"
        await settle(rig)


@needs_root
async def test_the_second_of_a_kind_is_ready_and_another_kind_is_not(folder: Path) -> None:
    async with open_pool(folder, number=1) as rig:
        await rig.service.sessions.destroy(ALICE, await rig.create(spec=SPEC))
        assert rig.engine.bound == {}, "it was made with its mounts"
        await settle(rig)
        (name,) = ready(rig)
        both = replace(SPEC, shape=replace(SPEC.shape, mounts=(PROJECT, HOME)))
        assert rig.sandbox_of(await rig.create(spec=both)) != name
        assert rig.sandbox_of(await rig.create(spec=SPEC)) == name
        assert rig.engine.bound == {name: (PROJECT,)}
        await settle(rig)


@needs_root
async def test_one_that_cannot_be_bound_is_replaced_by_a_new_one(folder: Path) -> None:
    async with open_pool(folder, number=1) as rig:
        await rig.service.warm.reserve(ALICE, "codex", UNBOUND, 1)
        await settle(rig)
        (name,) = ready(rig)
        link, _ = await rig.engine.attach(name)
        await link.write_file(b"/workspace/mark", b"of the one that was ready")
        rig.engine.bind_failure = EngineError("slots", "the agent did not answer")
        session = await rig.create(spec=SPEC)
        assert (await rig.run(session, "ls; echo well")).stdout == b"well\n"
        assert count(rig, 'k8e_pool_discards_total{reason="unbound"} 1')
        await settle(rig)


@needs_root
async def test_a_directory_that_is_refused_is_no_session(folder: Path) -> None:
    async with open_pool(folder, number=1) as rig:
        await rig.service.warm.reserve(ALICE, "codex", UNBOUND, 1)
        await settle(rig)
        (name,) = ready(rig)
        rig.engine.bind_failure = MountRefused("mount /srv/project", "it is not a directory")
        with fault(Kind.DENIED, "mount_refused", "mounts"):
            await rig.create(spec=SPEC)
        await settle(rig)
        assert name not in await rig.engine.list()
        assert not list(rig.service._registry)


@needs_root
async def test_interpreters_of_an_image_s_root_are_parked_when_its_directories_are_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pool(folder, number=1) as rig:
        attach = rig.engine.attach
        parked: list[tuple[bytes, ...]] = []

        async def attach_as_root(sandbox: str) -> tuple[Sandbox, Place]:
            link, place = await attach(sandbox)

            async def park(spec: ExecSpec, loader: bytes, *, keep: float | None = None) -> None:
                parked.append(spec.argv[:-1])

            monkeypatch.setattr(link, "park", park)
            return link, replace(place, user=Identity(0, 0), loader=b"/k8e-loader.so")

        monkeypatch.setattr(rig.engine, "attach", attach_as_root)
        await rig.service.warm.reserve(ALICE, "codex", UNBOUND, 1)
        await settle(rig)
        assert not parked
        session = await rig.create(spec=SPEC)
        assert rig.engine.bound
        while BASH not in parked:
            await asyncio.sleep(0.01)
        await rig.service.sessions.destroy(ALICE, session)


def test_slots_are_of_what_is_made_ahead_and_of_local_users() -> None:
    with fault(Kind.INVALID, "invalid_argument", "slots"):
        check_shape(ALICE, UNBOUND.shape)
    check_slots(ALICE, Shape(slots=("/workspace", "/home/user/a", "/home/user/b")))
    check_slots(Caller(REMOTE, tenant="t", name="key"), Shape())
    with fault(Kind.DENIED, "mounts_denied", "slots"):
        check_slots(Caller(REMOTE, tenant="t", name="key"), UNBOUND.shape)
    with fault(Kind.INVALID, "invalid_argument", "mounts"):
        check_slots(ALICE, SPEC.shape)


@pytest.mark.parametrize(
    ("slots", "field"),
    [
        (("/etc",), "slots[0]"),
        (("workspace",), "slots[0]"),
        (("/workspace", "/home/user/../x"), "slots[1]"),
        (("/workspace", "/workspace"), "slots[1]"),
        (("/home/user/a", "/home/user"), "slots[1]"),
        (tuple(f"/home/user/{n}" for n in range(9)), "slots"),
    ],
)
def test_slots_are_where_mounts_may_be(slots: tuple[str, ...], field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        check_slots(ALICE, Shape(slots=slots))


def test_a_shape_survives_the_store() -> None:
    for shape in (Shape(), UNBOUND.shape, SPEC.shape, Shape(mounts=(PROJECT, HOME))):
        assert read_shape(write_shape(shape)) == shape
    assert SPEC.shape.unbound == UNBOUND.shape
    assert UNBOUND.shape.unbound == UNBOUND.shape
