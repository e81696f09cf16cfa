"""A user who is not root: what they mount is theirs, with their rights, and their secrets stay outside."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.machine import ROOT, Done, Machine, make_folder
from tests.engine.answers import plant_answers
from tests.sandboxes import needs_root
from tests.scenarios.user import clear_machine

pytestmark = needs_root
ANN, BOB = 54_321, 54_322
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With a copy of our source that all users can read, and a socket that all users can use."""
    if not os.access(PYTHON, os.X_OK):
        pytest.skip("no Python that others can run")
    with make_folder() as folder:
        (folder / "k8e.toml").write_text('[pool]\nenabled = false\n[gateway]\nlisten = ""\n')
        for room in ("cli", "profiles", "policy"):
            shutil.copytree(ROOT / "src" / "k8e" / room, folder / "lib" / "k8e" / room)
        shutil.copy(ROOT / "src" / "k8e" / "errors.py", folder / "lib" / "k8e")
        (folder / "lib" / "k8e" / "__init__.py").touch()
        plant_answers(folder / "s", folder)
        machine = Machine(folder, folder)
        try:
            machine.k8e("sandbox", "sessions")
            (folder / "r" / "k8e.sock").chmod(0o666)
            for uid in (ANN, BOB):
                make_home(folder, uid)
            yield machine
        finally:
            clear_machine(machine)


def make_home(folder: Path, uid: int) -> None:
    for name, content in {"work/hello.txt": f"of {uid}", ".ssh/id_rsa": "key-zz", "notes.txt": "notes"}.items():
        path = folder / str(uid) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for path in (folder / str(uid), *(folder / str(uid)).rglob("*")):
        os.chown(path, uid, uid)
        path.chmod(0o700 if path.is_dir() else 0o600)


def types(machine: Machine, uid: int, *words: str, cwd: Path | None = None) -> Done:
    home = machine.folder / str(uid)
    done = subprocess.run(
        [PYTHON, "-c", "import sys; from k8e.cli.agentkernel import main; sys.exit(main())", *words],
        env={**machine.env, "HOME": str(home), "PYTHONPATH": str(machine.folder / "lib")},
        cwd=cwd or home / "work",
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)


RUN = ("run", "--image", "host", "--no-network")


def test_the_project_is_theirs_and_so_is_what_is_made_in_it(machine: Machine) -> None:
    script = (
        "cat hello.txt; echo made > made; ls -A /home/user/.ssh; cat /home/user/notes.txt; cat /home/user/.ssh/id_rsa"
    )
    done = types(machine, ANN, *RUN, "--profile", "permissive", "sh", "-c", script)
    assert done.stdout == f"of {ANN}notes".encode(), done
    assert b"key-zz" not in done.stderr
    made = machine.folder / str(ANN) / "work" / "made"
    assert (made.read_text(), made.stat().st_uid, made.stat().st_gid) == ("made\n", ANN, ANN)


def test_sandboxes_of_one_are_nobody_else_s(machine: Machine) -> None:
    assert types(machine, ANN, "sandbox", "create", "mine", "--image", "host", "--no-network").code == 0
    try:
        assert b"mine" not in types(machine, BOB, "sandbox", "list").stdout
        for words in (("sandbox", "remove", "mine"), ("sandbox", "stop", "mine"), ("exec", "mine", "true")):
            refused = types(machine, BOB, *words)
            assert refused.code in (1, 125), refused
            assert b"not_found]" in refused.stderr
        assert b"mine" in types(machine, ANN, "sandbox", "list").stdout
    finally:
        assert types(machine, ANN, "sandbox", "remove", "mine").code == 0


def test_a_folder_that_they_cannot_read_is_not_read_for_them(machine: Machine) -> None:
    """The working directory of a process can be one that its user may not enter any more."""
    theirs = machine.folder / "closed"
    (theirs / "project").mkdir(parents=True)
    (theirs / "project" / "secret").write_text("secret-zz")
    theirs.chmod(0o755)
    (theirs / "project").chmod(0o711)
    done = types(machine, BOB, *RUN, "--compatibility-mode", "claude", "cat", "secret", cwd=theirs / "project")
    assert done.code != 0
    assert b"secret-zz" not in done.stdout + done.stderr


def test_stopping_the_daemon_and_reading_its_log_is_root_s(machine: Machine) -> None:
    stopped = types(machine, ANN, "daemon", "stop")
    assert (stopped.code, b"[needs_root]" in stopped.stderr) == (1, True)
    log = types(machine, ANN, "audit")
    assert (log.code, b"[needs_root]" in log.stderr) == (1, True)
    told = types(machine, ANN, "daemon", "status")
    assert (told.code, told.stdout) == (0, b"")
