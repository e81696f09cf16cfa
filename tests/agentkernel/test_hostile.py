"""A repository that wants out: all of it was written by an attacker, and its code runs in a sandbox that mounts it.

What its agentkernel.toml may ask for is in test_alone.py; here is what its code can do to the machine.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agentkernel.house import House, link, list_tree
from tests.agentkernel.repository import CLAUDE, git
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import Done, Machine, wait_until
from tests.sandboxes import needs_root

pytestmark = needs_root


@pytest.fixture(scope="module", params=["gvisor", "native"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with open_machine(request.param) as machine:
        yield machine


@pytest.fixture
def house(machine: Machine, tmp_path: Path) -> Iterator[House]:
    house = House(machine.folder, tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret-zz")
    git(house, "init", "-q", "-b", "main")
    house.write("README", "hello")
    yield house
    house.ak("sandbox", "remove", "cage")


def attack(house: House, script: str) -> Done:
    house.ok("sandbox", "create", "cage", *CLAUDE)
    done = house.run("--session-id", "cage", "--raw", script)
    house.ok("sandbox", "remove", "cage")
    return done


# Each leads git on the machine to a program of the repository's choice.
GIT = {
    "configure a program": "git config core.fsmonitor 'touch /workspace/OWNED'",
    "add to the configuration": "printf '[core]\\n fsmonitor = touch /workspace/OWNED\\n' >> .git/config",
    "replace the configuration": "mv .git/config x; printf '[core]\\n fsmonitor = touch OWNED\\n' > .git/config",
    "replace the repository": "mv .git x; cp -r x .git; printf '[core]\\n fsmonitor = touch OWNED\\n' >> .git/config",
    "remove the repository": "rm -rf .git; git init -q .; git config core.fsmonitor 'touch OWNED'",
    "make a hook": "printf '#!/bin/sh\\ntouch OWNED\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
    "a configuration elsewhere": "mkdir evil; cp -r .git/. evil; echo ../evil > .git/commondir",
    "a worktree's own": "echo x > .git/config.worktree; mkdir -p .git/worktrees/x",
    "mount over it": "mount -t tmpfs x .git; mount --bind /tmp .git",
    "link it": "ln -sfn /workspace/evil .git; ln -sf /workspace/evil .git/config",
}


@pytest.fixture(scope="module")
def once(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One sandbox for all that only tries things."""
    house = House(machine.folder, tmp_path_factory.mktemp("hostile"))
    git(house, "init", "-q", "-b", "main")
    house.write("README", "hello")
    git(house, "add", "README")
    git(house, "commit", "-q", "-m", "first")
    house.ok("sandbox", "create", "tried", *CLAUDE)
    yield house
    house.ok("sandbox", "remove", "tried")


@pytest.mark.parametrize("way", GIT)
def test_git_on_the_machine_runs_nothing_of_it(once: House, way: str) -> None:
    before = list_tree(once.project / ".git")
    done = once.run("--session-id", "tried", "--raw", GIT[way])
    assert done.code is not None
    assert list_tree(once.project / ".git") == before, done
    git(once, "status")
    once.write("README", way)
    git(once, "commit", "-q", "-a", "-m", way)
    assert not (once.project / "OWNED").exists()


def test_a_repository_does_not_come_into_being_where_there_was_none(house: House) -> None:
    subprocess.run(["rm", "-rf", house.project / ".git"], check=True)
    attack(
        house,
        "git init -q .; git config core.fsmonitor 'touch OWNED'; mkdir -p .claude; echo {} > .claude/settings.json",
    )
    assert not (house.project / ".git").exists()
    assert not (house.project / ".claude").exists()


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1), ("no-such-program", 127)])
def test_what_stood_in_for_kept_names_is_gone_when_run_returns(house: House, command: str, code: int) -> None:
    subprocess.run(["rm", "-rf", house.project / ".git"], check=True)
    assert house.ak("run", *CLAUDE, command).code == code
    assert [path.name for path in house.project.iterdir()] == ["README"]


def test_links_lead_nowhere_outside(house: House) -> None:
    link(house.project / "out", str(house.home / "outside"))
    link(house.project / "shadow", "/etc/shadow")
    link(house.project / "up", "../outside/secret")
    done = attack(house, "cat out/secret shadow up ../outside/secret; ls ..; echo owned > out/secret; echo owned > up")
    assert b"secret-zz" not in done.stdout + done.stderr
    assert b"root:" not in done.stdout
    assert (house.home / "outside" / "secret").read_text() == "secret-zz"


def test_files_it_makes_are_the_user_s_and_nobody_is_root_through_them(house: House) -> None:
    attack(house, "cp /bin/sh shell; chmod 4755 shell; chmod 6777 .; mknod disk b 8 0; echo x > made")
    assert (house.project / "made").stat().st_uid == os.geteuid()
    for path in house.project.iterdir():
        if not path.is_dir():
            assert not path.lstat().st_mode & 0o6000, path
    assert not (house.project / "disk").exists()


def test_a_dockerfile_is_nobody_s_to_build(house: House) -> None:
    house.write("Dockerfile", "FROM scratch\nRUN touch /OWNED\n")
    house.write("agentkernel.toml", '[build]\ndockerfile = "Dockerfile"\n')
    assert "[config_refused]" in house.refusal("sandbox", "create", "cage")
    assert "[config_refused]" in house.refusal("sandbox", "create", "cage", "--config", "agentkernel.toml")


def test_a_git_that_is_a_link_is_not_mounted(house: House) -> None:
    subprocess.run(["rm", "-rf", house.project / ".git"], check=True)
    link(house.project / ".git", str(house.home / "outside"))
    said = house.refusal("sandbox", "create", "cage", *CLAUDE)
    assert "[mount_refused]" in said
    assert "hint: Make .git a directory or a file" in said


# A folder that git takes for a repository although there is no .git in it, and what it then runs on `git status`.
BARE = """
mkdir -p {0}/objects {0}/refs
echo 'ref: refs/heads/x' > {0}/HEAD
cat > {0}/config <<END
[core]
repositoryformatversion = 0
bare = false
worktree = .
fsmonitor = "touch OWNED; false"
END
"""


def test_what_runs_by_itself_and_is_new_is_said(house: House) -> None:
    done = house.ak("run", *CLAUDE, "sh", "-c", "echo 'touch OWNED' > .envrc; mkdir -p sub; echo x > plain")
    assert done.code == 0, done
    assert done.stderr.decode() == ("agentkernel: look at it before you use this folder: the command made .envrc\n")
    assert house.ak("run", *CLAUDE, "true").stderr == b""
    again = house.ak("run", *CLAUDE, "sh", "-c", "echo more >> .envrc")
    assert again.code != 0  # it is there now, and kept


def test_what_runs_by_itself_further_down_is_said(house: House) -> None:
    """Whatever the folder is called, also when it was there and is changed, and in no more than a few lines."""
    made = "a/.envrc", "b/c/.vscode", "bare/HEAD", r"d\x1b]0;x\x07\u202e/.git", "linked/.git"
    git(house, "init", "-q", "old")
    (house.project / "linked").mkdir()
    settled = time.time() + 0.1  # what was changed this shortly before may be told, too
    wait_until(lambda: time.time() > settled)
    script = (
        "mkdir -p a b/c/.vscode; echo x > a/.envrc; echo {} > b/c/.vscode/tasks.json;"
        r"""d=$(printf 'd\033]0;x\007\342\200\256'); mkdir -p "$d/.git";"""
        "ln -s /workspace/a linked/.git; ln -s / everything" + BARE.format("bare")
    )
    done = house.ak("run", *CLAUDE, "sh", "-c", script)
    assert done.code == 0, done
    told = "agentkernel: look at it before you go there: the command made or changed "
    assert done.stderr.decode() == f"{told}{', '.join(made)}\n"
    assert house.ak("run", *CLAUDE, "true").stderr == b""
    changed = house.ak("run", *CLAUDE, "sh", "-c", "echo '[core]' >> old/.git/config; echo x >> a/.envrc")
    assert changed.stderr.decode() == f"{told}a/.envrc, old/.git\n"
    many = "for i in $(seq 30); do mkdir -p m/$i/.git; done"
    crowd = house.ak("run", *CLAUDE, "sh", "-c", many).stderr.decode()
    assert crowd.count("\n") == 1
    assert "and 20 more" in crowd


def test_a_repository_without_a_git_folder_is_said_and_is_no_project(house: House) -> None:
    subprocess.run(["rm", "-rf", house.project / ".git"], check=True)
    done = house.ak("run", *CLAUDE, "sh", "-c", BARE.format("."))
    assert "the command made HEAD, objects, refs" in done.stderr.decode()
    git(house, "status")
    assert (house.project / "OWNED").exists(), "which is why"
    assert "[project_refused]" in house.refusal("sandbox", "create", "cage", *CLAUDE)


def test_the_inside_of_a_repository_is_no_project(house: House) -> None:
    inside = house.project / ".git" / "hooks"
    assert "[project_refused]" in house.refusal("sandbox", "create", "cage", *CLAUDE, cwd=inside)
