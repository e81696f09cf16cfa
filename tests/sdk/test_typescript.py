"""The TypeScript SDK: its own tests (vitest) against a real gateway, and the package as it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.machine import Machine
from tests.sdk.conftest import ENVIRONMENT, RUNTIME, npm

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


@pytest.fixture(scope="module")
def installed(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has the package as npm would publish it."""
    folder = tmp_path_factory.mktemp("project")
    npm("pack", "--ignore-scripts", "--pack-destination", str(folder), env=ENVIRONMENT)
    (package,) = folder.glob("*.tgz")
    (folder / "package.json").write_text('{"private": true}')
    npm("install", "--no-audit", "--no-fund", "--prefer-offline", str(package), env=ENVIRONMENT, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--input-type=module"], 'import { sandboxRun } from "k8e-sandbox-client";'),
        (["--input-type=commonjs"], 'const { sandboxRun } = require("k8e-sandbox-client");'),
    ],
    ids=["import", "require"],
)
def test_the_package_works_where_it_is_installed(
    machine: Machine, installed: Path, words: list[str], code: str
) -> None:
    program = f"{code} sandboxRun('echo hi').then((result) => process.stdout.write(result.stdout));"
    done = subprocess.run(["node", *words, "-e", program], cwd=installed, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\n", "")


def test_the_lock_has_every_package_for_every_platform_and_needs_no_newer_node_than_it_says() -> None:
    """`npm ci` refuses a lock in which an optional package of another platform is missing. That it works here is what
    the `built` fixture shows; here is what it takes elsewhere."""
    packages: dict[str, Any] = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    missing = [
        name
        for package in packages.values()
        for kind in ("dependencies", "optionalDependencies")
        for name in package.get(kind, {})
        if not any(path.endswith(f"node_modules/{name}") for path in packages)
    ]
    assert missing == []
    assert not [path for path, package in packages.items() if "resolved" in package]
    own = json.loads((FOLDER / "package.json").read_text())["engines"]["node"]
    oldest = own.removeprefix(">=")
    ranges = {
        path: package["engines"]["node"] for path, package in packages.items() if "node" in package.get("engines", {})
    }
    program = (
        "const { satisfies } = require(process.argv[1]);"
        "const [oldest, ranges] = JSON.parse(process.argv[2]);"
        "console.log(JSON.stringify(Object.keys(ranges).filter((path) => !satisfies(oldest, ranges[path]))));"
    )
    npm_modules = Path(shutil.which("npm") or "").resolve().parent.parent / "node_modules"
    command = ["node", "-e", program, str(npm_modules / "semver"), json.dumps([oldest, ranges])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
    assert f"Node {oldest.removesuffix('.0')} " in (FOLDER / "README.md").read_text()
