"""The table of pods: in whatever order answers, events and lists arrive, it has the newest of each, and says what is
news."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st
from lightkube.models.meta_v1 import ManagedFieldsEntry
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.object_watch import ObjectTable, version_of
from tests.engine.kubernetes.pods import make_pod


def test_what_is_older_is_no_news() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    assert table.put(make_pod(version=5))
    assert table.apply("MODIFIED", make_pod(version=4)) == ""
    assert table.apply("MODIFIED", make_pod(version=6)) == "k8e-one"


def test_a_late_word_about_one_that_is_gone_does_not_bring_it_back() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    table.put(make_pod(version=5))
    assert table.remove("k8e-one", "u1")
    assert table.apply("MODIFIED", make_pod(version=9)) == ""
    assert table.apply("ADDED", make_pod(uid="u2", version=10)) == "k8e-one"


def test_a_table_does_not_grow_with_what_is_gone() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    for number in range(1, 3000):
        pod = make_pod(f"k8e-{number}", f"u{number}", number)
        assert pod.metadata is not None
        pod.metadata.managedFields = [ManagedFieldsEntry(manager="kubelet", fieldsV1={"f:status": {}})]
        assert table.put(pod)
        assert b"kubelet" not in pickle.dumps(pod)
        assert table.remove(f"k8e-{number}", f"u{number}")
    assert len(pickle.dumps(table)) < 100_000
    assert not table.put(make_pod("k8e-2999", "u2999", 4000))


def test_the_end_of_one_is_not_the_end_of_another_of_its_name() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    table.put(make_pod(uid="u2", version=7))
    assert table.apply("DELETED", make_pod(uid="u1", version=8)) == ""
    assert "k8e-one" in table.objects


def test_a_list_tells_what_was_missed() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    table.put(make_pod("k8e-gone", "u1", 3))
    table.put(make_pod("k8e-same", "u2", 4))
    listed = [make_pod("k8e-same", "u2", 4), make_pod("k8e-new", "u3", 8)]
    assert table.replace(listed, 9) == {"k8e-gone", "k8e-new"}
    assert set(table.objects) == {"k8e-same", "k8e-new"}


def test_one_that_was_made_while_a_list_was_on_its_way_is_not_missing() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    table.put(make_pod("k8e-new", "u1", 12))
    assert table.replace([], 11) == set()
    assert set(table.objects) == {"k8e-new"}


def test_bookmarks_are_no_news() -> None:
    table: ObjectTable[Pod] = ObjectTable()
    assert table.apply("BOOKMARK", make_pod(name="", version=40)) == ""
    assert not table.objects


@given(st.permutations(range(1, 8)))
def test_any_order_ends_with_the_newest(versions: list[int]) -> None:
    table: ObjectTable[Pod] = ObjectTable()
    for version in versions:
        table.apply("MODIFIED", make_pod(version=version))
    assert version_of(table.objects["k8e-one"]) == 7


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["put", "gone"])), max_size=12))
def test_a_stream_and_a_list_agree(steps: list[tuple[str, str]]) -> None:
    """However a table came to know of pods, a list afterwards is no news."""
    table, there, version = ObjectTable(), dict[str, str](), 0
    for name, step in steps:
        version += 1
        if step == "put":
            uid = there.setdefault(name, f"{name}{version}")
            table.apply("MODIFIED", make_pod(name, uid, version))
        elif name in there:
            table.apply("DELETED", make_pod(name, there.pop(name), version))
    assert set(table.objects) == set(there)
    assert table.replace(list(table.objects.values()), version) == set()
