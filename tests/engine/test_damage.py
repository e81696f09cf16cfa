"""The engine's own files: whatever is in such a file, it is what was saved or it is Damaged, and nothing else comes of
it. With a daemon around it: tests/scenarios/test_damage.py."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k8e.damage import KEPT, Damaged, Damages, list_damaged, own_directory, read_own
from k8e.engine import EngineError, Place
from k8e.engine.local import LocalEngine
from k8e.engine.local.images.records import StoredImage, StoredLayer
from k8e.engine.local.images.store import Store
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.placeholders import remove_placeholders
from k8e.engine.local.network.record import EgressRecord
from k8e.engine.local.record import Record
from k8e.engine.local.roots.image_root import load_place, save_place
from k8e.link.model import Identity
from tests.ways import WAYS

LAYER: Final = "a" * 64
DIGEST: Final = "b" * 64
RECORD: Final = Record("native", "host", "00" * 16, 3, "sandbox", sources=(1, 2), slots=("/workspace",))
PLACE: Final = Place(Identity(1000, 1000), b"/home/user", b"/workspace", ((b"A", b"1"),))
IMAGE: Final = StoredImage(f"sha256:{DIGEST}", (LAYER,), (("A", "1"),), made=1.0)


def save_record(path: Path) -> None:
    RECORD.save(path)


def save_hosts(path: Path) -> None:
    EgressRecord(("a.test", "*.b.test"), ((7, ("a.test",)),)).save(path)


def save_the_place(path: Path) -> None:
    save_place(path, PLACE)


def save_image(path: Path) -> None:
    path.write_text(json.dumps(asdict(IMAGE)))


KINDS: Final[dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]]] = {
    "record": (save_record, Record.load),
    "hosts": (save_hosts, EgressRecord.load),
    "place": (save_the_place, load_place),
    "image": (save_image, StoredImage.load),
}
KIND: Final = pytest.mark.parametrize("kind", KINDS)
CHEAP: Final = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@KIND
@CHEAP
@given(content=st.binary(max_size=200))
def test_anything_at_all_is_damaged(kind: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(Damaged):
        KINDS[kind][1](path)


@KIND
@CHEAP
@given(data=st.data())
def test_what_was_saved_with_one_value_replaced_is_read_or_damaged(
    kind: str, data: st.DataObject, tmp_path: Path
) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file"
    save(path)
    assert load(path) == load(path)
    fields = json.loads(path.read_text())
    name = data.draw(st.sampled_from(sorted(fields)))
    if data.draw(st.booleans()):
        fields[name] = data.draw(JSON)
    else:
        del fields[name]
    path.write_text(json.dumps(fields))
    try:
        load(path)
    except Damaged:
        pass


@KIND
@CHEAP
@given(size=st.floats(0, 1, exclude_max=True))
def test_what_is_cut_is_damaged(kind: str, size: float, tmp_path: Path) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file"
    save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * size)])
    with pytest.raises(Damaged):
        load(path)


def test_only_a_file_that_is_ours_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        read_own(path)
    path.write_bytes(b"x")
    assert read_own(path) == b"x"
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ""):
        with pytest.raises(Damaged):
            read_own(tmp_path / name)
    if os.geteuid() == 0:
        os.chown(path, 54_321, 54_321)
        with pytest.raises(Damaged, match="belongs to user 54321"):
            read_own(path)


def test_a_device_stays_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not set aside"):
        Damages(tmp_path).set_aside(Path("/dev/full"), "it is no regular file")
    assert Path("/dev/full").is_char_device()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@KIND
def test_a_machine_without_descriptors_says_nothing_of_a_file(kind: str, tmp_path: Path) -> None:
    save, load = KINDS[kind]
    path = tmp_path / "file"
    save(path)
    with without_descriptors(), pytest.raises(OSError, match="Too many open files"):
        load(path)
    load(path)


def test_without_descriptors_too_what_is_set_aside_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{")
    damages = Damages(tmp_path)
    with without_descriptors():
        damages.set_aside(tmp_path / "file", "it is half")
    (told,) = damages.take()
    assert Path(told.aside).read_text() == "{"


def test_what_cannot_be_moved_stays(tmp_path: Path) -> None:
    name = tmp_path / ("x" * 250)  # with the time before it that is too long
    for path in (name, name.with_name("y" * 250)):
        path.mkdir() if path == name else path.write_text("precious")
        damages = Damages(tmp_path)
        with pytest.raises(OSError, match="too long"):
            damages.set_aside(path, "it is no record")
        assert path.exists()
        assert not damages.take()


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is on the same filesystem")
        yield Path(folder)


def test_what_is_on_another_disk_is_kept_if_it_is_of_the_state(tmp_path: Path, other_disk: Path) -> None:
    (tmp_path / "images").symlink_to(other_disk)
    damages = Damages(tmp_path)
    for name, content in {"file": None, "folder": "inner"}.items():
        path = tmp_path / "images" / name
        path.mkdir() if content else path.write_text("precious")
        (path / "inner").write_text("precious") if content else None
        damages.set_aside(path, "it is no image")
        (told,) = damages.take()
        assert (Path(told.aside) / (content or "")).read_text() == "precious"
        assert not path.exists()
    os.mkfifo(tmp_path / "images" / "pipe")
    (other_disk / "of-a-run").write_text("x")
    for path in (tmp_path / "images" / "pipe", other_disk / "of-a-run"):
        damages.set_aside(path, "nothing is lost with it")
        assert not path.exists()
        assert [each.aside for each in damages.take()] == [""]


@pytest.mark.parametrize("way", ["garbage", "unreadable", "pipe"])
def test_something_in_the_place_of_what_was_set_aside_goes_there_too(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "damaged"
    folder.write_text("x")
    WAYS[way](folder)
    (tmp_path / "file").write_text("{")
    damages = Damages(tmp_path)
    damages.set_aside(tmp_path / "file", "it is half")
    strange, told = damages.take()
    assert "in the place of damaged/" in strange.cause
    assert os.path.lexists(strange.aside)
    assert Path(told.aside).read_text() == "{"
    assert len(list_damaged(tmp_path)) == 2


def test_a_directory_on_another_disk_stays_linked(tmp_path: Path) -> None:
    (tmp_path / "bigger").mkdir()
    (tmp_path / "bigger" / "image").write_text("precious")
    (tmp_path / "images").symlink_to("bigger")
    damages = Damages(tmp_path)
    own_directory(tmp_path / "images", 0o700, damages)
    assert (tmp_path / "images" / "image").read_text() == "precious"
    assert not damages.take()
    (tmp_path / "broken").symlink_to("broken")
    own_directory(tmp_path / "broken", 0o700, damages)
    assert [each.path for each in damages.take()] == [str(tmp_path / "broken")]


def test_sandboxes_behind_a_link_are_refused_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "sandboxes").symlink_to(tmp_path / "not-mounted-yet")
    with pytest.raises(EngineError, match="is a link") as refused:
        LocalEngine(tmp_path / "state", tmp_path / "run")
    assert "mount" in refused.value.hint
    assert (tmp_path / "state" / "sandboxes").is_symlink()


def test_what_is_set_aside_is_told_once_and_the_oldest_goes(tmp_path: Path) -> None:
    damages = Damages(tmp_path)
    for number in range(KEPT + 5):
        path = tmp_path / "sandboxes" / f"s{number}" / "sandbox.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")
        damages.set_aside(path, "it is half")
        assert not path.exists()
    told = damages.take()
    assert len(told) == KEPT + 5
    assert (told[0].path, told[0].cause) == (str(tmp_path / "sandboxes" / "s0" / "sandbox.json"), "it is half")
    assert damages.take() == []
    assert len(list_damaged(tmp_path)) == KEPT
    assert Path(told[-1].aside).read_text() == "{"


@pytest.mark.parametrize("content", ["", "[", "[[1, 2]]", '[["/x", "y", "z"]]', "5", '{"a": 1}', "null"])
def test_damaged_notes_of_placeholders_do_not_keep_a_sandbox_from_being_removed(tmp_path: Path, content: str) -> None:
    paths = SandboxPaths(tmp_path / "sandboxes" / "s")
    paths.top.mkdir(parents=True)
    paths.placeholders.write_text(content)
    damages = Damages(tmp_path)
    remove_placeholders(paths, damages)
    assert not paths.placeholders.exists()
    assert [each.path for each in damages.take()] == [str(paths.placeholders)]


@pytest.mark.parametrize("which", ["image", "layer"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"size": 1}', "null"])
def test_a_damaged_record_costs_its_image_and_no_other(tmp_path: Path, which: str, content: str) -> None:
    layout = Layout(tmp_path / "s", tmp_path / "r")
    damages = Damages(layout.state)
    store = Store(layout, fresh=0, damages=damages)
    store.prepare()
    other, other_layer = "c" * 64, "d" * 64
    for digest, layer in ((DIGEST, LAYER), (other, other_layer)):
        record = StoredImage(f"sha256:{digest}", (layer,), made=1.0)
        (layout.oci / "images" / f"{digest}.json").write_text(json.dumps(asdict(record)))
        (layout.oci / "layers" / f"{layer}.json").write_text(json.dumps(asdict(StoredLayer(1, 1, False, "boot"))))
        (layout.layers / layer).mkdir()
    broken = layout.oci / "images" / f"{DIGEST}.json" if which == "image" else layout.oci / "layers" / f"{LAYER}.json"
    broken.write_text(content)
    # A sandbox that runs is made of it: its layers stay, though no record names them any more.
    sandbox = layout.sandbox("s")
    sandbox.top.mkdir(parents=True)
    Record("native", f"sha256:{DIGEST}", "00" * 16, None, "sandbox").save(sandbox.record)
    store.clean()
    assert [image.digest for image in store.list()] == [f"sha256:{other}"]
    assert store.find(f"sha256:{DIGEST}") is None
    assert str(broken) in [each.path for each in damages.take()]
    store.retain([f"sha256:{other}"])
    assert store.has_layer(LAYER)
    assert store.has_layer(other_layer)
