"""One real cluster for all tests here. `K8E_CLUSTER=FOLDER` takes one that runs already, and lets it run.

A run of a whole folder takes the part of the day (tests/shares.py), so that `.ci/run` has a sixth of these tests, which
wait for pods, and six days have all of them; those with the mark `daily` are always taken. Files that are named are run
whole. What is new or changed counts here as everything else does: after a large change it would be the whole folder.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cluster.build import Components, build_components, default_cache
from k8e.cluster.cluster import Cluster, find_cluster, start_cluster, stop_cluster
from k8e.cluster.place import Place
from tests.kubernetes.kubectl import Kubectl, make_busybox
from tests.shares import current_share

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SECONDS = 600  # for one test: the first one of a module also waits for what the module shares, images and a cluster
_SPENT: defaultdict[str, float] = defaultdict(float)  # seconds, by file


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "daily: taken on every day, whichever part of the tests on a cluster is taken")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS))
    # The second look at failures has its own list, of which a part would be left out.
    if config.getoption("lf") or not any(Path(argument).is_dir() for argument in config.args):
        return
    share, number = current_share(), 0
    taken, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("daily"):
            taken.append(item)
        else:
            (taken if share.has(number) else left).append(item)
            number += 1
    config.hook.pytest_deselected(items=left)
    items[:] = taken


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SPENT[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, seconds in sorted(_SPENT.items(), key=lambda each: -each[1]):
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


def say(text: str) -> None:
    """To the real output: the first build takes minutes, in which pytest would be silent."""
    print(f"cluster: {text}", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def components() -> Components:
    return build_components(default_cache(), say)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Those with Cilium have a cluster of their own, and run when they are named."""
    ours = collection_path.name == "cilium" and collection_path.parent == Path(__file__).parent
    return True if ours and not any("cilium" in argument for argument in config.args) else None


def provide_cluster(request: pytest.FixtureRequest, name: str) -> Iterator[Cluster]:
    if folder := os.environ.get("K8E_CLUSTER"):
        found = find_cluster(Place(Path(folder).resolve()))
        assert found is not None, f"no cluster runs in {folder}"
        found.import_image(make_busybox())
        yield found
        return
    # Not in a temporary folder: so the next run finds and removes what a killed one has left.
    place = Place(ROOT / "build" / name)
    stop_cluster(place)
    started = start_cluster(place, request.getfixturevalue("components"), say)
    try:
        started.import_image(make_busybox())
        yield started
    finally:
        stop_cluster(place)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from provide_cluster(request, "test-cluster")


@pytest.fixture
def kubectl(cluster: Cluster) -> Iterator[Kubectl]:
    """In a namespace of its own, which is removed with all that is in it, a few seconds later."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    found = Kubectl(cluster, namespace)
    found("create", "namespace", namespace)
    found("wait", "--for=create", "serviceaccount/default", "--timeout=60s")
    yield found
    found("delete", "namespace", namespace, "--wait=false")
