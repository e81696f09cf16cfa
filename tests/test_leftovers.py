"""The check at the end of every run sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leftovers import find_leftovers, recorded_folders

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
def test_processes_are_found_by_the_folder_of_their_test(start: Start) -> None:
    with recorded_folders() as folders, tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        assert "test_processes_are_found" in folders[first]
        with start(Path(first)) as process:
            [found] = find_leftovers(folders)
            assert f"process {process.pid} " in found
            assert find_leftovers({second: ""}) == []
        assert find_leftovers(folders) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mounts_are_found_too(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        assert find_leftovers({str(tmp_path.parent): "who"}) == [f"who: mount {tmp_path} ({tmp_path.parent})"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert find_leftovers({str(tmp_path.parent): "who"}) == []
