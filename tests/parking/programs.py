"""What a program is here: its text, and what it is run with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    code: str
    stdin: bytes | None = None  # None: /dev/null
    cwd: str = ""  # empty: the workspace
    same: bool = True  # False: what it prints differs from run to run, so only how it ends is compared


def topics(**programs: Iterable[str | Program]) -> list[tuple[str, Program]]:
    """With names that say what a failure is about."""
    return [
        (f"{topic}-{number}", one if isinstance(one, Program) else Program(one))
        for topic, several in programs.items()
        for number, one in enumerate(several)
    ]
