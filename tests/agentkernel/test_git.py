"""git in a sandbox that has the project: it works inside, the machine's repository does not change, and commits come
back when the user asks for them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.agentkernel.house import AGENTKERNEL, House
from tests.agentkernel.repository import CLAUDE, git, look, make_repository
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import Machine, wait_until
from tests.sandboxes import needs_root
from tests.sdk.conftest import stop

pytestmark = needs_root
RUN = ("run", *CLAUDE, "sh", "-ec")
STRICT = ("--image", "host", "--compatibility-mode", "codex", "--no-network")  # its root is read-only
COMMIT = "echo more >> README; git commit -qam 'from inside'; git log -1 --format='%an <%ae>'"


@pytest.fixture(scope="module", params=["gvisor", "native"])
def either(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with open_machine(request.param) as machine:
        yield machine


@pytest.fixture(scope="module")
def native() -> Iterator[Machine]:
    with open_machine("native") as machine:
        yield machine


def enter(machine: Machine, home: Path) -> House:
    house = House(machine.folder, home)
    make_repository(house)
    (home / ".gitconfig").write_text('[user]\n\tname = "Ann O\'Nym"\n\temail = ann@example.com\n')
    return house


@pytest.fixture
def house(native: Machine, tmp_path: Path) -> House:
    return enter(native, tmp_path)


def find_name(said: bytes) -> str:
    """The sandbox of which `run` says that it has committed."""
    found = re.search(rb"agentkernel git pull ([\w-]+) brings that here\n", said)
    assert found is not None, said
    return found[1].decode()


def test_commits_of_a_run_come_back_when_the_user_asks(either: Machine, tmp_path: Path) -> None:
    house = enter(either, tmp_path)
    git_dir = house.project / ".git"
    before = look(git_dir)
    more = "git checkout -qb branch; git commit -q --allow-empty -m two; git tag v1; echo s >> README; git stash -q"
    # diff-files names what git would have to read again: nothing, although owners and inodes are others inside.
    done = house.ak(*RUN, f"git diff-files --name-only; {COMMIT}; {more}")
    assert (done.code, done.stdout) == (0, b"Ann O'Nym <ann@example.com>\n"), done
    name = find_name(done.stderr)
    assert b"it committed (branch, main, stash, tags/v1)" in done.stderr
    assert look(git_dir) == before, "until the user asks"
    shown = house.object("git", "pull", name)
    refs = {each["ref"]: each["commit"] for each in shown["refs"]}
    below = f"refs/k8e/{name}"
    assert set(refs) == {f"{below}/heads/branch", f"{below}/heads/main", f"{below}/stash", f"{below}/tags/v1"}
    assert git(house, "log", "--format=%s", f"{below}/heads/branch").split("\n")[:2] == ["two", "from inside"]
    after = look(git_dir)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert all(path.startswith(("objects", "refs/k8e")) or path == "refs" for path in changed), changed
    git(house, "fsck", "--strict")
    git(house, "merge", "-q", "--ff-only", "--autostash", f"{below}/heads/main")
    assert git(house, "log", "-1", "--format=%s").strip() == "from inside"
    said = house.refusal("git", "pull", name)
    assert "[sandbox_not_found]" in said, "it was brought back, and the sandbox is gone"
    assert f"its commits were brought here before: git for-each-ref {below}\n" in said


def test_a_sandbox_that_lasts_keeps_its_repository(either: Machine, tmp_path: Path) -> None:
    house = enter(either, tmp_path)
    before = look(house.project / ".git")
    kept = house.ak("run", "--keep", *CLAUDE, "sh", "-ec", COMMIT)
    name = find_name(kept.stderr)
    house.ok("exec", name, "git", "checkout", "-q", "-b", "second")
    house.ok("sandbox", "stop", name)
    assert "agentkernel sandbox start" in house.refusal("git", "pull", name)
    house.ok("sandbox", "start", name)
    assert house.ok("exec", name, "git", "branch", "--show-current") == "second\n"
    house.ok("exec", name, "sh", "-ec", "git commit -q --allow-empty -m third")
    assert look(house.project / ".git") == before
    said = house.ok("git", "pull", name)
    assert [line.split()[1] for line in said.splitlines()] == [
        f"refs/k8e/{name}/heads/main",
        f"refs/k8e/{name}/heads/second",
    ]
    house.ok("exec", name, "sh", "-ec", "git commit -q --amend --allow-empty -m fourth")
    house.ok("git", "pull", name)
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{name}/heads/second") == "fourth\n"
    house.ok("sandbox", "remove", name)
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{name}/heads/second") == "fourth\n"


def test_a_run_that_commits_nothing_says_nothing(house: House) -> None:
    (house.project / ".git" / "config").write_text(
        (house.project / ".git" / "config").read_text()
        + '[remote "origin"]\n\turl = https://ann:pa55@example.com/x.git\n'
        + '[http "https://example.com/"]\n\textraheader = AUTHORIZATION: basic c2VjcmV0\n'
    )
    module = house.write(".git/modules/m/config", "[http] extraheader = AUTHORIZATION: basic c2VjcmV0\n")
    done = house.ak(*RUN, "git status --short; git remote get-url origin; cat .git/config .git/modules/m/config")
    assert b"c2VjcmV0" in module.read_bytes(), "the machine's own stays"
    assert done.code == 0
    assert done.stderr == b"", done
    assert done.stdout.startswith(b"https://example.com/x.git\n")
    assert b"pa55" not in done.stdout
    assert b"c2VjcmV0" not in done.stdout
    again = house.ak("run", *CLAUDE, "sh", "-c", "exit 7")
    assert (again.code, again.stderr) == (7, b"")


def test_a_detached_head_and_a_new_repository_come_back(house: House) -> None:
    done = house.ak(*RUN, "git checkout -q --detach; git commit -q --allow-empty -m detached")
    name = find_name(done.stderr)
    house.ok("git", "pull", name)
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{name}/HEAD") == "detached\n"
    empty = house.home / "empty"
    empty.mkdir()
    author = "git config user.name x; git config user.email x@x"
    done = house.ak(*RUN, f"git init -q -b new; {author}; echo 1 > a; git add a; git commit -qm one", cwd=empty)
    name = find_name(done.stderr)
    assert not (empty / ".git").exists() or not any((empty / ".git").iterdir())
    said = house.refusal("git", "pull", name, cwd=empty)
    assert "[git_no_repository]" in said
    git(house, "init", "-q", cwd=empty)
    house.ok("git", "pull", name, cwd=empty)
    assert git(house, "show", f"refs/k8e/{name}/heads/new:a", cwd=empty) == "1\n"


def test_linked_worktrees_and_submodules_work(either: Machine, tmp_path: Path) -> None:
    house = enter(either, tmp_path)
    tree = house.home / "tree"
    git(house, "worktree", "add", "-q", "-b", "linked", str(tree))
    before = look(house.project / ".git")
    script = f"{COMMIT}; git worktree list | wc -l; git status --short; cat /workspace/README"
    done = house.ak(*RUN, script, cwd=tree)
    assert done.stdout == b"Ann O'Nym <ann@example.com>\n2\nhello\nmore\n", done
    name = find_name(done.stderr)
    assert look(house.project / ".git") == before
    (tree / "README").write_text("hello\n")
    house.ok("git", "pull", name, cwd=tree)
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{name}/heads/linked") == "from inside\n"
    done = house.ak(*RUN, "git checkout -q --detach; git commit -q --allow-empty -m detached", cwd=tree)
    name = find_name(done.stderr)
    house.ok("git", "pull", name, cwd=tree)
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{name}/HEAD") == "detached\n"
    library = house.home / "library"
    git(house, "clone", "-q", str(house.project), str(library))
    git(house, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "module")
    done = house.ak(*RUN, COMMIT, cwd=house.project / "module")
    assert done.code == 0, done
    house.ok("git", "pull", find_name(done.stderr), cwd=house.project / "module")


def test_a_folder_of_a_repository_works_and_shows_no_other_file(either: Machine, tmp_path: Path) -> None:
    house = enter(either, tmp_path)
    house.write("sub/deeper/file", "x\n")
    git(house, "add", ".")
    before = look(house.project / ".git")
    script = (
        "pwd; git status --short; echo 2 > new.py; echo 3 >> code.py; git add new.py code.py; git commit -qm sub;"
        "git show --stat --format= HEAD; git status --short; cat /workspace/new.py;"
        "ls -A ../other ../README || ls -A .."
    )
    done = house.ak(*RUN, script, cwd=house.project / "sub")
    folder = str(house.project / "sub").encode()
    assert done.stdout.startswith(folder + b"\nA  deeper/file\n"), done
    assert b" sub/code.py     | 1 +\n sub/deeper/file | 1 +\n sub/new.py      | 1 +\n" in done.stdout
    assert done.stdout.endswith(b"2\n.git\nsub\n")
    assert look(house.project / ".git") == before
    name = find_name(done.stderr)
    house.ok("git", "pull", name, cwd=house.project / "sub")
    names = git(house, "ls-tree", "-r", "--name-only", f"refs/k8e/{name}/heads/main").split()
    assert names == ["README", "other/text", "sub/code.py", "sub/deeper/file", "sub/new.py"], "nothing was deleted"
    git(house, "update-index", "--index-version", "4")
    kept = house.ak("run", "--keep", *STRICT, "git", "status", "--short", cwd=house.project / "sub")
    assert kept.stdout == b" M code.py\nA  deeper/file\n?? new.py\n"
    (sandbox,) = house.object("sandbox", "list")["sandboxes"]
    assert house.ok("exec", sandbox["name"], "git", "rev-parse", "--show-prefix") == "sub/\n"
    house.ok("sandbox", "remove", sandbox["name"])


def test_a_folder_of_a_linked_worktree_or_of_a_submodule_works(either: Machine, tmp_path: Path) -> None:
    house = enter(either, tmp_path)
    tree, library = house.project / ".worktrees" / "tree", house.home / "library"
    git(house, "worktree", "add", "-q", "-b", "linked", str(tree))
    git(house, "config", "extensions.worktreeConfig", "true")
    git(house, "config", "--worktree", "http.extraHeader", "hush-hush", cwd=tree)
    git(house, "clone", "-q", str(house.project), str(library))
    git(house, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "module")
    before = look(house.project / ".git")
    for top, branch in ((tree, "linked"), (house.project / "module", "main")):
        script = (
            "git rev-parse --show-toplevel --show-prefix; git status --short; git config http.extraHeader || true;"
            "echo 3 >> code.py; git commit -qam sub; git show --stat --format= HEAD | cat; git status --short;"
            f"git checkout -q -b other; git checkout -q {branch}; git log --format=%s -1"
        )
        done = house.ak(*RUN, script, cwd=top / "sub")
        assert done.stdout.decode().splitlines() == [
            str(top),
            "sub/",
            " sub/code.py | 1 +",
            " 1 file changed, 1 insertion(+)",
            "sub",
        ], done
        assert look(house.project / ".git") == before
        name = find_name(done.stderr)
        house.ok("git", "pull", name, cwd=top / "sub")
        names = git(house, "ls-tree", "-r", "--name-only", f"refs/k8e/{name}/heads/{branch}", cwd=top).split()
        assert names == ["README", "other/text", "sub/code.py"], "nothing was deleted"
        done = house.ak("run", *STRICT, "git", "status", "--short", cwd=top / "sub")
        assert done.stdout == b" M code.py\n", done
        before = look(house.project / ".git")


def test_runs_at_the_same_time_do_not_see_each_other(house: House) -> None:
    def run(number: int) -> bytes:
        return house.ak(*RUN, f"git checkout -q -b b{number}; git commit -q --allow-empty -m n{number}").stderr

    with ThreadPoolExecutor(3) as pool:
        names = [find_name(said) for said in pool.map(run, range(3))]
        list(pool.map(lambda name: house.ok("git", "pull", name), names))
    for number, name in enumerate(names):
        refs = git(house, "for-each-ref", "--format=%(refname) %(subject)", f"refs/k8e/{name}")
        assert refs == f"refs/k8e/{name}/heads/b{number} n{number}\n"


def test_a_client_that_is_killed_leaves_no_sandbox(house: House) -> None:
    """Also while the sandbox waits for its client."""
    command = [str(AGENTKERNEL), *RUN, "git commit -q --allow-empty -m x; echo done; exec sleep 600"]
    with subprocess.Popen(
        command, env=house.env, cwd=house.project, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"done\n"
        run.kill()
    wait_until(lambda: house.object("sandbox", "list")["sandboxes"] == [])


def test_commits_of_a_run_that_is_not_followed_to_its_end_are_kept_or_said_to_be_lost(house: House) -> None:
    commit = "git checkout -qb $0; git commit -q --allow-empty -m x; echo done; while echo more; do sleep 0.2; done"

    def begin(branch: str, stdout: int) -> subprocess.Popen[bytes]:
        command = [str(AGENTKERNEL), *RUN, commit, branch]
        return subprocess.Popen(
            command,
            env=house.env,
            cwd=house.project,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    with begin("piped", subprocess.PIPE) as run:  # as in `agentkernel run ... | head -1`
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == b"done\n"
        run.stdout.close()
        name = find_name(run.stderr.read())
    assert run.returncode == -signal.SIGPIPE
    assert house.object("git", "pull", name)["refs"][0]["ref"] == f"refs/k8e/{name}/heads/piped"
    with open("/dev/full", "wb") as full, begin("full", full.fileno()) as run:
        assert run.stderr is not None
        said = run.stderr.read()
        assert b"[output_lost]" in said
    assert house.object("git", "pull", find_name(said))["refs"][0]["ref"].endswith("/heads/full")
    with begin("lost", subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == b"done\n"
        stop(house.daemon_pid, signal.SIGKILL)
        said = run.stderr.read()
    assert b"[connection_lost]" in said
    assert b"if it committed, that is lost with its sandbox\n" in said
    wait_until(lambda: house.object("sandbox", "list")["sandboxes"] == [])


def test_a_repository_elsewhere_is_believed_only_if_it_leads_back(house: House) -> None:
    """A folder that was unpacked from anywhere must not name another repository of the user's."""
    tree, thief = house.home / "tree", house.home / "thief"
    git(house, "worktree", "add", "-q", "-b", "linked", str(tree))
    made = thief / "worktrees" / "tree"  # as a linked worktree has it in its repository
    made.mkdir(parents=True)
    for name, content in (
        ("HEAD", "ref: refs/heads/main"),
        ("commondir", "../../../work/.git"),
        ("gitdir", "../../.git"),
    ):
        (made / name).write_text(f"{content}\n")
    others = (f"gitdir: {house.project / '.git'}\n", "gitdir: ../work/.git\n", "gitdir: worktrees/tree\n")
    for text in ((tree / ".git").read_text(), *others):
        (thief / ".git").write_text(text)
        policy = json.loads(house.ok("run", "--dry-run", "--json", *CLAUDE, "true", cwd=thief))
        assert [mount["source"] for mount in policy["mounts"]] == [str(thief)], text
        assert house.ak(*RUN, "git log", cwd=thief).code == 128
    wait_until(lambda: house.object("sandbox", "list")["sandboxes"] == [])
    (thief / ".git").unlink()
    git(house, "init", "-q", cwd=house.home)  # a home is no project, and its history no project's
    policy = json.loads(house.ok("run", "--dry-run", "--json", *CLAUDE, "true", cwd=thief))
    assert [mount["source"] for mount in policy["mounts"]] == [str(thief)]


@pytest.mark.parametrize("folder", [".", "sub"])
def test_a_sub_agent_sees_nothing_of_the_machines_repository(either: Machine, tmp_path: Path, folder: str) -> None:
    """Its parent's copy was cleaned of credentials for the parent only."""
    house = enter(either, tmp_path)
    with (house.project / ".git/config").open("a") as config:
        config.write('[remote "origin"]\n\turl = https://ann:pa55@example.com/x.git\n')
    parent = f"parent-of-{len(folder)}"
    before = look(house.project / ".git")
    house.ok("sandbox", "create", parent, *CLAUDE, cwd=house.project / folder)
    copies = ["/workspace/.git"] if folder == "." else ["/workspace/.git", f"{house.project}/.git"]
    script = f"cd /workspace; ls -d README code.py; find {' '.join(copies)}; touch .git/x; ls .git; cat .git/config"
    for words, made in (((), ["x"]), (("--read-only",), [])):
        child = house.k8e("sandbox", "subagent", parent, *words).json["session_id"]
        seen = house.run(script, "--session-id", child, "--raw")
        file = "README" if folder == "." else "code.py"
        assert seen.stdout.decode().splitlines() == [file, *copies, *made], seen
    assert look(house.project / ".git") == before
    house.ok("sandbox", "remove", parent)
