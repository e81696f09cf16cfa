"""Runs the suite, a file at a time, with one worker more than the machine has cores: what `make test` does. Tests wait
for processes and sockets so often that the cores would be idle otherwise.

What failed is run once more, alone: machines are shared and noisy, and a test that fails beside others but passes alone
is told apart from one that is broken. Such a test is flaky: the summary names it, and more than a few
files with such tests fail the run (files, because one cause makes many tests of a file fail).
What tests leave behind on the machine (tests/ledger.py) fails the run whatever the second look says.

`run_tests.py --whole FOLDER` does the same with a folder of its own, in one process: its tests share a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache" / "v"
FAILED, LEFT, PASSED = CACHE / "cache" / "lastfailed", CACHE / "k8e" / "leftovers", CACHE / "k8e" / "passed"
WORKERS = min(os.cpu_count() or 2, 8) + 1
FLAKY = 5  # files that may have such tests
AGAIN = 30  # more that failed are broken together: to run them again says nothing new
WHOLE = "--whole"


def run(*arguments: str) -> int:
    for path in (LEFT, PASSED, *([FAILED] if "--last-failed" not in arguments else [])):
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def read(path: Path, missing: list[str]) -> list[str]:
    try:
        found: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return missing
    return list(found)


def read_failed() -> list[str]:
    return read(FAILED, [])


def read_left() -> list[str]:
    return read(LEFT, ["the run ended before it looked"])


def say(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"test: {title}:", *lines, sep="\ntest:   ")


def main(arguments: list[str]) -> int:
    if arguments[:1] == [WHOLE]:
        folder = arguments[1:]
        status = run(*folder, "--tb=short")
    elif arguments:
        return run(*arguments)
    else:
        folder = []
        # In the order of tests/conftest.py: long ones first.
        status = run(f"--numprocesses={WORKERS}", "--dist=loadfile", "--no-loadscope-reorder", "--tb=short")
    failed, left, flaky = read_failed(), read_left(), list[str]()
    if status == 1 and 0 < len(failed) < AGAIN:
        print("\ntest: the failures above, alone:", flush=True)
        status = run(*folder, "--last-failed", "--last-failed-no-failures=none")
        # pytest forgets a failure also when the test is skipped the second time: only one that passed counts as flaky.
        passed = set(read(PASSED, [])) - set(read_failed())
        broken = [test for test in failed if test not in passed]
        flaky = [test for test in failed if test in passed]
        left += read_left()
        failed = broken
    say("broken", failed)
    say("left behind on the machine, which fails the run", left)
    files = {test.partition("::")[0] for test in flaky}
    say(f"flaky, {len(flaky)} in {len(files)} files (failed beside others, passed alone; {FLAKY} files may)", flaky)
    bad = bool(status or failed or left or len(files) > FLAKY)
    print(f"test: {'failed' if bad else 'passed'}: {len(failed)} broken, {len(left)} left behind, {len(flaky)} flaky")
    return (status or 1) if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.shares import settle

    settle(os.environ)  # the second look is at the same things, after midnight too
    sys.exit(main(sys.argv[1:]))
