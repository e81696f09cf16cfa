"""Takes commits out of a sandbox: its own git, inside, says which refs there are and packs the objects. Everything that
it says was chosen by the sandbox: it is bounded and checked (bundle.py, quarantine.py), and no git of this machine ever
looks into the sandbox's copy of the repository."""

from __future__ import annotations

import os

from k8e.cli.agentkernel.exec import explain
from k8e.cli.agentkernel.git.bundle import (
    LARGEST,
    MOST_REFS,
    Bundle,
    bundle_folder,
    is_safe,
    join_lines,
    remove_old,
    storing,
)
from k8e.cli.agentkernel.git.repository import is_hash, read_refs
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import Failure, ServiceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from k8e.cli.agentkernel.git.repository import Repository

TEXT = 8 << 20  # bytes of what git says
_MOST_BASES = 2000
_SECONDS, _PACK_SECONDS = 60, 300  # of one command inside
_SHOWN = 2000


class Export:
    """`here` are the refs of the project's repository: what it has is not brought back."""

    def __init__(self, sandbox: str, here: dict[str, str]) -> None:
        self._session = SessionName(sandbox)
        self._here = here

    def find_new(self) -> tuple[dict[str, str], int]:
        """Finds the refs that are new or other than here, and how many were left out because of their names."""
        said = self._ask(["git", "show-ref", "--head"], b"", fine=(0, 1))  # 1: there is none
        found: dict[str, str] = {}
        left_out = 0
        for line in said.decode("utf-8", "replace").splitlines():
            commit, _, name = line.partition(" ")
            if not is_hash(commit) or not name.startswith(("HEAD", "refs/heads/", "refs/tags/", "refs/stash")):
                continue
            if self._here.get(name) == commit:
                continue
            if not is_safe(name) or len(found) >= MOST_REFS:
                left_out += 1
                continue
            found[name] = commit
        head = found.pop("HEAD", "")
        if head and head not in {*found.values(), *self._here.values()}:
            found["HEAD"] = head
        return found, left_out

    def write(self, refs: dict[str, str]) -> str:
        """Writes a bundle with these refs. Returns its path, which no other process has."""
        import tempfile

        bundle = Bundle(refs, self._find_bases())
        revisions = [*refs.values(), *(f"^{commit}" for commit in bundle.needed)]
        descriptor, path = tempfile.mkstemp(prefix=".", suffix=".new", dir=bundle_folder())
        try:
            with os.fdopen(descriptor, "wb") as file:
                bundle.write_header(file)
                argv = ["git", "pack-objects", "--revs", "--thin", "--delta-base-offset", "--stdout", "-q"]
                self._stream(argv, join_lines(revisions), file.write, LARGEST, seconds=_PACK_SECONDS)
        except BaseException:
            os.unlink(path)
            raise
        return path

    def _find_bases(self) -> list[str]:
        """Those of our commits that the sandbox has, too."""
        bases = list(dict.fromkeys(self._here.values()))[:_MOST_BASES]
        if not bases:
            return []
        said = self._ask(["git", "cat-file", "--batch-check=%(objectname)"], join_lines(bases))
        there = set(said.decode("ascii", "replace").splitlines())
        return [commit for commit in bases if commit in there]

    def _ask(self, argv: list[str], stdin: bytes, fine: tuple[int, ...] = (0,)) -> bytes:
        pieces: list[bytes] = []
        self._stream(argv, stdin, pieces.append, TEXT, fine=fine)
        return b"".join(pieces)

    def _stream(
        self,
        argv: list[str],
        stdin: bytes,
        take: Callable[[bytes], object],
        limit: int,
        *,
        seconds: int = _SECONDS,
        fine: tuple[int, ...] = (0,),
    ) -> None:
        from binascii import b2a_base64

        wanted: dict[str, object] = {"argv": argv, "timeout": seconds}
        if stdin:
            wanted["stdin_base64"] = b2a_base64(stdin, newline=False).decode("ascii")
        try:
            stream = LocalClient().stream_run(self._session, wanted, feeds=False)
        except ServiceError as error:
            if error.code != "program_not_found":
                raise explain(error, self._session.session_id) from None
            hint = "use an image that has git, such as the image host"
            raise Failure("git_missing", "there is no git in the sandbox", hint=hint) from error
        complaint = b""
        for kind, data in stream.output():
            if kind == 1:
                limit -= len(data)
                if limit < 0:
                    hint = "bring back fewer commits, or copy the files: agentkernel cp"
                    raise Failure("git_too_large", "what the sandbox's git says is too much", hint=hint)
                take(data)
            else:
                complaint = (complaint + data)[-_SHOWN:]
        if stream.result.exit_code not in fine:
            detail = complaint.decode("utf-8", "replace").strip()
            hint = f"look at the repository inside: agentkernel exec {self._session.session_id} git status"
            raise Failure("git_failed", "git in the sandbox failed", detail=detail, hint=hint)


def find_commits(sandbox: str, repository: Repository) -> tuple[list[str], int]:
    """Returns the names of refs that can be brought back, and how many cannot."""
    refs, left_out = Export(sandbox, read_refs(repository.git_dir)).find_new()
    return list(refs), left_out


def keep_commits(sandbox: str, repository: Repository) -> tuple[list[str], int]:
    """Stores the commits of a sandbox that is about to go, for `agentkernel git pull`. Returns what `find_commits`
    does."""
    export = Export(sandbox, read_refs(repository.git_dir))
    refs, left_out = export.find_new()
    if refs:
        with storing():
            remove_old()
            os.replace(export.write(refs), os.path.join(bundle_folder(), f"{sandbox}.bundle"))
    return list(refs), left_out
