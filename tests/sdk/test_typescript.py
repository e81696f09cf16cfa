"""The TypeScript SDK: its own tests (vitest) against a real gateway, and both builds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.machine import Machine
from tests.sdk.conftest import RUNTIME, npm

FOLDER = Path(__file__).resolve().parent.parent.parent / "sdk" / "typescript"

pytestmark = [pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here"), pytest.mark.usefixtures("built")]


def test_its_own_tests_pass_against_a_real_gateway(machine: Machine, admin: tuple[str, str], tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    reporters = ("--reporter=default", "--reporter=json", f"--outputFile={report_file}")
    boss = {"K8E_TEST_ENDPOINT": admin[0], "K8E_TEST_ADMIN_KEY": admin[1]}
    npm("test", "--", *reporters, env={**os.environ, "K8E_TEST_RUNTIME": RUNTIME, **boss})
    report = json.loads(report_file.read_text())
    assert report["numFailedTests"] == 0
    assert report["numPassedTests"] > 50


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--input-type=module"], 'import { sandboxRun } from "k8e-sandbox-client";'),
        (["--input-type=commonjs"], 'const { sandboxRun } = require("k8e-sandbox-client");'),
    ],
    ids=["import", "require"],
)
def test_both_builds_work(machine: Machine, tmp_path: Path, words: list[str], code: str) -> None:
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "k8e-sandbox-client").symlink_to(FOLDER)
    program = f"{code} sandboxRun('echo hi').then((result) => process.stdout.write(result.stdout));"
    done = subprocess.run(["node", *words, "-e", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\n", "")
