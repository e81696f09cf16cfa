"""Brings a bundle into the project's repository, once its objects were checked.

The objects come from a sandbox. They are unpacked first in a repository that is made for them, with a configuration of
ours, outside of the project, under limits of memory and time; `git index-pack --strict` looks at each of them (broken
objects, `.git` and `..` in trees, `.gitmodules` that name programs or options, missing objects). Only then does the
project's git fetch them from there, with hooks off: what it gets is objects, and refs below refs/k8e/.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile

from k8e.cli.agentkernel.git.bundle import LARGEST, bundle_folder, join_lines, name_locally, read_header, storing
from k8e.cli.agentkernel.git.repository import read_bytes
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from k8e.cli.agentkernel.git.bundle import Bundle

_MEMORY = 4 << 30
_FILE = 8 << 30
_SECONDS = 600
_SHOWN = 2000
# Large files are not held in memory, and packs not mapped as a whole: the limits are for what a sandbox made up.
_FRUGAL = {
    "core.bigFileThreshold": "16m",
    "core.packedGitWindowSize": "16m",
    "core.packedGitLimit": "256m",
    "core.deltaBaseCacheLimit": "96m",
    "pack.threads": "1",
    "pack.windowMemory": "128m",
}
# Of the project's git, over its own configuration.
_SAFE = {
    **_FRUGAL,
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.logAllRefUpdates": "false",
    "fetch.fsckObjects": "true",
    "transfer.fsckObjects": "true",
    "fetch.recurseSubmodules": "false",
    "fetch.showForcedUpdates": "false",  # it would walk the history of the project's own refs
    "fetch.writeCommitGraph": "false",
    "fetch.prune": "false",
    "fetch.pruneTags": "false",
    "protocol.file.allow": "always",
    "maintenance.auto": "false",
    "gc.auto": "0",
}


def find_git() -> str:
    for folder in os.environ.get("PATH", "/usr/bin:/bin").split(":"):
        path = os.path.join(folder, "git")
        if folder.startswith("/") and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise Failure("git_missing", "there is no git on this machine", hint="install it: apt-get install git")


class Quarantine:
    """`git_dir` is the project's directory of objects and refs."""

    def __init__(self, git_dir: str) -> None:
        self._git = find_git()
        self._git_dir = git_dir

    def bring(self, path: str, sandbox: str) -> dict[str, str]:
        """Returns the refs that the project has now, and their commits."""
        limit_ourselves()
        self._check_own(sandbox)
        with storing(), open(path, "rb", buffering=0) as file:
            bundle = read_header(file)
            with tempfile.TemporaryDirectory(prefix=".quarantine-", dir=bundle_folder()) as folder:
                self._make(folder, bundle)
                self._check(folder, bundle, file)
                refs = {name_locally(name, sandbox): commit for name, commit in bundle.refs.items()}
                updates = (f"create {name} {commit}" for name, commit in refs.items())
                self._run(folder, "update-ref", "--stdin", stdin=join_lines(updates))
                self._fetch(folder, f"+refs/k8e/{sandbox}/*:refs/k8e/{sandbox}/*")
        return refs

    def _check_own(self, sandbox: str) -> None:
        """Refuses a repository that has its parts elsewhere. Objects of another one could be had by a sandbox that
        knows their names and builds upon them, and git would write through links."""
        if os.path.lexists(f"{self._git_dir}/objects/info/alternates"):
            hint = "git repack -a -d && rm .git/objects/info/alternates; then it has its own"
            raise Failure("git_borrowed", "this repository borrows objects of another one", hint=hint)
        paths = [f"{self._git_dir}/{name}" for name in ("objects", "refs", "refs/k8e", f"refs/k8e/{sandbox}")]
        with os.scandir(paths[0]) as entries:
            paths += [entry.path for entry in entries]
        parts = [path for path in paths if os.path.islink(path)]
        parts += [path for path in (f"{self._git_dir}/commondir",) if os.path.lexists(path)]
        if parts:
            error, hint = "this repository has parts elsewhere", "run it in a clone: git clone"
            raise Failure("git_borrowed", error, detail=parts[0], hint=hint)

    def _make(self, folder: str, bundle: Bundle) -> None:
        objects = os.path.join(self._git_dir, "objects")
        if "\n" in objects:
            raise Failure("git_failed", "the project's path has a line break in it", hint="rename the folder")
        words = ("init", "--quiet", "--bare", "--template=", f"--object-format={bundle.object_format}", folder)
        self._call([self._git, *words], clean_environment())
        with open(f"{folder}/config", "a", encoding="utf-8") as file:
            for key, value in _FRUGAL.items():
                section, _, name = key.partition(".")
                file.write(f"[{section}]\n\t{name} = {value}\n")
        os.makedirs(f"{folder}/objects/info", exist_ok=True)
        with open(f"{folder}/objects/info/alternates", "wb") as alternates:
            alternates.write(os.fsencode(objects) + b"\n")
        shallow = read_bytes(f"{self._git_dir}/shallow", LARGEST)
        if shallow:
            with open(f"{folder}/shallow", "wb") as copy:
                copy.write(shallow)

    def _check(self, folder: str, bundle: Bundle, objects: BinaryIO) -> None:
        """`index-pack` reads from where the header ended."""
        known = self._run(
            folder, "cat-file", "--batch-check=%(objectname)", stdin=join_lines(bundle.needed)
        ).splitlines()
        if missing := set(bundle.needed) - {commit.decode("ascii", "replace") for commit in known}:
            hint = "run it in the folder of the project that the sandbox had"
            error = "the commits build on others that this repository does not have"
            raise Failure("git_other_repository", error, detail=sorted(missing)[0], hint=hint)
        words = ("index-pack", "--stdin", "--fix-thin", "--strict", f"--max-input-size={LARGEST}")
        try:
            self._run(folder, *words, source=objects)
        except Failure as error:
            hint = "the sandbox made them so; look at its files instead: agentkernel cp"
            raise Failure("git_objects_refused", "objects are refused", detail=error.detail, hint=hint) from error

    def _fetch(self, folder: str, refspec: str) -> None:
        options = [word for key, value in _SAFE.items() for word in ("-c", f"{key}={value}")]
        words = (
            "fetch",
            "--quiet",
            "--force",
            "--atomic",
            "--no-tags",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"GIT_DIR": self._git_dir, "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1"}
        environment["GIT_ALLOW_PROTOCOL"] = "file"  # whatever the project's configuration makes of the path
        environment["GIT_NO_LAZY_FETCH"] = "1"  # from a promisor remote of the project, with the program that it names
        self._call([self._git, *options, *words, folder, refspec], environment)

    def _run(self, folder: str, *words: str, stdin: bytes = b"", source: BinaryIO | None = None) -> bytes:
        argv = [self._git, f"--git-dir={folder}", *words]
        return self._call(argv, clean_environment(), stdin, source)

    def _call(
        self, argv: list[str], environment: dict[str, str], stdin: bytes = b"", source: BinaryIO | None = None
    ) -> bytes:
        try:
            done = subprocess.run(
                argv,
                env=environment,
                cwd=bundle_folder(),
                stdin=source,
                input=None if source else stdin,
                capture_output=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise Failure(
                "git_failed", "git takes too long", detail=argv[-1], hint="bring back fewer commits"
            ) from error
        if done.returncode:
            detail = done.stderr[-_SHOWN:].decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
            raise Failure("git_failed", "git failed", detail=detail, hint="look at the repository: git fsck")
        return done.stdout


def clean_environment() -> dict[str, str]:
    """Nothing of the user's configuration counts for the quarantine."""
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": os.devnull,
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def limit_ourselves() -> None:
    """For this process and those that it starts: a pack of a few kilobytes can claim to be terabytes."""
    for kind, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_FSIZE, _FILE), (resource.RLIMIT_CPU, _SECONDS)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
