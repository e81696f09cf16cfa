"""Who may have which directories of the machine in a sandbox, and where: decided before anything is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import REMOTE, Caller, SessionSpec
from k8e.core.sessions.mounts import MAX_HIDDEN, MAX_KEPT, MAX_MOUNTS, MAX_PART, MAX_STEPS, check_shape
from k8e.core.store.records import read_shape, write_shape
from k8e.core.translation import translate
from k8e.engine import PLAIN, WHOLE, Mount, MountRefused, Shape
from tests.core.rig import ALICE, Rig, fault
from tests.sandboxes import needs_root

USER = Caller(1234)
PROJECT = Mount("/home/ann/project", "/workspace", owner=1234, writable=True, kept=(".git", ".git/config"))
HOME = Mount("/home/ann", "/home/user", owner=1234, hidden=(".ssh", ".config/gh"))


def test_what_may_be_shown_is_shown_as_the_callers() -> None:
    shape = Shape(mounts=(PROJECT, HOME), read_only=True, powerless=True)
    assert check_shape(USER, shape) == shape
    lying = Shape(mounts=(replace(PROJECT, owner=0),))
    assert check_shape(USER, lying).mounts[0].owner == 1234, "whatever the request says"


def test_a_copy_of_a_part_or_of_all_and_a_place_of_its_own_are_fine() -> None:
    own = replace(PROJECT, target=PROJECT.source, private=(".git",))
    whole = Mount("/srv/repository/.git", "/srv/repository/.git", owner=1234, private=(WHOLE,))
    moved = replace(whole, source="/srv/repository/.git/worktrees/x", target="/srv/other/.git")
    shape = Shape(mounts=(replace(PROJECT, private=(".git",)), own, whole, moved))
    assert check_shape(USER, shape) == shape
    assert read_shape(write_shape(shape)) == shape


@pytest.mark.parametrize("shape", [PLAIN, Shape(read_only=True), Shape(powerless=True)])
def test_what_shows_nothing_is_for_all_callers(shape: Shape) -> None:
    for caller in (USER, Caller(REMOTE, tenant="t", name="key")):
        assert check_shape(caller, shape) is shape


def test_a_caller_that_is_no_user_of_the_machine_sees_nothing_of_it() -> None:
    with pytest.raises(Fault) as raised:
        check_shape(Caller(REMOTE, tenant="t", name="key"), Shape(mounts=(PROJECT,)))
    assert (raised.value.kind, raised.value.code, raised.value.field) == (Kind.DENIED, "mounts_denied", "mounts")
    assert raised.value.hint


PATHS = ["", ".", "..", "relative", "/x/../y", "/x/./y", "//x", "/x//y", "/x/", "/x\0y", "/" + "x" * 5000, "\ud800"]
PARTS = [
    "",
    ".",
    "..",
    "/etc",
    "../x",
    "x/../../y",
    "x/..",
    "./x",
    "x//y",
    "x/",
    "x\0",
    "x" * (MAX_PART + 1),
    "x/" * MAX_STEPS + "x",
]
TARGETS = ["/", "/etc", "/usr", "/proc", "/workspace/x", "/home", "/home/users", "/home/other", "/tmp", "/run", "/dev"]

PLACES = ["/usr/x", "/etc/x", "/run/x/y", "/srv", "/workspace/x"]  # of the system, or too near to it


@pytest.mark.parametrize(
    ("field", "mount"),
    [
        *(("source", replace(PROJECT, source=path)) for path in PATHS),
        *(("target", replace(PROJECT, target=path)) for path in (*PATHS, *TARGETS)),
        *(("kept[1]", replace(PROJECT, kept=("fine", part))) for part in PARTS),
        *(("hidden[1]", replace(HOME, hidden=("fine", part))) for part in PARTS),
        ("kept", replace(PROJECT, kept=("x",) * (MAX_KEPT + 1))),
        ("hidden", replace(HOME, hidden=("x",) * (MAX_HIDDEN + 1))),
        ("hidden", replace(HOME, writable=True)),
        *(("private", replace(PROJECT, private=parts)) for parts in (("x",), (WHOLE,), (".git", "x"), ("..",))),
        *(("private", replace(HOME, private=parts)) for parts in ((WHOLE,), (".ssh",), (WHOLE, ".ssh"))),
        *(("target", Mount(path, path, owner=1)) for path in PLACES),
        *(("target", Mount("/srv/x", path, owner=1, private=(WHOLE,))) for path in PLACES),
        ("target", Mount("/srv/x", "/srv/y", owner=1)),
    ],
    ids=lambda value: None if isinstance(value, Mount) else value,
)
def test_what_leads_elsewhere_is_refused_by_its_name(field: str, mount: Mount) -> None:
    first = Mount("/srv", "/home/user/srv", owner=1)
    with pytest.raises(Fault) as raised:
        check_shape(USER, Shape(mounts=(first, mount)))
    assert (raised.value.kind, raised.value.code) == (Kind.INVALID, "invalid_argument")
    assert raised.value.field == f"mounts[1].{field}"


@pytest.mark.parametrize(
    "targets", [("/workspace", "/workspace"), ("/home/user", "/home/user/x"), ("/home/user/x/y", "/home/user/x")]
)
def test_mounts_lie_apart(targets: tuple[str, str]) -> None:
    with pytest.raises(Fault) as raised:
        check_shape(USER, Shape(mounts=tuple(Mount("/srv", target, owner=1) for target in targets)))
    assert raised.value.field == "mounts[1].target"


def test_there_are_not_too_many() -> None:
    mounts = tuple(Mount("/srv", f"/home/user/{index}", owner=1) for index in range(MAX_MOUNTS + 1))
    assert len(check_shape(USER, Shape(mounts=mounts[:-1])).mounts) == MAX_MOUNTS
    with pytest.raises(Fault) as raised:
        check_shape(USER, Shape(mounts=mounts))
    assert raised.value.field == "mounts"


@needs_root
async def test_a_sessions_shape_is_on_record_and_in_the_audit_log(rig: Rig) -> None:
    wanted = Shape(mounts=(replace(PROJECT, owner=0),), read_only=True, powerless=True)
    session = await rig.create(spec=SessionSpec(shape=wanted))
    shape = (await rig.service.sessions.get(ALICE, session)).shape
    assert shape == replace(wanted, mounts=(replace(PROJECT, owner=ALICE.uid),))
    record = await rig.store.find_session(rig.sandbox_of(session))
    assert record is not None
    assert record.session.shape == shape
    await rig.service.sessions.destroy(ALICE, session)
    await rig.service.close()
    (line,) = [line for line in rig.read_audit() if line["event"] == "session_created"]
    assert line["shape"]["mounts"][0]["source"] == PROJECT.source
    assert line["shape"]["mounts"][0]["owner"] == ALICE.uid


@needs_root
async def test_nothing_is_made_of_what_is_refused(rig: Rig) -> None:
    with fault(Kind.DENIED, "mounts_denied", "mounts"):
        await rig.create(Caller(REMOTE, tenant="t", name="key"), SessionSpec(shape=Shape(mounts=(PROJECT,))))
    with fault(Kind.INVALID, "invalid_argument", "mounts[0].source"):
        await rig.create(spec=SessionSpec(shape=Shape(mounts=(replace(PROJECT, source="/x/../y"),))))
    with fault(Kind.INVALID, "invalid_argument", "more_hosts"):
        await rig.create(spec=SessionSpec(allowed_hosts=[], more_hosts=["a.test"]))
    assert await rig.engine.list() == []


def test_what_the_engine_refuses_to_show_is_said_with_its_hint() -> None:
    problem = translate(MountRefused("mount /", "it is the whole machine", "Name another."), "creating the sandbox")
    assert (problem.kind, problem.code, problem.field) == (Kind.DENIED, "mount_refused", "mounts")
    assert (problem.detail, problem.hint) == ("mount /: it is the whole machine", "Name another.")
