"""Names of objects: valid for Kubernetes whatever a sandbox is called, and never the same for two."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from lightkube.models.meta_v1 import ObjectMeta

from k8e.engine.kubernetes import names

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
IDS = st.one_of(st.text(min_size=1, max_size=80), st.from_regex(r"\A(x-)?[a-z0-9-]{1,60}\Z"))


@given(IDS)
def test_every_id_makes_a_valid_name(sandbox: str) -> None:
    assert LABEL.fullmatch(names.object_name(sandbox))


@given(IDS, IDS)
def test_two_sandboxes_have_two_names(one: str, other: str) -> None:
    assert (names.object_name(one) == names.object_name(other)) == (one == other)


def test_no_id_is_spelled_like_a_digest() -> None:
    strange = names.object_name("Not A Label")
    assert names.object_name(strange.removeprefix("k8e-")) != strange


def test_what_core_calls_a_sandbox_can_be_read_in_its_name() -> None:
    assert names.object_name("0123456789abcdef") == "k8e-0123456789abcdef"


def test_a_gateway_selects_its_own() -> None:
    gateway = names.gateway_label(b"k" * 32)
    assert gateway != names.gateway_label(b"l" * 32)
    assert names.selector(gateway) == f"app.kubernetes.io/managed-by=k8e,k8e.dev/gateway={gateway}"


def test_what_is_set_aside_keeps_its_labels_and_has_no_owner() -> None:
    labels = {**names.labels("0123"), "other": "label"}
    assert names.owns(ObjectMeta(labels=labels), "0123")
    assert not names.owns(ObjectMeta(labels=labels), "4567")
    assert not names.owns(None, "0123")
    test, add = names.disown("a-uid", "0123")
    assert (test["op"], test["path"], test["value"]) == ("test", "/metadata/uid", "a-uid")
    assert (add["op"], add["path"]) == ("add", "/metadata/labels/k8e.dev~1set-aside")
    assert not names.owns(ObjectMeta(labels={**labels, names.KEPT: add["value"]}), "0123")
