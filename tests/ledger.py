"""The part of a run that looks for what it has left behind: every process of the run writes down the folders that its
tests make, and the one that started them looks once, when all have ended, one that crashed included. What it finds is
an error of the run, whatever becomes of any test when it is tried again (scripts/run_tests.py)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

KEY = "k8e/leftovers"  # in pytest's cache: a list of texts
PASSED = "k8e/passed"  # tests that ran to their end: one that was skipped did not


class Ledger:
    """A pytest plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path: str = getattr(config, "workerinput", {}).get("ledger", "")
        self._keeps = not self._path
        if self._keeps:
            descriptor, self._path = tempfile.mkstemp(prefix="k8e-ledger-")
            os.close(descriptor)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._patch = pytest.MonkeyPatch()
        self._passed: list[str] = []
        self._record_folders()
        if self._keeps:
            from tests.leftovers import Surroundings

            self._before = Surroundings.look()

    def _record_folders(self) -> None:
        make, make_for_test = tempfile.mkdtemp, pytest.TempPathFactory.mktemp

        def make_and_record(*arguments: Any, **options: Any) -> str:
            folder: str = make(*arguments, **options)
            self._record("made", folder)
            return folder

        def mktemp(factory: pytest.TempPathFactory, basename: str, numbered: bool = True) -> Path:
            folder = make_for_test(factory, basename, numbered)
            self._record("lent", str(folder))  # pytest removes it when it likes
            return folder

        self._patch.setattr(tempfile, "mkdtemp", make_and_record)
        self._patch.setattr(pytest.TempPathFactory, "mktemp", mktemp)

    def _record(self, how: str, folder: str) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        os.write(self._descriptor, f"{how}\t{folder}\t{test or 'before the first test'}\n".encode())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ledger"] = self._path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Inside the terminal's own, so that its closing lines have it."""
        yield
        if not self._keeps:
            return
        found = self._look()
        if cache := getattr(self._config, "cache", None):
            cache.set(KEY, found)
            cache.set(PASSED, self._passed)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        for each in found:
            test = each.partition(": ")[0]
            report = pytest.TestReport(test, (test, None, test), {}, "failed", f"left behind: {each}", "teardown")
            if reporter is not None:
                reporter.stats.setdefault("error", []).append(report)
        if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _look(self) -> list[str]:
        from tests.leftovers import wait_for_none

        rows = [line.split("\t", 2) for line in Path(self._path).read_text().splitlines()]
        folders = {folder: test for _, folder, test in rows}
        found = wait_for_none(folders, self._before)
        kept = [f"{test}: folder {folder}" for how, folder, test in rows if how == "made" and os.path.exists(folder)]
        return found + kept

    def pytest_unconfigure(self) -> None:
        self._patch.undo()
        os.close(self._descriptor)
        if self._keeps:
            os.unlink(self._path)
