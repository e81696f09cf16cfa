"""Remains of an interrupted build of `k8e/base`, with which the next one goes on: packages that were downloaded, and
the archive that was made of them, once it is complete.

mmdebstrap removes its own directory when it fails, so packages are collected while it runs: apt gives one its name in
the directory of archives after its check sum was right. They are links to the same files, and cost nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from k8e.engine.local.images.store import BOOT, LOCK

_FRESH: Final = 86_400.0  # seconds for which an archive is what a build would make; packages are known by their names


class Unfinished:
    """The files of one build. `recipe` says what it makes."""

    def __init__(self, folder: Path, recipe: Sequence[object]) -> None:
        # What was written before the machine went down may be hollow.
        text = json.dumps([BOOT.read_text(), *recipe])
        self._folder = folder
        self._archive = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.tar"

    @property
    def hook(self) -> str:
        """For mmdebstrap: puts the packages where apt looks for those that it has."""
        archives = '"$1"/var/cache/apt/archives'
        found = f"find {shlex.quote(str(self._folder))} -name '*.deb'"
        return f"mkdir -p {archives} && {found} -exec cp --link -t {archives} {{}} +"

    def collect(self, scratch: Path) -> None:
        """Keeps the packages that mmdebstrap has downloaded below `scratch` by now."""
        for package in scratch.glob("mmdebstrap.*/var/cache/apt/archives/*.deb"):
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # known already; used and removed
                os.link(package, self._folder / package.name)

    def find_archive(self) -> Path | None:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - self._archive.stat().st_mtime < _FRESH:
                return self._archive
        return None

    def keep_archive(self, made: Path) -> Path:
        return made.rename(self._archive)

    def forget(self) -> None:
        for left in self._folder.iterdir():
            if left.name != LOCK:
                left.unlink()


@contextlib.contextmanager
def go_on(folder: Path, recipe: Sequence[object], scratch: Path) -> Iterator[Unfinished]:
    """With the files in `folder`; while another build has those, with an empty directory below `scratch`."""
    with (folder / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            folder = scratch / "building"
            folder.mkdir()
        yield Unfinished(folder, recipe)
