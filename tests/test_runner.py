"""scripts/test itself, on small suites that fail in known ways."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CONFTEST = """
from tests import leftovers
from tests.ledger import Ledger
leftovers.PATIENCE = 0.5  # nothing here goes away by itself
def pytest_configure(config):
    config.pluginmanager.register(Ledger(config))
"""
HEAD = """
import os, signal, subprocess, tempfile, time
from pathlib import Path
import pytest
"""
GOOD = "def test_good(): pass\n"
BROKEN = "def test_broken(): assert False, 'always'\n"
# Fails beside others, where a worker runs it, and passes alone.
FLAKY = "def test_flaky{}(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
SHY = "def test_shy(): 'PYTEST_XDIST_WORKER' in os.environ or pytest.skip('alone'); assert False\n"
# The first look has it, and the test passes both times.
LEAKING = """
def test_leaking(tmp_path):
    if 'PYTEST_XDIST_WORKER' in os.environ:
        process = subprocess.Popen(['sleep', '1000'], env={'WHO': str(tmp_path)}, start_new_session=True)
        Path(os.environ['PIDS']).write_text(str(process.pid))
"""
DISTURBING = """
from tests import leftovers
leftovers.wait_for_none = None
def test_disturbing(): assert 'PYTEST_XDIST_WORKER' not in os.environ
"""
# Fails once, wherever it runs.
FIRST = """
def test_first():
    mark = Path(os.environ['PLACE'], 'seen')
    seen = mark.exists()
    mark.touch()
    assert seen and 'PYTEST_XDIST_WORKER' not in os.environ
"""
UNTIDY = "def test_untidy(): tempfile.mkdtemp(prefix='k8e-untidy-', dir=os.environ['PLACE'])\n"
CRASHING = """
def test_crashing(tmp_path):
    if not os.path.exists(os.environ['PIDS']):
        process = subprocess.Popen(['sleep', '1000'], env={'WHO': str(tmp_path)}, start_new_session=True)
        Path(os.environ['PIDS']).write_text(str(process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Suite:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("scripts", "tests"):
            (folder / name).mkdir()
        for name in ("scripts/test", "scripts/run_tests.py"):
            shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\naddopts = ["-ra"]\n')
        (folder / "tests" / "conftest.py").write_text(CONFTEST)

    def run(self, *tests: str, folder: str = "") -> tuple[int, str]:
        (self.folder / "tests" / folder).mkdir(exist_ok=True)
        for number, content in enumerate(tests):
            (self.folder / "tests" / folder / f"test_{number}.py").write_text(HEAD + content)
        pids = self.folder / "pids"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "K8E_"))}
        own = {"PYTHONPATH": str(ROOT), "PIDS": str(pids), "PLACE": str(self.folder)}
        command = [str(self.folder / "scripts" / "test"), *(["--whole", f"tests/{folder}"] if folder else [])]
        try:
            done = subprocess.run(command, env=environment | own, capture_output=True, text=True, timeout=200)
        finally:
            if pids.exists():
                os.kill(int(pids.read_text()), 9)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_a_good_suite_passes_once(suite: Suite) -> None:
    status, output = suite.run(GOOD)
    assert status == 0, output
    assert output.splitlines()[-1] == "test: passed: 0 broken, 0 left behind, 0 flaky"
    assert output.count("1 passed") == 1


def test_a_broken_test_fails_the_run_and_is_named(suite: Suite) -> None:
    status, output = suite.run(GOOD, BROKEN)
    assert status == 1, output
    assert "test: broken:\ntest:   tests/test_1.py::test_broken\n" in output
    assert output.splitlines()[-1] == "test: failed: 1 broken, 0 left behind, 0 flaky"


@pytest.mark.parametrize(("many", "status"), [(1, 0), (5, 0), (6, 1)])
def test_files_with_flaky_tests_are_named_and_few(suite: Suite, many: int, status: int) -> None:
    found, output = suite.run(GOOD, *(FLAKY.format("") + FLAKY.format("_too") for _ in range(many)))
    assert found == status, output
    assert f"test: flaky, {2 * many} in {many} files " in output
    for number in range(many):
        assert f"test:   tests/test_{number + 1}.py::test_flaky_too\n" in output
    verdict = "failed" if status else "passed"
    assert output.splitlines()[-1] == f"test: {verdict}: 0 broken, 0 left behind, {2 * many} flaky"


def test_a_leak_fails_the_run_though_every_test_passed(suite: Suite) -> None:
    status, output = suite.run(GOOD, LEAKING)
    assert status == 1, output
    assert "2 passed, 1 error" in output, "pytest's own closing line has it"
    assert "test:   tests/test_1.py::test_leaking: process " in output
    assert output.splitlines()[-1] == "test: failed: 0 broken, 1 left behind, 0 flaky"


def test_a_leak_is_not_forgiven_with_the_test_that_failed_beside_it(suite: Suite) -> None:
    status, output = suite.run(LEAKING, FLAKY.format(""))
    assert status == 1, output
    assert "test: flaky, 1 in 1 files " in output
    assert "test:   tests/test_0.py::test_leaking: process " in output


def test_a_worker_that_died_is_looked_after(suite: Suite) -> None:
    status, output = suite.run(GOOD, CRASHING)
    assert status == 1, output
    assert "test:   tests/test_1.py::test_crashing: process " in output


def test_a_folder_that_was_not_removed_fails_the_run(suite: Suite) -> None:
    status, output = suite.run(UNTIDY)
    assert status == 1, output
    assert f"test:   tests/test_0.py::test_untidy: folder {suite.folder}/k8e-untidy-" in output


def test_a_run_that_ends_before_it_looked_has_failed(suite: Suite) -> None:
    status, output = suite.run(DISTURBING)
    assert status == 1, output
    assert "the run ended before it looked" in output


def test_one_that_failed_and_is_skipped_alone_is_broken(suite: Suite) -> None:
    status, text = suite.run(GOOD, SHY)
    assert status != 0, text
    assert "1 broken, 0 left behind, 0 flaky" in text


def test_a_folder_of_its_own_is_run_in_one_process_and_looked_at_twice(suite: Suite) -> None:
    (suite.folder / "tests" / "test_other.py").write_text(HEAD + BROKEN)
    status, text = suite.run(GOOD, FIRST, folder="cluster")
    assert status == 0, text
    assert "test:   tests/cluster/test_1.py::test_first" in text
    assert text.splitlines()[-1] == "test: passed: 0 broken, 0 left behind, 1 flaky"
    status, text = suite.run(GOOD, BROKEN, UNTIDY, folder="cluster")
    assert status == 1, text
    assert text.splitlines()[-1] == "test: failed: 1 broken, 1 left behind, 0 flaky"
