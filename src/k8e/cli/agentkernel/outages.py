"""Registries that could not be reached lately: finding that out takes seconds, which every run on a machine without a
way to them would pay again. A note in the user's state, good for ten minutes; images that were asked for do not look.
"""

from __future__ import annotations

import os
import time

from k8e.cli.agentkernel.plan import state_folder

LASTS = 600.0
LONGEST = 300


def find_outage(image: str) -> str:
    """Why its registry could not be reached, if that is known and recent."""
    path = name_note(image)
    try:
        age = time.time() - os.stat(path).st_mtime
        if not 0 <= age < LASTS:
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST)
    except OSError:
        return ""


def note_outage(image: str, cause: str) -> None:
    path = name_note(image)
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(cause[:LONGEST])
    except OSError:
        pass  # then the next one finds out for itself


def name_note(image: str) -> str:
    first, slash, _ = image.partition("/")
    registry = first if slash and ("." in first or ":" in first) else "docker.io"
    plain = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in registry)
    return os.path.join(state_folder(), f"unreachable-{plain[:100]}")
