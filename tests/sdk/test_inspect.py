"""The sandbox provider for Inspect, by Inspect's own checks: the package as it is installed, with the real Inspect,
which comes from the Python index, once, to build/."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from sandbox_client import SandboxClient
from tests.cli.machine import ROOT, Machine
from tests.engine.tiny_images import busybox_layer
from tests.images.builder import build, entry, link, make_tar, write_layout
from tests.runtimes import do_without
from tests.sdk.conftest import ENVIRONMENT

FOLDER = ROOT / "build" / "inspect"
UV = Path(sys.executable).with_name("uv")
SAME = ("cryptography", "grpcio", "protobuf", "pyyaml", "pytest", "pytest-timeout")  # as here
PACKAGES = ["inspect-ai==0.3.285", *(f"{name}=={version(name)}" for name in SAME)]
CHECKS = 44 + 3  # Inspect's, and ours
APPLETS = ("env", "printf", "sed", "whoami")
# This machine's busybox makes no users.
ADDUSER = b"""#!/bin/sh -e
[ "$1" != --help ] || exit 0
for name; do :; done
echo "$name:x:2000:2000::/home/$name:/bin/sh" >> /etc/passwd
echo "$name:x:2000:" >> /etc/group
mkdir "/home/$name"
chown 2000:2000 "/home/$name"
"""
USERDEL = b"""#!/bin/sh -e
sed -i "/^$2:/d" /etc/passwd /etc/group
rm -r "/home/$2"
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has Inspect, and our package as it would be installed. Two workers do not do it at once."""
    interpreter = FOLDER / "bin" / "python"
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.parent / "inspect.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = FOLDER / "packages"
        if not stamp.exists() or stamp.read_text().split() != PACKAGES:
            run_uv("venv", "-q", "--clear", "--python", sys.executable, str(FOLDER))
            run_uv("pip", "install", "-q", "--python", str(interpreter), *PACKAGES)
            stamp.write_text("\n".join(PACKAGES))
        folder = tmp_path_factory.mktemp("wheel")
        building = ("build", "-q", "--wheel", "--no-build-isolation", "--python", sys.executable)
        run_uv(*building, "--out-dir", str(folder), "sdk/python")
        (wheel,) = folder.glob("*.whl")
        run_uv("pip", "install", "-q", "--no-deps", "--reinstall", "--python", str(interpreter), str(wheel))
    return interpreter


def run_uv(*words: str) -> None:
    done = subprocess.run([UV, *words], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def image(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its default user is not root, as checks of permissions need it, and it has programs that make users."""
    more = make_tar(
        *(link(f"bin/{name}", "busybox") for name in APPLETS),
        entry("usr/bin"),
        link("usr/bin/env", "../../bin/busybox"),
        entry("bin/adduser", ADDUSER, mode=0o755),
        entry("bin/userdel", USERDEL, mode=0o755),
    )
    built = build(busybox_layer(), more, how="plain", config={"User": "worker", "Env": ["PATH=/bin:/usr/bin"]})
    archive = write_layout(tmp_path_factory.mktemp("image") / "checks.tar", built)
    assert machine.k8e("image", "import", str(archive), "--name", "checks:1").code == 0
    return "checks:1"


def start_checks(python: Path, runtime: str, image: str, folder: Path) -> subprocess.Popen[str]:
    folder.mkdir()
    config = json.dumps({"runtime_class": runtime, "image": image})
    env = {**os.environ, "K8E_TEST_SANDBOX": config, "INSPECT_LOG_DIR": str(folder), "INSPECT_DISPLAY": "none"}
    checks = Path(__file__).with_name("inspect_checks.py")
    alone = ("-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}", "--noconftest")
    command = [python, "-m", "pytest", "-q", *alone, "-o", "anyio_mode=auto", "--timeout=200", str(checks)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, cwd=folder, text=True, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.timeout(600)  # the first time with a download
def test_inspects_own_checks_pass(
    machine: Machine, client: SandboxClient, python: Path, image: str, tmp_path: Path
) -> None:
    """On both runtimes at once: most of the time the checks wait."""
    here = {report["runtime"]: report for report in machine.k8e("sandbox", "status").json["runtimes"]}
    usable = [runtime for runtime in ("native", "gvisor") if here[runtime]["available"]]
    with contextlib.ExitStack() as stack:
        running = {}
        for runtime in usable:
            running[runtime] = stack.enter_context(start_checks(python, runtime, image, tmp_path / runtime))
            stack.callback(running[runtime].kill)
        for runtime, checks in running.items():
            said, _ = checks.communicate()
            assert f"{CHECKS} passed" in said, (runtime, said)
            assert checks.returncode == 0, (runtime, said)
    assert [session.session_id for session in client.list_sessions()] == []
    for runtime in here.keys() & {"native", "gvisor"} - set(usable):
        do_without(runtime, here[runtime])
