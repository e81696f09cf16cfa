"""`agentkernel git pull NAME`: brings the commits of a sandbox into the project's repository, below refs/k8e/NAME/."""

from __future__ import annotations

import os

from k8e.cli.agentkernel.git.bundle import find_bundle, list_bundles, remove_old, storing
from k8e.cli.agentkernel.git.export import Export
from k8e.cli.agentkernel.git.quarantine import Quarantine
from k8e.cli.agentkernel.git.repository import Repository, find_repository, read_refs
from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.plan import look_around
from k8e.cli.agentkernel.sandbox import find
from k8e.cli.process import Failure, print_json, write_all
from k8e.profiles.sandbox_policy import check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def main(parsed: argparse.Namespace) -> int:
    name = check_name(parsed.name)
    repository = find_repository(look_around())
    if repository is None:
        hint = "run it in the folder of the project; `git init` makes a repository"
        raise Failure("git_no_repository", "there is no repository of yours here", hint=hint)
    with storing():
        remove_old()
    refs, left_out = bring_stored(name, repository) or bring_live(name, repository)
    if parsed.json:
        print_json({"ok": True, "name": name, "refs": [{"ref": ref, "commit": commit} for ref, commit in refs.items()]})
        return 0
    for ref, commit in refs.items():
        write_all(1, f"{commit} {ref}\n".encode())
    if left_out:
        say(f"{left_out} refs were left out: their names cannot be brought back")
    say(describe(refs) if refs else f"{name} has nothing that is not here already")
    return 0


def bring_stored(name: str, repository: Repository) -> tuple[dict[str, str], int] | None:
    """Brings what a run left. None: it left nothing."""
    path = find_bundle(name)
    if not path:
        return None
    refs = Quarantine(repository.git_dir).bring(path, name)
    os.unlink(path)
    return refs, 0


def bring_live(name: str, repository: Repository) -> tuple[dict[str, str], int]:
    """Brings what is in a sandbox that is there."""
    try:
        find(name)
    except Failure as error:
        if error.code == "sandbox_not_found":
            error.hint = advise_on_missing(name, repository) or error.hint
        raise
    export = Export(name, read_refs(repository.git_dir))
    refs, left_out = export.find_new()
    if not refs:
        return {}, left_out
    with storing():
        path = export.write(refs)
    try:
        return Quarantine(repository.git_dir).bring(path, name), left_out
    finally:
        os.unlink(path)


def advise_on_missing(name: str, repository: Repository) -> str:
    if any(ref.startswith(f"refs/k8e/{name}/") for ref in read_refs(repository.git_dir)):
        return f"its commits were brought here before: git for-each-ref refs/k8e/{name}"
    stored = list_bundles()
    return f"there are commits of: {', '.join(stored)}" if stored else ""


def describe(refs: dict[str, str]) -> str:
    first = next(iter(refs))
    return f"look at them before you use them: git log -p HEAD..{first}; git merge {first} takes them over"
