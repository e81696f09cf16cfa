"""The examples of the document that the SDKs implement, at a gateway whose sandboxes are pods: the SDKs find it by the
environment, as they do for any gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.machine import Machine
from tests.kubernetes.scenarios.place import Place, in_environment
from tests.sdk.conftest import built
from tests.sdk.test_examples import (
    TestTypeScript,
    test_a_runtime_that_is_not_there_is_said_and_another_works,
    test_average,
    test_hello,
    test_workflow,
)

__all__ = [
    "TestTypeScript",
    "built",
    "test_a_runtime_that_is_not_there_is_said_and_another_works",
    "test_average",
    "test_hello",
    "test_workflow",
]


@pytest.fixture(scope="module")
def machine(cluster_place: Place) -> Iterator[Machine]:
    key = cluster_place.machine.k8e("sandbox-apikey", "create", "examples").json["key"]
    with in_environment({"K8E_SANDBOX_ENDPOINT": cluster_place.endpoint, "K8E_SANDBOX_APIKEY": key}):
        yield cluster_place.machine
