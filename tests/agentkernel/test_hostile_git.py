"""The inside of a sandbox is the attacker's: all that its git says on `agentkernel git pull`, and all that is in its
copy of the repository. The machine's git runs nothing of it, and takes nothing that is broken or dangerous."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e.cli.agentkernel.git.bundle import is_safe
from k8e.cli.agentkernel.git.configuration import find_user, hide_credentials, hide_secrets, list_files
from k8e.cli.agentkernel.git.repository import CONFIG, Repository
from k8e.cli.process import Failure
from tests.agentkernel.house import House
from tests.agentkernel.repository import CLAUDE, PROGRAM, git, look, make_repository
from tests.agentkernel.runtimes import open_machine
from tests.cli.machine import Machine, wait_until
from tests.sandboxes import needs_root

SANDBOX = "cage"
BUNDLES = ".local/state/agentkernel/git"
PATIENCE = 400  # seconds for a pull of as much as there may be: more than the command inside has


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with open_machine("native") as machine:
        yield machine


@pytest.fixture(scope="module")
def cage(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One sandbox for all attacks."""
    house = House(machine.folder, tmp_path_factory.mktemp("hostile"))
    make_repository(house)
    house.ok("sandbox", "create", SANDBOX, *CLAUDE)
    yield house
    house.ok("sandbox", "remove", SANDBOX)


@pytest.fixture
def house(cage: House) -> House:
    """Without what a test before left."""
    shutil.rmtree(cage.home / BUNDLES, ignore_errors=True)
    return cage


def attack(house: House, script: str) -> None:
    """Begins with the copy as it was at first, but for the commits that it has."""
    words = (
        "rm -f ~/.venv/bin/git",
        "git checkout -qf main",
        "git for-each-ref --format='delete %(refname)' | grep -v /main$ > /tmp/refs || true",
        "git update-ref --stdin < /tmp/refs",
        script,
    )
    done = house.ak("exec", SANDBOX, "bash", "-ec", "\n".join(words))
    assert done.code == 0, done


def expect_refusal(house: House, code: str) -> str:
    """Nothing has changed then, and the machine's git works."""
    before = look(house.project / ".git")
    said = house.refusal("git", "pull", SANDBOX, timeout=PATIENCE)
    assert f"[{code}]" in said, said
    assert look(house.project / ".git") == before
    check(house)
    return said


def check(house: House) -> None:
    """The user's next commands run nothing of the sandbox's."""
    git(house, "status")
    git(house, "fsck", "--strict")
    git(house, "log", "--all", "--oneline")
    assert not (house.project / "OWNED").exists()
    assert not (house.home / "OWNED").exists()
    left = [path.name for path in (house.home / BUNDLES).glob("*")]
    assert left == [], "what was unpacked is gone"


# Makes objects as no git would, and a branch with a commit of them.
FORGE = """
import subprocess, sys

def put(kind, content):
    command = ["git", "hash-object", "-w", "-t", kind, "--literally", "--stdin"]
    return subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode().strip()

mode, name, content = sys.argv[1:]
blob = put("blob", content.encode())
tree = put("tree", mode.encode() + b" " + name.encode() + b"\\0" + bytes.fromhex(blob))
people = "author x <x@x> 1 +0000\\ncommitter x <x@x> 1 +0000"
commit = put("commit", f"tree {tree}\\n{people}\\n\\nx\\n".encode())
open(".git/refs/heads/evil", "w").write(commit + "\\n")
"""
PEOPLE = "author x <x@x> 1 +0000\ncommitter x <x@x> 1 +0000"
MODULE = '[submodule "{}"]\n\tpath = x\n\turl = {}\n{}'
URL = "https://example.com/x"
# What would harm whom checks it out: mode, name and content of a file.
HOSTILE = {
    "a .git in a tree": ("100644", ".git", "x"),
    "a .GIT in a tree": ("100644", ".GIT", "x"),
    "a .. in a tree": ("100644", "..", "x"),
    "a path in a tree": ("100644", "a/../../b", "x"),
    "an option in .gitmodules": ("100644", ".gitmodules", MODULE.format("x", "-u./payload", "")),
    "a way out in .gitmodules": ("100644", ".gitmodules", MODULE.format("../../x", URL, "")),
    "a program in .gitmodules": ("100644", ".gitmodules", MODULE.format("x", URL, "\tupdate = !touch OWNED\n")),
    "a .gitmodules that is a link": ("120000", ".gitmodules", "/etc/passwd"),
}


@needs_root
@pytest.mark.parametrize("way", HOSTILE)
def test_dangerous_objects_are_refused(house: House, way: str) -> None:
    attack(house, "true")
    done = house.ak("exec", SANDBOX, "python3", "-c", FORGE, *HOSTILE[way])
    assert done.code == 0, done
    expect_refusal(house, "git_objects_refused")


# A sandbox's git that says what it likes. It is asked for refs, for commits that it has, and for a pack.
LIAR = """
mkdir -p ~/.venv/bin
cat > ~/.venv/bin/git <<'END'
#!/bin/bash
case "$*" in
*show-ref*) {refs};;
*cat-file*) {commits};;
*pack-objects*) {pack};;
esac
END
chmod +x ~/.venv/bin/git
"""
COMMIT = "echo 1111111111111111111111111111111111111111 refs/heads/new"
LIES = {
    "no pack": ("git_objects_refused", COMMIT, "cat", "echo nonsense"),
    "an empty pack": ("git_objects_refused", COMMIT, "cat", "true"),
    "a pack without the commit": ("git_failed", COMMIT, "cat", "/usr/bin/git pack-objects --stdout -q < /dev/null"),
    "a pack that claims terabytes": (
        "git_objects_refused",
        COMMIT,
        "cat",
        r"printf 'PACK\0\0\0\2\0\0\0\1\xbf\xff\xff\xff\xff\xff\x7f'; head -c 100000 /dev/zero",
    ),
    "refs without an end": (
        "git_too_large",
        "yes 1111111111111111111111111111111111111111 refs/heads/x",
        "cat",
        "true",
    ),
    "a pack without an end": ("git_too_large", COMMIT, "cat", "cat /dev/zero"),
    "commits without an end": ("git_too_large", COMMIT, "yes", "true"),
    "a git that fails": ("git_failed", COMMIT, "exit 3", "true"),
    "a branch that is a folder of another": (
        "git_failed",
        "for r in a a/b; do echo $(/usr/bin/git rev-parse main) refs/heads/$r; done",
        "cat",
        "/usr/bin/git pack-objects --stdout -q < /dev/null",
    ),
}


@needs_root
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("way", LIES)
def test_a_git_that_lies_is_refused(house: House, way: str) -> None:
    code, refs, commits, pack = LIES[way]
    attack(house, LIAR.format(refs=refs, commits=commits, pack=pack))
    expect_refusal(house, code)


NAMES = (
    *(
        "refs/heads/../../config",
        "refs/heads/a..b",
        "refs/heads/x.lock",
        "refs/heads/.x",
        "refs/heads/-x",
        "refs/heads/",
    ),
    *(
        "refs/heads//x",
        "refs/heads/x/",
        "refs/heads/a b",
        "refs/heads/a:b",
        "refs/heads/a^b",
        "refs/heads/@",
        "refs/x/y",
    ),
    *(
        "refs/heads/\x1b]0;x\x07",
        "refs/heads/\u202e",
        "refs/heads/a@{1}",
        "refs/heads/a\\b",
        "refs/heads/x\ty",
        "HEAD2",
    ),
    *(
        "refs/stash/x",
        "refs/heads",
        "FETCH_HEAD",
        "../x",
        "/etc/passwd",
        "refs/k8e/x",
        "refs/heads/" + "x" * 300,
        "",
        "\ufffd",
    ),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_no_names(name: str) -> None:
    assert not is_safe(name)


@pytest.mark.parametrize("name", ["refs/heads/x", "refs/tags/v1.0-rc+1", "refs/heads/a/b/ö", "refs/stash", "HEAD"])
def test_usual_names_are(name: str) -> None:
    assert is_safe(name)


@needs_root
def test_names_that_are_none_are_counted_and_left_out(house: House) -> None:
    names = " ".join(f"'{name}'" for name in NAMES if name.isprintable() and name)
    attack(
        house,
        LIAR.format(
            refs=f"for n in {names}; do echo $(/usr/bin/git rev-parse main) $n; done", commits="cat", pack="true"
        ),
    )
    before = look(house.project / ".git")
    done = house.ak("git", "pull", SANDBOX)
    assert done.code == 0, done
    assert b"refs were left out" in done.stderr
    assert look(house.project / ".git") == before


@needs_root
def test_nothing_of_the_copy_is_run_or_followed(house: House) -> None:
    """Configuration, hooks, alternates, attributes and links of the copy: the good commit comes back all the same."""
    secret = house.home / "secret"
    secret.write_text("secret\n")
    script = f"""
printf '%s' {PROGRAM!r} | sed 's/\\\\n/\\n/g; s/\\\\t/\\t/g' >> .git/config
git config filter.x.smudge 'touch OWNED'
git config filter.x.clean 'touch OWNED'
git config core.hooksPath .git/hooks
git config core.alternateRefsCommand 'touch OWNED'
git config uploadpack.packObjectsHook 'touch OWNED'
for hook in post-checkout reference-transaction post-commit pre-push; do
  printf '#!/bin/sh\\ntouch /workspace/OWNED\\n' > .git/hooks/$hook; chmod +x .git/hooks/$hook
done
echo '* filter=x' > .git/info/attributes
echo {house.project}/.git/objects > .git/objects/info/alternates
ln -sfn {secret} .git/logs/HEAD
ln -sfn {house.home} .git/refs/tags/link
rm -f OWNED
"""
    attack(house, "git checkout -qb good; git commit -q --allow-empty -m good")
    done = house.ak("exec", SANDBOX, "bash", "-c", script)
    assert done.code == 0, done
    house.ok("git", "pull", SANDBOX)
    (house.project / "OWNED").unlink(missing_ok=True)  # by the git inside
    assert git(house, "log", "-1", "--format=%s", f"refs/k8e/{SANDBOX}/heads/good") == "good\n"
    assert secret.read_text() == "secret\n"
    check(house)


@needs_root
def test_a_project_from_anywhere_runs_nothing_when_a_command_is_run_in_it(machine: Machine, tmp_path: Path) -> None:
    """An unpacked folder whose .git names programs: `agentkernel run` looks at its files and never starts git there.
    Hooks of the project are not run by a pull."""
    house = House(machine.folder, tmp_path)
    make_repository(house)
    git_dir = house.project / ".git"
    own = (git_dir / "config").read_text()
    programs = f"{PROGRAM}\tsshCommand = touch OWNED\n\tpager = touch OWNED\n"
    programs += '[remote "o"]\n\turl = ssh://x/y\n\tpromisor = true\n\tuploadpack = touch OWNED\n'
    programs += '[extensions]\n\tpartialClone = o\n[url "ssh://x/"]\n\tinsteadOf = /\n'
    (git_dir / "config").write_text(own + programs)
    for name in ("reference-transaction", "post-checkout", "pre-auto-gc", "post-index-change"):
        hook = git_dir / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/OWNED\n")
        hook.chmod(0o755)
    script = "rm -f .git/hooks/*; git -c core.fsmonitor=false commit -q --allow-empty -m inside; rm -f OWNED"
    done = house.ak("run", *CLAUDE, "sh", "-c", script)
    assert b"agentkernel git pull" in done.stderr, done
    assert not (house.project / "OWNED").exists()
    name = done.stderr.split(b"git pull ")[1].split()[0].decode()
    refused = house.ak("git", "pull", name)  # the project's own configuration leads the fetch elsewhere
    assert refused.code == 1
    (git_dir / "config").write_text(own)
    house.ok("git", "pull", name)
    assert not list(tmp_path.rglob("OWNED"))


@needs_root
def test_a_project_from_anywhere_names_no_program_for_objects_that_it_lacks(machine: Machine, tmp_path: Path) -> None:
    """A partial clone gets such an object from its promisor, with the program that its configuration names; the file
    transport, which a pull uses, runs that one."""
    house = House(machine.folder, tmp_path)
    make_repository(house)
    folder = tmp_path / BUNDLES
    folder.mkdir(parents=True)
    git(house, "bundle", "create", "-q", str(folder / "run-1.bundle"), "refs/heads/main")
    forged = house.write(
        "commit", "tree {}\nparent {}\n{}\n\nx\n".format(git(house, "write-tree").strip(), "1" * 40, PEOPLE)
    )
    broken = git(house, "hash-object", "-w", "-t", "commit", "--literally", str(forged))
    ref = house.project / ".git/refs/k8e/run-1/heads/main"
    ref.parent.mkdir(parents=True)
    ref.write_text(broken)
    with (house.project / ".git/config").open("a") as config:
        config.write("[core]\n\trepositoryFormatVersion = 1\n[extensions]\n\tpartialClone = o\n")
        config.write(f'[remote "o"]\n\tpromisor = true\n\turl = /tmp\n\tuploadpack = touch {tmp_path}/OWNED;\n')
    house.ok("git", "pull", "run-1")
    assert git(house, "rev-parse", "refs/k8e/run-1/heads/main") == git(house, "rev-parse", "main")
    assert not list(tmp_path.rglob("OWNED"))


@needs_root
def test_a_bundle_that_was_changed_is_refused(house: House) -> None:
    folder = house.home / BUNDLES
    folder.mkdir(parents=True, exist_ok=True)
    for content in (
        b"",
        b"nonsense\n",
        b"# v2 git bundle\n",
        b"# v2 git bundle\n" + b"x" * 2000,
        b"# v2 git bundle\nx refs/heads/y\n\n",
    ):
        (folder / "run-1.bundle").write_bytes(content)
        assert "[git_bundle_damaged]" in house.refusal("git", "pull", "run-1")
    (folder / "run-1.bundle").unlink()
    os.symlink("/etc/passwd", folder / "run-1.bundle")
    assert "[sandbox_not_found]" in house.refusal("git", "pull", "run-1")
    (folder / "run-1.bundle").unlink()


@needs_root
def test_commits_that_nobody_asks_for_go_after_a_while(house: House) -> None:
    folder = house.home / BUNDLES
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(25):
        (folder / f"run-{number}.bundle").write_bytes(b"x")
        os.utime(folder / f"run-{number}.bundle", (time.time() - number * 60,) * 2)
    for name in (".quarantine-x", "run-old.bundle"):
        (folder / name).mkdir() if name.startswith(".") else (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    house.refusal("git", "pull", "unknown")
    left = {path.name for path in folder.iterdir()}
    assert left == {f"run-{number}.bundle" for number in range(20)}
    for path in folder.iterdir():
        path.unlink()


@needs_root
def test_commits_of_another_project_are_refused(house: House, machine: Machine, tmp_path: Path) -> None:
    other = House(machine.folder, tmp_path)
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "another history")
    done = house.ak("run", *CLAUDE, "sh", "-ec", "git commit -q --allow-empty -m x")
    name = done.stderr.split(b"git pull ")[1].split()[0].decode()
    bundle = house.home / BUNDLES / f"{name}.bundle"
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    target = other.home / BUNDLES
    target.mkdir(parents=True)
    bundle.rename(target / bundle.name)
    assert "[git_other_repository]" in other.refusal("git", "pull", name)


@needs_root
def test_a_repository_that_borrows_gets_nothing(house: House, machine: Machine, tmp_path: Path) -> None:
    """A project from anywhere can name the objects of any other repository of the user's."""
    other = House(machine.folder, tmp_path)
    git(other, "clone", "-q", "--shared", str(house.project), ".")
    folder = tmp_path / BUNDLES
    folder.mkdir(parents=True)
    (folder / "run-1.bundle").write_bytes(b"# v2 git bundle\n\n")
    assert "[git_borrowed]" in other.refusal("git", "pull", "run-1")
    (other.project / ".git/objects/info/alternates").unlink()
    assert "[git_borrowed]" not in other.refusal("git", "pull", "run-1")
    for name in ("objects", "objects/info", "objects/ab", "refs", "refs/k8e", "refs/k8e/run-1", "commondir"):
        path = other.project / ".git" / name
        kept = path.with_name("kept")
        if path.exists():
            path.rename(kept)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(house.project / ".git")
        assert f"/.git/{name}\n" in other.refusal("git", "pull", "run-1")
        path.unlink()
        if kept.exists():
            kept.rename(path)


@needs_root
def test_a_sandbox_that_is_removed_meanwhile_ends_the_pull(house: House) -> None:
    house.ok("sandbox", "create", "doomed", *CLAUDE)
    waiting = LIAR.format(refs=COMMIT, commits="cat", pack="touch /workspace/begun; sleep 600")
    assert house.ak("exec", "doomed", "bash", "-ec", waiting).code == 0
    before = look(house.project / ".git")
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(house.ak, "git", "pull", "doomed")
        wait_until((house.project / "begun").exists)
        house.ok("sandbox", "remove", "doomed")
        assert pulling.result().code == 1
    assert look(house.project / ".git") == before
    check(house)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\turl = https://u:p@host/x.git", "\turl = https://host/x.git"),
        ("\turl = https://token@host", "\turl = https://host"),
        ("\turl = https://a@b@host/x@y", "\turl = https://host/x@y"),
        ("\turl = git@host:x.git", "\turl = git@host:x.git"),
        ('[url "https://u:p@host/"]', '[url "https://host/"]'),
        ("a = http://x@y/ https://z@w/", "a = http://y/ https://w/"),
        ("\tname = x", "\tname = x"),
    ],
)
def test_addresses_are_shown_without_credentials(line: str, shown: str) -> None:
    assert hide_credentials(line) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[http] extraheader = SECRET\n\tx = 1\n", ["[http]", "\tx = 1"]),
        ('[a] [http "https://u:SECRET@h/]=\\""]extraHeader=SECRET\n', ['[a] [http "https://h/]=\\""]']),
        (
            '[credential]\n\thelper = "!f() { echo password=SECRET; \\\nSECRET; }; f"\n\tx = 1',
            ["[credential]", "\tx = 1"],
        ),
        ("\ufeff[github] oauthToken = SECRET\r\n", ["[github]"]),
        ("[hub]\n\ttoken = a\x0cSECRET\n", ["[hub]"]),
        ("[sendemail]\n\tsmtpPass = SECRET\n#\ttoken = SECRET", ["[sendemail]"]),
        ("[http]\n\tproxy = u:SECRET@h:80\n\tproxy = h:80", ["[http]", "\tproxy = h:80"]),
        ('[alias]\n\tx = "!f() { \\\n echo token=1; }; f"', ["[alias]", '\tx = "!f() { \\', ' echo token=1; }; f"']),
    ],
)
def test_values_that_are_secrets_are_not_shown(text: str, shown: list[str]) -> None:
    assert list(hide_secrets(text)) == shown


@pytest.mark.parametrize("name", ["Ann", 'Ann "Q" O\'Nym', "back\\slash", "Ann # 1; 2", " a  b ", "Ännchen"])
def test_the_users_name_is_what_git_has(tmp_path: Path, name: str) -> None:
    """However git wrote it."""
    file = tmp_path / ".gitconfig"
    subprocess.run(["git", "config", "--file", file, "user.name", name], check=True)
    file.write_text(file.read_text() + '[other]\n\tname = x\n[user] email = "ann@" x ; or not\n')
    assert find_user({"HOME": str(tmp_path)}) == {"name": name, "email": "ann@ x"}


def test_a_line_without_an_end_is_read_all_the_same() -> None:
    """A project from anywhere has any configuration."""
    assert hide_credentials("a" + "://u@h " * 100_000) == "a" + "://h " * 100_000
    for line in ("[" * 100_000, "[]" * 100_000):
        assert list(hide_secrets(line)) == [line]


def test_configurations_of_submodules_and_worktrees_are_shown_without_secrets(tmp_path: Path) -> None:
    repository = Repository(str(tmp_path), f"{tmp_path}/.git", elsewhere=False)
    secret, plain = "[http]\n\textraheader = SECRET\n\tx = 1\n", "[core]\n\tbare = false\n"
    hidden = (
        "modules/a/config",
        "modules/a/modules/objects/b/config",
        "config.worktree",
        "worktrees/w/config.worktree",
    )
    for name in (*hidden, "modules/plain/config", "config"):
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("HEAD").touch()
        path.write_text(plain if "plain" in name else secret)
    files = {file.dest: content for file, content in list_files(repository, str(tmp_path)) or []}
    assert set(files) == {f"/workspace/.git/{name}" for name in (*hidden, "config")}
    assert files["/workspace/.git/modules/a/config"] == b"[http]\n\tx = 1\n"
    assert not [name for name, content in files.items() if b"SECRET" in content]
    for place in (".git/config", ".git/modules/a/config"):
        (tmp_path / place).write_text(secret + "#" * CONFIG)
        with pytest.raises(Failure, match="may have credentials"):
            list_files(repository, str(tmp_path))
        (tmp_path / place).unlink()
        (tmp_path / place).symlink_to("real")
        with pytest.raises(Failure, match="may have credentials"):
            list_files(repository, str(tmp_path))
        (tmp_path / place).unlink()
