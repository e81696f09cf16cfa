"""The check at the end of every run sees what it is there to see."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k8e.engine.local.layout import Layout
from tests.engine.traces import CGROUPS, LEASES
from tests.leftovers import UNKNOWN, Surroundings, find_leftovers
from tests.sandboxes import needs_root

Start = Callable[[Path], "subprocess.Popen[bytes]"]


def by_its_words(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", "read word", str(folder / "s")], stdin=subprocess.PIPE)


def by_its_environment(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat"], env={**os.environ, "ANY": str(folder)}, stdin=subprocess.PIPE)


def by_where_it_complains(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("wb") as output:
        process = subprocess.Popen(["cat"], env={}, stdin=subprocess.PIPE, stderr=output)
    (folder / "stderr").unlink()
    return process


@pytest.mark.parametrize("start", [by_its_words, by_its_environment, by_where_it_complains])
def test_processes_are_found_by_the_folder_of_their_test(start: Start, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with start(first) as process:
        [found] = find_leftovers({str(first): "who"})
        assert found.startswith(f"who: process {process.pid} ")
        assert find_leftovers({str(second): "other"}) == []
        assert find_leftovers({str(first)[:-1]: "one whose name is the beginning of its"}) == []
    assert find_leftovers({str(first): "who"}) == []


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[str]:
    run("mount", "-t", "tmpfs", "none", folder)
    yield f"mount {folder}"
    run("umount", folder)


@contextlib.contextmanager
def mounted_elsewhere(folder: Path) -> Iterator[str]:
    script = 'mount -t tmpfs none "$1" && cd / && echo ready && exec setsid cat'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield f"mount {folder} (in the namespace of process {process.pid})"


@contextlib.contextmanager
def kept_network(folder: Path) -> Iterator[str]:
    """A network namespace that a file keeps."""
    (folder / "network").touch()
    run("unshare", f"--net={folder}/network", "true")
    yield f"mount {folder}/network"
    run("umount", folder / "network")


@contextlib.contextmanager
def loop_device(folder: Path) -> Iterator[str]:
    with (folder / "image").open("wb") as file:
        file.truncate(1 << 20)
    device = run("losetup", "--find", "--show", folder / "image")
    yield f"loop device {os.path.basename(device)} {folder}/image"
    run("losetup", "--detach", device)


def tag_of(folder: Path) -> str:
    return Layout(folder / "s", folder / "r").tag


@contextlib.contextmanager
def control_group(folder: Path) -> Iterator[str]:
    top = next(top for top in (CGROUPS / "pids", CGROUPS) if top.is_dir())
    group = top / f"k8e-{tag_of(folder)}"
    group.mkdir()
    yield f"control group {group}"
    group.rmdir()


@contextlib.contextmanager
def rules(folder: Path) -> Iterator[str]:
    table = f"k8e_{tag_of(folder)}"
    run("nft", f"add table inet {table}; add set inet {table} live {{ type ipv4_addr; }}")
    yield f"rules {table} (sets: live)"
    run("nft", f"delete table inet {table}")


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[str]:
    ledger = LEASES / "of-no-namespace"  # where no engine looks for its own
    ledger.mkdir(parents=True)
    (ledger / "wire-99998").symlink_to(f"{tag_of(folder)} sandbox")
    yield "lease wire-99998 sandbox"
    (ledger / "wire-99998").unlink()
    ledger.rmdir()


@contextlib.contextmanager
def interface(folder: Path) -> Iterator[str]:
    with lease(folder):
        run("ip", "link", "add", "k8e-99998", "type", "veth", "peer", "name", "k8e-99998p")
        yield "interface k8e-99998"
        run("ip", "link", "del", "k8e-99998")


KINDS = [mounted, mounted_elsewhere, kept_network, loop_device, control_group, rules, lease, interface]


@needs_root
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_is_found_and_its_test_named(
    kind: Callable[[Path], contextlib.AbstractContextManager[str]], tmp_path: Path
) -> None:
    folder, other = tmp_path / "one", tmp_path / "two"
    folder.mkdir()
    (folder / "s").mkdir()
    assert find_leftovers({str(folder): "who"}) == []
    with kind(folder) as what:
        found = find_leftovers({str(folder): "who"})
        assert f"who: {what} ({folder})" in found
        assert find_leftovers({str(other): "other"}) == []
    found = find_leftovers({str(folder): "who"})
    assert found == []


@needs_root
def test_what_carries_no_folder_is_found_when_it_was_not_there_before() -> None:
    before = Surroundings.look()
    run("ip", "link", "add", "k8e-99997", "type", "veth", "peer", "name", "k8e99997p")
    run("ip", "netns", "add", "k8e-of-a-test")
    try:
        found = find_leftovers({}, before)
        assert f"{UNKNOWN}: interface k8e-99997" in found
        assert f"{UNKNOWN}: network namespace k8e-of-a-test" in found
        assert not set(found) & set(find_leftovers({}, Surroundings.look()))
    finally:
        run("ip", "netns", "del", "k8e-of-a-test")
        run("ip", "link", "del", "k8e-99997")
