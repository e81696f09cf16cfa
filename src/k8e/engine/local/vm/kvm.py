"""Remembers that `/dev/kvm` did not work, so that not every daemon waits for it: one that does not work may hang, and
only a boot tells. It is tried again after a day, when the machine has booted, and when what was tried has changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from k8e.damage import Damaged, read_own

_KEPT: Final = 86_400.0
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class KvmFailures:
    """All methods block, for a moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, runtime: str, parts: Sequence[object]) -> str:
        """Returns why it did not work; empty: nothing is known."""
        try:
            kept = json.loads(read_own(self._path(runtime)))
            age = time.time() - float(kept["at"])
            return str(kept["cause"]) if kept["tried"] == self._name(parts) and 0 <= age < _KEPT else ""
        except (OSError, Damaged, ValueError, LookupError, TypeError):
            return ""  # then it is tried

    def remember(self, runtime: str, parts: Sequence[object], cause: str) -> None:
        path = self._path(runtime)
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps({"tried": self._name(parts), "at": time.time(), "cause": cause}))
        partial.chmod(0o600)
        os.replace(partial, path)

    def _path(self, runtime: str) -> Path:
        return self._folder / f"kvm-{runtime}.json"

    def _name(self, parts: Sequence[object]) -> str:
        """Of what was tried, on this boot of the machine."""
        return hashlib.sha256(repr((_BOOT.read_text(), *parts)).encode()).hexdigest()
