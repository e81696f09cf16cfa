"""Removes what scripts/install.sh has put on this machine for a member: it keeps a list, by which it is found again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from k8e.cluster.programs import USUAL

UNIT: Final = Path("/etc/systemd/system/k8e.service")
VARIABLES: Final = Path("/etc/k8e/cluster.env")  # K8E_URL and K8E_TOKEN of a worker
RECORD: Final = USUAL / "installed"  # a path on each line


def remove_installation() -> list[Path]:
    """Removes what was installed, the programs last; returns what was there."""
    paths = [Path(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    removed = []
    for path in [*paths, USUAL]:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            continue
        removed.append(path)
    return removed
