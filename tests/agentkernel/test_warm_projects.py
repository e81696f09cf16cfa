"""Commands that mount the project, in sandboxes that were made before the project was known: as the seed says of the
pool, and with everything that holds for a sandbox that is made on demand."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.house import House
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import Machine, wait_until
from tests.sandboxes import needs_root

pytestmark = needs_root
LOOK = """
import os, sys
sys.path.insert(0, "")
import beside
print(os.getcwd(), beside.word, os.stat("beside.py").st_uid, os.getuid(), sorted(os.listdir("/workspace"))[-1])
open("made", "w").write("from inside")
for attempt in (
    lambda: os.rename(".git", "gone"),
    lambda: os.rename("beside.py", ".git/config"),
    lambda: os.mkdir(".claude/x"),
    lambda: os.link(".git/config", "hard"),
    lambda: os.listdir("/run/k8e-slots"),
):
    try:
        attempt()
    except OSError:
        continue
    print("done, and should not have been")
raise SystemExit(7)
"""


@pytest.fixture(scope="module", params=["gvisor", "native"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with open_machine(request.param, pool="min = 1\nmax = 2") as machine:
        yield machine


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> House:
    tmp_path.chmod(0o755)
    house = House(machine.folder, tmp_path)
    state = house.home / ".local" / "state" / "agentkernel"
    state.mkdir(parents=True)
    (state / "unreachable-docker.io").write_text("no way there")
    house.write(".git/config", "[core]\n")
    house.write("beside.py", "word = 'imported'\n")
    return house


def count_claims(house: House, start: str) -> int:
    command = ("curl", "-s", "--unix-socket", str(house.folder / "r" / "k8e.sock"), "http://localhost/metrics")
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf'k8e_pool_claims_total\{{start="{start}"\}} (\d+)', text)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("mode", ["claude", "codex", "gemini"])
def test_after_prewarm_a_command_in_that_mode_has_its_project_at_once(house: House, mode: str) -> None:
    house.ok("daemon", "prewarm", "--mode", mode, "--count", "1")
    before = count_claims(house, "warm"), count_claims(house, "cold")
    done = house.ak("run", "--compatibility-mode", mode, "python3", "-c", LOOK)
    assert (done.code, done.stdout) == (7, b"/workspace imported 1000 1000 beside.py\n"), done
    assert (count_claims(house, "warm"), count_claims(house, "cold")) == (before[0] + 1, before[1])
    assert (house.project / "made").read_text() == "from inside"
    assert (house.project / "made").stat().st_uid == 0  # the user who typed the command
    assert (house.project / ".git/config").read_text() == "[core]\n"
    assert not (house.project / ".claude").exists(), "what stood in for it is gone when the command is"
    house.ok("daemon", "prewarm", "--mode", mode, "--count", "0")


def test_what_is_typed_again_and_again_is_ready_after_a_while(house: House) -> None:
    """With the home besides, of which not everything is shown."""
    (house.home / ".ssh").mkdir()
    (house.home / ".ssh" / "id_ed25519").write_text("secret")
    (house.home / "note").write_text("from home\n")
    (house.home / "other").mkdir()  # of another project, too
    words = ("run", "--profile", "permissive", "--no-network", "--image", "host")
    script = "cat ~/note; ls -A ~/.ssh; ls; touch ~/new; exit 5"
    for _ in range(2):
        done = house.ak(*words, "sh", "-c", script)
        assert (done.code, done.stdout) == (5, b"from home\nbeside.py\n"), done
    before = count_claims(house, "warm")

    def is_warm() -> bool:
        done = house.ak(*words, "sh", "-c", script, cwd=house.home / "other")
        assert (done.code, done.stdout) == (5, b"from home\n"), done
        return count_claims(house, "warm") == before + 1

    wait_until(is_warm)


def test_what_cannot_be_mounted_is_refused_from_the_pool_too(house: House) -> None:
    house.ok("daemon", "prewarm", "--mode", "claude", "--count", "1")
    (house.project / ".git" / "config").unlink()
    (house.project / ".git").rmdir()
    (house.project / ".git").symlink_to("/etc")
    said = house.refusal("run", "--compatibility-mode", "claude", "true")
    assert "mount_refused" in said
    house.ok("daemon", "prewarm", "--mode", "claude", "--count", "0")


def test_a_daemon_that_is_stopped_leaves_none_running(house: House) -> None:
    """The last of this file: what comes after it has another daemon."""
    house.ok("daemon", "prewarm", "--mode", "codex", "--count", "1")
    sandboxes = house.folder / "s" / "sandboxes"
    assert list(sandboxes.iterdir())
    house.ok("daemon", "stop")
    assert list(sandboxes.iterdir()) == []
