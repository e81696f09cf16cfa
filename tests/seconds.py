"""How long each file of tests takes: a run counts it, and `make seconds` keeps what the last whole run counted.

python -m tests.seconds      build/seconds.json -> tests/seconds.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COUNTED = TESTS.parent / "build" / "seconds.json"
KEPT = TESTS / "seconds.json"
LEAST = 5.0  # what takes less is not worth a line


class Seconds:
    """A pytest plugin: in the process that started the workers it has the reports of all."""

    def __init__(self, config: pytest.Config) -> None:
        # A run of a few files says nothing about the others.
        self._counts = bool(config.getoption("numprocesses", None)) and config.args_source.name != "ARGS"
        self._spent: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._spent[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._counts:
            COUNTED.parent.mkdir(exist_ok=True)
            COUNTED.write_text(json.dumps(self._spent))


def keep() -> None:
    counted: dict[str, float] = json.loads(COUNTED.read_text())
    kept = {name: round(seconds) for name, seconds in sorted(counted.items()) if seconds >= LEAST}
    KEPT.write_text(json.dumps(kept, indent=2) + "\n")
    sys.stdout.write(f"{KEPT}: {len(kept)} files of {len(counted)}, {sum(counted.values()):.0f} s in all\n")


if __name__ == "__main__":
    keep()
