"""Lines of a watch, as a real API server (1.36) sends them."""

from __future__ import annotations

import pytest
from lightkube.resources.core_v1 import Pod

from k8e.engine.kubernetes.api import ApiRefused, ApiUnreadable, VersionGone, read_event

BOOKMARK = (
    '{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"1241",'
    '"creationTimestamp":null},"spec":{"containers":null},"status":{}}}'
)
GONE = (
    '{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",'
    '"message":"too old resource version: 1 (1200)","reason":"Expired","code":410}}'
)
FAILED = '{"type":"ERROR","object":{"kind":"Status","status":"Failure","message":"etcd is away","code":500}}'
ADDED = '{"type":"ADDED","object":{"metadata":{"name":"one","uid":"u","resourceVersion":"7"},"spec":{"containers":[]}}}'


def test_a_bookmark_has_a_version_and_no_pod() -> None:
    event, pod = read_event(BOOKMARK, Pod)
    assert pod.metadata is not None
    assert (event, pod.metadata.resourceVersion, pod.spec) == ("BOOKMARK", "1241", None)


def test_a_version_that_is_too_old_is_an_error_of_its_own() -> None:
    with pytest.raises(VersionGone, match="too old"):
        read_event(GONE, Pod)
    with pytest.raises(ApiRefused, match="etcd is away") as caught:
        read_event(FAILED, Pod)
    assert not isinstance(caught.value, VersionGone)


def test_what_happened_to_a_pod() -> None:
    event, pod = read_event(ADDED, Pod)
    assert pod.metadata is not None
    assert (event, pod.metadata.name) == ("ADDED", "one")


@pytest.mark.parametrize("line", ["", "{", "[]", '{"type":"ADDED"}', '{"type":"ADDED","object":{"metadata":3}}'])
def test_what_cannot_be_read_is_an_error_of_the_api(line: str) -> None:
    with pytest.raises(ApiUnreadable):
        read_event(line, Pod)
