"""What a run of the tests has left on the machine. Known by the folders it made, so that whatever else runs here at the
same time, another run of the suite included, is not its business; and by which test made them, to know whom to ask."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.engine.local.layout import Layout
from tests.engine.traces import cgroup_parents, living_processes, mount_points

PATIENCE = 20.0  # the kernel ends processes and lets go of mounts a moment after it was told to


@contextlib.contextmanager
def recorded_folders() -> Iterator[dict[str, str]]:
    """Every temporary folder that is made inside, with the test that made it."""
    made: dict[str, str] = {}
    make = tempfile.mkdtemp

    def make_and_record(*arguments: Any, **options: Any) -> str:
        folder: str = make(*arguments, **options)
        made[folder] = os.environ.get("PYTEST_CURRENT_TEST", "")
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", make_and_record)
        yield made


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def _describe(folder: Path) -> str:
    """All that tells what a process is about: a daemon by its environment, an agent, which has neither that nor a
    command line that would tell, by the file that it writes its complaints to."""
    links = []
    for name in ("cwd", "fd/1", "fd/2"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(folder / name))
    return "\0".join([_read(folder / "cmdline"), _read(folder / "environ"), *links])


def _tables() -> str:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
    return ""


def find_leftovers(folders: dict[str, str]) -> list[str]:
    processes = [(pid, _describe(folder)) for pid, folder in living_processes() if pid != os.getpid()]
    mounts, tables = list(mount_points()), _tables()
    found = []
    for folder, test in folders.items():
        layout = Layout(Path(folder, "s"), Path(folder, "r"))
        left = [
            *(
                f"process {pid} {_read(Path(f'/proc/{pid}/cmdline'))[:200]!r}"
                for pid, text in processes
                if folder in text
            ),
            *(f"mount {point}" for point in mounts if point.startswith(f"{folder}/")),
            *(f"control group {group}" for group in cgroup_parents(layout)),
            *([f"rules k8e_{layout.tag}"] if f"k8e_{layout.tag}\n" in tables else []),
        ]
        found += [f"{test}: {each} ({folder})" for each in left]
    return found


def wait_for_none(folders: dict[str, str]) -> list[str]:
    """What is still there in the end."""
    end = time.monotonic() + PATIENCE
    while (found := find_leftovers(folders)) and time.monotonic() < end:
        time.sleep(0.2)
    return found
