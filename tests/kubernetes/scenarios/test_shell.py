"""A shell in a pod, through the gateway: left, come back to, and there after the daemon was killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes.scenarios.place import ClusterUser, Place, make_user
from tests.scenarios.test_shell import (
    SID,
    test_a_killed_client_leaves_it_running,
    test_a_killed_daemon_leaves_it_running,
    test_is_an_interactive_shell_with_size_environment_and_exit_code,
    test_keys_are_signals_and_jobs_are_controlled,
    test_left_with_the_keys_it_runs_on_and_is_come_back_to,
    test_the_size_follows_the_window,
    window,
)

__all__ = [
    "test_a_killed_client_leaves_it_running",
    "test_a_killed_daemon_leaves_it_running",
    "test_is_an_interactive_shell_with_size_environment_and_exit_code",
    "test_keys_are_signals_and_jobs_are_controlled",
    "test_left_with_the_keys_it_runs_on_and_is_come_back_to",
    "test_the_size_follows_the_window",
    "window",
]


@pytest.fixture(scope="module")
def person(cluster_place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUser]:
    person = make_user(cluster_place, tmp_path_factory.mktemp("home"))
    person.go_through_the_gateway("shells")
    assert person.k8e("sandbox", "create", "--session-id", SID, "--env", "COLOUR=blue").code == 0
    yield person
    person.bring_the_daemon_back()
    assert person.k8e("sandbox", "destroy", SID).code == 0
